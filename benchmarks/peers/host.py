"""A system's servers in a process of their own: ``python -m benchmarks.peers.host SYSTEM``.

Prints the address that clients join, and lives until its input is closed.
"""

from __future__ import annotations

import json
import os
import sys

from benchmarks.peers.system import load


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with load(sys.argv[1]).servers() as address:
        print(json.dumps({"address": address}), file=replies, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
