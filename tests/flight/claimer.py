"""A claimer in a process of its own: claims, releases, and writes down what it did, until nothing is left.

``python -m tests.flight.claimer URL TASK LIMIT LEASE_S JOURNAL``. A line of the journal says
whether a claim was taken or released, and its segments.
"""

from __future__ import annotations

import sys
from pathlib import Path

import arrow_tq
from arrow_tq_schemas.errors import ClaimGone

WAIT_S = 3.0
"""Longer than a lease: what a killed claimer held comes back before the others leave."""


def main(url: str, task: str, limit: int, lease_s: float, journal: Path) -> None:
    with arrow_tq.connect(url) as store, journal.open("a") as lines:
        run = store.run("demo")
        while True:
            batch = run.claim(limit, task=task, unit="segment", lease_s=lease_s, wait_s=WAIT_S)
            if not len(batch):
                return
            lines.write(f"taken {' '.join(batch.segment_ids)}\n")
            lines.flush()
            try:
                batch.release()
            except ClaimGone:
                continue
            lines.write(f"released {' '.join(batch.segment_ids)}\n")
            lines.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
