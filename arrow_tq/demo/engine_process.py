"""The parent's side of the rollout engine's process."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
from types import TracebackType

from arrow_tq.demo.engine import Generate, Generated, Setup
from arrow_tq_schemas.errors import DeadlineExceeded, InternalError

GENERATE_S = 300.0
"""How long a round of rollouts may take."""
STOP_S = 10.0
ERROR_CHARS = 2000


class EngineProcess:
    """``python -m arrow_tq.demo.engine``. A context manager: it is gone afterwards."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop
        self._answers: queue.Queue[str] = queue.Queue()
        # A session of its own: Ctrl-C is for us, and we end it in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "arrow_tq.demo.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name="arrow-tq-demo-engine", daemon=True).start()

    def __enter__(self) -> EngineProcess:
        self._tell(self._setup.model_dump_json())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def generate(self, order: Generate) -> Generated:
        """Have a round of rollouts made.

        Raises:
            InternalError: the process ended; with its last words.
            DeadlineExceeded: it took longer than ``GENERATE_S``.
        """
        self._tell(order.model_dump_json())
        try:
            line = self._answers.get(timeout=GENERATE_S)
        except queue.Empty:
            raise DeadlineExceeded(f"round {order.round}: no rollouts in {GENERATE_S:.0f} s") from None
        if not line:
            raise self._failed()
        return Generated.model_validate_json(line)

    def stop(self) -> None:
        """End the process. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._answers.put(line)
        self._answers.put("")

    def _failed(self) -> InternalError:
        code = self._process.wait(STOP_S)
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        last = said[-1][:ERROR_CHARS] if said else "it said nothing"
        return InternalError(f"the rollout engine ended with code {code}: {last}")
