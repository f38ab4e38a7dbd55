"""SIGKILL around a step that attaches files: an acked one keeps them, one that was not leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from arrow_tq.interface import Store
from arrow_tq.store import Engine, EngineConfig
from arrow_tq.testing.scenes import chunks_stored, wait_until
from arrow_tq_schemas.blobs import blob_id
from tests.warm import WarmProcess

SEEN = [b"screenshot %d" % number * 5000 for number in range(3)]
WRITER = """
import sys, time
import arrow_tq
from arrow_tq import fields
from tests.faults.test_blob_kill import SEEN

run = arrow_tq.open(sys.argv[1], capacity_bytes=1 << 28).run(
    "demo", fields=[fields.token_ids()], durability=sys.argv[2]
)
for number in range(2):
    with run.session(f"s-{number}").step(id="a") as step:
        step.put("token_ids", [1], start=0)
        step.attach_blob(SEEN[0], "image/png")
        step.attach_blob(SEEN[1 + number], "image/png") if number else None
writing = run.session("s-0").step(id="b")
writing.put("token_ids", [2], start=1)
writing.attach_blob(SEEN[0], "image/png")
writing.attach_blob(b"never committed", "image/png")
writing.flush()
print("ready", flush=True)
time.sleep(60)
"""


def opened(path: Path, orphan_ttl_s: float) -> Store:
    config = EngineConfig(path, capacity_bytes=1 << 28, orphan_ttl_s=orphan_ttl_s, upkeep_period_s=0.05)
    return Store(Engine(config))


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_acked_files_stay_and_others_are_reaped(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "store"
    with WarmProcess("-c", WRITER, str(path), durability) as process:
        assert process.stdout.readline() == "ready\n"
    with opened(path, orphan_ttl_s=600) as store:
        run = store.run("demo")
        assert [run.blob(blob_id(SEEN[place])) for place in (0, 2)] == [SEEN[0], SEEN[2]]
        assert chunks_stored(store) == 2 + 2 + 2, "two steps, two files, and what a step was writing"
    with opened(path, orphan_ttl_s=0.2) as store:
        run = store.run("demo")
        wait_until(lambda: chunks_stored(store) == 4)
        rows = run.sql("SELECT blob_id, refs FROM blobs WHERE state = 'stored'").to_pylist()
        assert {row["blob_id"]: row["refs"] for row in rows} == {blob_id(SEEN[0]): 2, blob_id(SEEN[2]): 1}
        run.session("s-0").abort()
        assert run.blob(blob_id(SEEN[0])) == SEEN[0]
        run.session("s-1").finalize()
        run.claim(1).release()
        wait_until(lambda: chunks_stored(store) == 0)
