"""How many bytes of bodies may be in memory at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

FREE_BYTES = 256 << 10
"""What each body may have without asking: small ones never wait, and their number is bounded elsewhere."""


class Budget:
    """Bytes that bodies share; whoever comes first is served first.

    A body whose length is known takes it at once. One that grows takes more as it comes, but only one of
    those at a time: every other holder can finish without taking more, so nobody waits for ever.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.waits = 0
        self.growing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def hold(self) -> Hold:
        """A body's part, to be used as a context manager: it is given back on exit."""
        return Hold(self)

    async def take(self, nbytes: int) -> None:
        """Wait for so many bytes. One that alone is more than the capacity waits until it is alone."""
        if not self._waiting and self._fits(nbytes):
            self.used_bytes += nbytes
            return
        self.waits += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(nbytes)
            elif (nbytes, turn) in self._waiting:
                self._waiting.remove((nbytes, turn))
                self._serve()
            raise

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= nbytes
        self._serve()

    def _fits(self, nbytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + nbytes <= self.capacity_bytes

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.used_bytes += nbytes
                turn.set_result(None)


class Hold:
    """One body's part of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held = 0
        self._grows = False

    async def expect(self, nbytes: int) -> None:
        """Take a known length, before anything of it is read."""
        if nbytes > FREE_BYTES:
            await self._budget.take(nbytes)
            self._held += nbytes

    async def cover(self, nbytes: int) -> None:
        """Have so many bytes; take what is missing."""
        if nbytes <= max(self._held, FREE_BYTES):
            return
        if not self._grows:
            await self._budget.growing.acquire()
            self._grows = True
        more = max(nbytes - self._held, FREE_BYTES)
        await self._budget.take(more)
        self._held += more

    def grown(self) -> None:
        """Nothing more will come: another body may grow."""
        if self._grows:
            self._grows = False
            self._budget.growing.release()

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.grown()
        held, self._held = self._held, 0
        if held:
            self._budget.give(held)
