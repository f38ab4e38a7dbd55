"""A client on the server's machine writes into the server's memory: adopted chunk by chunk, or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.backend import Read
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.spans import to_spans
from tests.serving import Server
from tests.warm import WarmProcess

EXPERTS = fields.routed_experts(4, 2, 200)
GROUPED = Field(
    "grouped", "int16", shape=(6, 3), layer_axis=0, layer_groups=[[0, 1], [2, 3, 4], [5]], num_experts=300
)
FIELDS = [fields.token_ids(), EXPERTS, GROUPED]
WIRE = ClientOptions(same_host=False)


@pytest.fixture
def run(store: Store, new_name: Callable[[], str]) -> Run:
    run = store.run(new_name(), fields=FIELDS)
    run.chunk_bytes = 4096
    return run


def experts(tokens: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 200, (tokens, 4, 2)).astype(np.int32)


def write(run: Run, name: str, routed: npt.NDArray[np.int32]) -> None:
    session = run.session(name)
    with session.step() as step:
        step.put("token_ids", np.arange(len(routed) + 1), start=0)
        step.put("routed_experts", routed, start=0)
    session.finalize()


def fetched(run: Run) -> npt.NDArray[np.generic]:
    batch = run.claim(1)
    got = batch.fetch("routed_experts")["routed_experts"][0].copy()
    batch.release()
    return got


def test_chunks_are_written_in_place_and_read_either_way(server: Server, store: Store, run: Run) -> None:
    before = store.stats()
    routed = experts(3000)
    grouped = np.random.default_rng(1).integers(0, 300, (3001, 6, 3))
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.arange(3001), start=0)
        receipt = step.put("routed_experts", routed, start=0)
        step.put("grouped", grouped, start=0)
    session.finalize()
    stats = store.stats()
    put = stats["client_host_puts"]
    assert put > len(receipt.chunks) > 1
    assert stats["chunks_adopted_total"] - before["chunks_adopted_total"] == put
    assert stats["chunks"] - before["chunks"] == put
    assert stats["grants"] - before["grants"] == 5, "one a field and layer group"
    batch = run.claim(1)
    with arrow_tq.connect(server.url, options=WIRE) as wired:
        for got in (batch, wired.run(run.name).attach(batch.ref, 0, 1)):
            data = got.fetch(["routed_experts", "grouped", "token_ids"])
            assert np.array_equal(data["routed_experts"][0], routed)
            assert np.array_equal(data["grouped"][0], grouped)
            assert np.array_equal(data["token_ids"][0], np.arange(3001))


def test_a_value_out_of_range_leaves_nothing(store: Store, run: Run) -> None:
    before = store.stats()["chunks"]
    bad = experts(3000)
    bad[-1, 0, 0] = 200
    step = run.session("s").step()
    with pytest.raises(errors.ValueOutOfRange, match="position 2999"):
        step.put("routed_experts", bad, start=0)
    assert store.stats()["chunks"] == before
    step.cancel()


def test_null_rows_go_by_the_wire(run: Run) -> None:
    routed = experts(100)
    routed[50] = -1
    step = run.session("s").step()
    receipt = step.put("routed_experts", routed, start=0)
    step.flush()
    assert receipt.chunks[0].valid == [(0, 50), (51, 100)]
    step.cancel()


def test_a_run_on_disk_goes_by_the_wire(store: Store, new_name: Callable[[], str]) -> None:
    run = store.run(new_name(), fields=FIELDS, durability="disk")
    routed = experts(500)
    write(run, "s", routed)
    assert store.stats()["client_host_puts"] == 0
    assert np.array_equal(fetched(run), routed)


def test_a_full_store_grants_nothing(tmp_path: Path) -> None:
    arguments = ["--capacity-bytes", str(8 << 20)]
    with (
        Server(tmp_path / "data", tmp_path / "memory", *arguments) as own,
        arrow_tq.connect(own.url) as store,
    ):
        run = store.run("r", fields=FIELDS)
        routed = experts(200_000)
        write(run, "s", routed)
        stats = store.stats()
        assert stats["grants"] <= 1, "the second one would go past the mark"
        assert np.array_equal(fetched(run), routed)


def test_a_quota_is_not_granted_away(tmp_path: Path) -> None:
    flags = ("--set", f"run_quota_bytes={10 << 20}")
    with (
        Server(tmp_path / "data", tmp_path / "memory", *flags) as own,
        arrow_tq.connect(own.url) as store,
        arrow_tq.connect(own.url, options=WIRE) as wired,
    ):
        routed = experts(2000)
        write(store.run("r", fields=FIELDS), "s", routed)
        assert store.stats()["grants"] == 1, "a second one would leave nothing for chunks that are sent"
        write(wired.run("r"), "sent", experts(10_000))


def test_idle_grants_are_given_back(server: Server, new_name: Callable[[], str]) -> None:
    with arrow_tq.connect(server.url) as store:
        run = store.run(new_name(), fields=FIELDS)
        before = store.stats()["grants"]
        write(run, "s", experts(100))
        assert store.stats()["grants"] == before + 2
    with arrow_tq.connect(server.url, options=WIRE) as wired:
        assert wired.stats()["grants"] == before
        assert np.array_equal(fetched(wired.run(run.name)), experts(100))


def test_a_long_put_fills_file_after_file(server: Server, new_name: Callable[[], str]) -> None:
    """What it does not use of them comes back when it leaves."""
    routed = np.random.default_rng(3).integers(0, 200, (5_000_000, 4, 2), dtype=np.uint8)
    with arrow_tq.connect(server.url) as store:
        before = store.stats()
        run = store.run(new_name(), fields=FIELDS)
        run.chunk_bytes = 1 << 20
        session = run.session("s")
        with session.step() as step:
            step.put("token_ids", np.zeros(len(routed) + 1, np.int32), start=0)
            receipt = step.put("routed_experts", routed, start=0)
        session.finalize()
        assert store.stats()["client_host_puts"] > 0.7 * (len(receipt.chunks) + 20)
        files = list(server.memory_dir.glob(f"extents/{run.name}/routed_experts.0/*.arrows"))
        assert len(files) > 2
    with arrow_tq.connect(server.url, options=WIRE) as wired:
        wait_until(
            lambda: (
                wired.stats()["used_bytes"] - before["used_bytes"] < 1.1 * (routed.nbytes + 4 * len(routed))
            ),
            20,
        )
        assert wired.stats()["grants"] == before["grants"]
    with arrow_tq.connect(server.url) as store:
        reading = store.run(run.name)
        spans = Read(run.name, EXPERTS, 0, None, to_spans(receipt.spans()))
        got = np.concatenate([rows.values for rows in reading.backend.read(spans)])
        assert np.array_equal(got, routed)


def test_the_server_dies_with_chunks_unadopted(tmp_path: Path) -> None:
    """What was adopted is there again, what was not is sent again; then the step commits."""
    own = Server(tmp_path / "data", tmp_path / "memory")
    port = own.url.rpartition(":")[2]
    routed, more = experts(2000), experts(1000, 1)
    with own, arrow_tq.connect(own.url) as store:
        run = store.run("r", fields=FIELDS)
        session = run.session("s")
        step = session.step()
        step.put("token_ids", np.arange(3001), start=0)
        step.put("routed_experts", routed, start=0)
        step.flush()
        assert store.stats()["chunks"] == 2
        own.kill()
        with Server(tmp_path / "data", tmp_path / "memory", "--port", port):
            # Written into a file that no server knows any more.
            step.put("routed_experts", more, start=2000)
            assert store.stats()["client_host_puts"] == 3
            step.commit()
            session.finalize()
            assert store.stats()["chunks"] == 3
            assert np.array_equal(fetched(run), np.concatenate([routed, more]))


CLIENT = """
import os, sys, numpy as np, arrow_tq
store = arrow_tq.connect(sys.argv[1])
run = store.run("r")
step = run.session("dead").step()
routed = np.full((1000, 4, 2), 7, np.int32)
step.put("routed_experts", routed, start=0)
step.flush()
backend = run.backend
link = backend._link()
lost = []
link.writes.adopter.submit = lost.extend     # what follows is written and never adopted
for start in range(1000, 5000, 1000):
    step.put("routed_experts", routed, start=start)
