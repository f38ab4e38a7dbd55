"""A server that ends with the process that started it: ``python -m arrow_tq.adapters.ray_child ARGUMENTS``.

An actor that is killed, with its node or by itself, runs no code any more. Its end closes the pipe that is
this process's standard input, and then this process must be gone too: its successor needs the directory.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading


def _end_with_parent() -> None:
    os.read(0, 1)
    # As if the machine had failed: what a store acked survives that.
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Serve; the arguments are those of ``arrow-tq serve``."""
    threading.Thread(target=_end_with_parent, name="arrow-tq-parent", daemon=True).start()
    runpy.run_module("arrow_tq_server", run_name="__main__")


if __name__ == "__main__":
    main()
