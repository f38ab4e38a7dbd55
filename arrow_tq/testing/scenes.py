"""What the conformance tests share: opening, filling and watching a store."""

from __future__ import annotations

import time
from collections.abc import Callable

from arrow_tq import Task
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import Rollout, declared_fields, make_rollout, write_rollout


def wait_until(met: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll a condition that upkeep brings about."""
    until = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < until, "the condition did not come about"
        time.sleep(0.05)


def open_run(store: Store, name: str = "demo", tasks: tuple[Task | str, ...] = ("train",)) -> Run:
    return store.run(name, fields=declared_fields(), tasks=tasks)


def fill(run: Run, count: int, group: str | None = None) -> dict[str, Rollout]:
    """``count`` finalized sessions; what each segment holds, by segment id."""
    kept = {}
    for index in range(count):
        rollout = make_rollout(index)
        session = run.session(f"{group or 's'}-{index}", group=group)
        write_rollout(session, rollout)
        (segment,) = session.finalize(reward=index / 10)
        kept[segment.segment_id] = rollout
    return kept


def chunks_stored(store: Store) -> int:
    return int(store.stats()["chunks"])


def bytes_read(store: Store) -> float:
    """Payload that was read so far: by the store, or by this client around the wire."""
    stats = store.stats()
    return stats["bytes_read_total"] + stats.get("client_host_read_bytes", 0.0)
