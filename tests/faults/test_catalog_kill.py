"""SIGKILL of a process that commits, against a journal of what was acked."""

from __future__ import annotations

import random
import time
from pathlib import Path

import apsw
import pytest

from arrow_tq.store.catalog.receipt_blobs import decode_receipts
from arrow_tq_schemas.commands import ReleaseClaim, TaskSpec
from arrow_tq_schemas.receipts import chunk_ids
from tests.catalog_scenes import Scene
from tests.warm import WarmProcess

ROUNDS = 6
THREADS = 4
WRITER = f"""
import os, sys, threading
from pathlib import Path
from tests.catalog_scenes import Scene
from arrow_tq_schemas.commands import ReleaseClaim, TaskSpec

scene = Scene(Path(sys.argv[1]))
scene.run(tasks=[TaskSpec(name="train")])
journal = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def work(thread):
    number = 0
    while True:
        session = f"{{sys.argv[3]}}-{{thread}}-{{number}}"
        scene.session(session)
        for step in range(5):
            receipts = [scene.receipt("token_ids", 4 * step, 4), scene.receipt("routed_experts", 4 * step, 4)]
            scene.commit(scene.step(session, str(step), *receipts, sampled=(4 * step, 4 * step + 4)))
            os.write(journal, f"step {{session}} {{step}}\\n".encode())
        scene.finalize(session, reward=1.0)
        os.write(journal, f"final {{session}}\\n".encode())
        info, names = scene.claim(1)
        if names:
            scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
            os.write(journal, f"done {{names[0]}}\\n".encode())
        number += 1

print("ready", flush=True)
for thread in range({THREADS}):
    threading.Thread(target=work, args=(thread,)).start()
"""


def write_until_killed(path: Path, journal: Path, name: str, after_s: float) -> None:
    """Run the writer in a process of its own and kill it."""
    with WarmProcess(
        "-c", WRITER, str(path), str(journal), name, imports=["tests.catalog_scenes"]
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(after_s)
        assert process.poll() is None, "the writer stopped by itself"


def check_whole(path: Path) -> set[str]:
    """Every step has all its chunks and every segment its manifest; the steps as the journal names them."""
    connection = apsw.Connection(str(path))
    assert connection.pragma("integrity_check") == "ok"
    expected = set()
    steps = set()
    query = "SELECT session_id, step_id, receipts FROM steps JOIN sessions ON sessions.id = session"
    for session, step, blob in connection.execute(query):
        steps.add(f"step {session} {step}")
        expected |= {
            one.to_bytes() for one in chunk_ids(decode_receipts(bytes(blob), "demo", 0)) if not one.group
        }
    chunks = {bytes(raw) for (raw,) in connection.execute("SELECT chunk_id FROM chunks")}
    assert chunks == expected, "a step without its chunks, or chunks without their step"
    counted = connection.execute("SELECT count(*) FROM steps").get
    assert counted == connection.execute("SELECT sum(steps) FROM sessions").get
    for table in ("manifests", "segment_tasks"):
        lonely = f"SELECT count(*) FROM segments WHERE id NOT IN (SELECT segment FROM {table})"
        assert connection.execute(lonely).get == 0
    negative = "SELECT count(*) FROM chunks WHERE holds < 0 OR (state = 'released') <> (holds = 0)"
    final = " AND session IN (SELECT id FROM sessions WHERE status = 'finalized')"
    assert connection.execute(negative + final).get == 0
    connection.close()
    return steps


@pytest.mark.parametrize("seed", range(2))
def test_nothing_acked_is_lost_and_nothing_is_half_there(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path, journal = tmp_path / "catalog.sqlite", tmp_path / "journal"
    for number in range(ROUNDS // 2):
        write_until_killed(path, journal, f"r{number}", chance.uniform(0.05, 0.5))
        scene = Scene(path)
        acked = journal.read_text().splitlines()
        assert {line for line in acked if line.startswith("step")} <= check_whole(path)
        finals = [line.split()[1] for line in acked if line.startswith("final")]
        table = scene.table(*finals)
        assert table.column("session_id").to_pylist() == finals
        done = [line.split()[1] for line in acked if line.startswith("done")]
        assert set(scene.table(*done).column("status").to_pylist()) <= {"done"}
        assert acked, "the writer got nothing done"
        scene.catalog.close()
    check_that_it_still_works(path)


def check_that_it_still_works(path: Path) -> None:
    scene = Scene(path)
    scene.run(tasks=[TaskSpec(name="train")])
    ids = scene.fill("after")
    info, names = scene.claim(1_000_000)
    assert names[-1] == "after~0"
    scene.catalog.execute(ReleaseClaim(run="demo", claim_id=info.claim_id))
    assert scene.states(ids) == {"released"}
    scene.catalog.close()
