"""Takes clients' files away as soon as they are released, on one thread: they are soon wanted again.

Other extents are left to upkeep: they grow to be large, and are recycled where the next one is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from arrow_tq.logs import logger
from arrow_tq.store.extent import Extent
from arrow_tq.store.granted_file import GrantedFile

AGAIN_S = (0.01, 0.64)
"""First and last pause before it is looked again whether somebody still maps them; then upkeep does."""
STOP_S = 10.0


class Reclaimer:
    """Calls ``reclaim`` when a granted file lost its last chunk; a few times more while that leaves some.

    Args:
        reclaim: whether any are left that somebody maps.
    """

    def __init__(self, reclaim: Callable[[], bool]) -> None:
        self._reclaim = reclaim
        self._wanted = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="arrow-tq-reclaim", daemon=True)
        self._thread.start()

    def note(self, extent: Extent) -> None:
        """An extent has no chunks any more. Never blocks."""
        if isinstance(extent.file, GrantedFile):
            self._wanted.set()

    def stop(self) -> None:
        self._ending = True
        self._wanted.set()
        self._thread.join(STOP_S)

    def _loop(self) -> None:
        pause_s: float | None = None
        while True:
            anew = self._wanted.wait(pause_s)
            self._wanted.clear()
            if self._ending:
                return
            try:
                left = self._reclaim()
            except Exception:
                # Upkeep tries again; what failed is in the log.
                logger("arrow_tq.shard").exception("extents not reclaimed")
                left = False
            pause_s = AGAIN_S[0] if anew or pause_s is None else 2 * pause_s
            if not left or pause_s > AGAIN_S[1]:
                pause_s = None