assert store.stats()["client_host_puts"] == 1 and len(lost) == 4
os.kill(os.getpid(), 9)
"""


def test_a_client_dies_with_chunks_unadopted(tmp_path: Path) -> None:
    own = Server(tmp_path / "data", tmp_path / "memory")
    with own, arrow_tq.connect(own.url) as store:
        run = store.run("r", fields=FIELDS)
        write(run, "s", experts(100))
        with WarmProcess("-c", CLIENT, own.url) as client:
            assert client.wait(60) == -signal.SIGKILL
        assert store.stats()["chunks"] == 3, "of the dead client's five chunks the one that was adopted"
        own.kill()
    with Server(tmp_path / "data", tmp_path / "memory") as again, arrow_tq.connect(again.url) as store:
        assert store.stats()["chunks"] == 3
        assert np.array_equal(fetched(store.run("r")), experts(100))


def test_a_writer_that_cuts_its_file_loses_its_chunks_alone(server: Server, store: Store, run: Run) -> None:
    write(run, "s", experts(1000))
    with arrow_tq.connect(server.url, options=WIRE) as wired:
        other = wired.run(run.name)
        batch = run.claim(1)
        (path,) = server.memory_dir.glob(f"extents/{run.name}/routed_experts.0/*.arrows")
        os.truncate(path, 4096)
        with pytest.raises(errors.ChunkLost):
            other.attach(batch.ref, 0, 1).fetch("routed_experts")
        assert np.array_equal(
            other.attach(batch.ref, 0, 1).fetch("token_ids")["token_ids"][0], np.arange(1001)
        )
