"""A client on the server's machine: views of the server's memory, and never another extent's rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.backend import Read, Rows
from arrow_tq.client import ClientOptions
from arrow_tq.client.samehost import host, locking, mappings
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.store import host_share
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import to_spans
from tests.serving import Server
from tests.warm import WarmProcess

EXPERTS = fields.routed_experts(4, 2, 256)
FIELDS = [fields.token_ids(), EXPERTS]
TOKENS = 5000


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", tmp_path / "memory") as running:
        yield running


@pytest.fixture
def run(store: Store, new_name: Callable[[], str]) -> Run:
    return store.run(new_name(), fields=FIELDS)


def experts(value: int, tokens: int = TOKENS) -> npt.NDArray[np.uint8]:
    return np.full((tokens, 4, 2), value, np.uint8)


def write(run: Run, name: str, value: int) -> Receipt:
    """A finished session whose routing is all ``value``."""
    session = run.session(name)
    with session.step() as step:
        step.put("token_ids", np.arange(TOKENS + 1), start=0)
        receipt = step.put("routed_experts", experts(value), start=0)
    session.finalize()
    return receipt


def request(run: Run, field: Field, receipt: Receipt, wait_s: float = 0.0) -> Read:
    return Read(run.name, field, 0, None, to_spans(receipt.spans()), wait_s)


def read(run: Run, receipt: Receipt) -> list[Rows]:
    return list(run.backend.read(request(run, EXPERTS, receipt)))


def test_reads_are_views_of_the_servers_memory(store: Store, run: Run) -> None:
    receipt = write(run, "s", 7)
    before = store.stats()
    (rows,) = read(run, receipt)
    assert np.array_equal(rows.values, experts(7))
    assert not rows.values.flags.writeable
    with pytest.raises(ValueError):
        rows.values.flags.writeable = True
    (again,) = read(run, receipt)
    assert np.shares_memory(rows.values, again.values)
    stats = store.stats()
    assert stats["client_host_reads"] == 2
    assert stats["client_host_read_bytes"] == 2 * rows.values.nbytes
    assert stats["client_wire_reads"] == 0
    assert stats["bytes_read_total"] == before["bytes_read_total"]
    assert stats["chunks_located_total"] == before["chunks_located_total"] + 2


def test_a_client_may_be_told_to_use_the_wire(server: Server, run: Run) -> None:
    receipt = write(run, "s", 7)
    with arrow_tq.connect(server.url, options=ClientOptions(same_host=False)) as wired:
        assert np.array_equal(
            np.concatenate([one.values for one in read(wired.run(run.name), receipt)]), experts(7)
        )
        stats = wired.stats()
        assert (stats["client_host_reads"], stats["client_wire_reads"]) == (0, 1)


def test_another_machine_uses_the_wire(
    store: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "boot_id"
    other.write_text("00000000-0000-0000-0000-000000000000\n")
    monkeypatch.setattr(host, "BOOT_ID", other)
    read(run, write(run, "s", 7))
    assert store.stats()["client_wire_reads"] == 1


@pytest.mark.parametrize("content", [b"", b"0" * 32, b"\xff" * 32])
def test_another_file_at_the_proofs_path_uses_the_wire(server: Server, run: Run, content: bytes) -> None:
    """As in a container with the same boot id and a memory directory of its own."""
    receipt = write(run, "s", 7)
    proof = server.memory_dir / host_share.PROOF_NAME
    right = proof.read_bytes()
    proof.write_bytes(content)
    try:
        with arrow_tq.connect(server.url) as other:
            again = other.run(run.name)
            rows = read(again, receipt)
            write(again, "t", 8)
            stats = other.stats()
    finally:
        proof.write_bytes(right)
    assert np.array_equal(np.concatenate([one.values for one in rows]), experts(7))
    assert (stats["client_wire_reads"], stats["client_host_reads"], stats["client_host_puts"]) == (1, 0, 0)


def test_extents_that_cannot_be_opened_are_read_over_the_wire(
    store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = write(run, "s", 7)

    def refused(path: object, flags: int, *more: int) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(mappings.os, "open", refused)
        rows = read(run, receipt)
    assert np.array_equal(np.concatenate([one.values for one in rows]), experts(7))
    assert store.stats()["client_wire_reads"] == 1


def test_a_view_keeps_its_rows(store: Store, run: Run) -> None:
    receipt = write(run, "s", 1)
    (rows,) = read(run, receipt)
    run.claim(1).release()
    with pytest.raises(errors.ChunkReleased):
        read(run, receipt)
    for number in range(3):
        write(run, f"t{number}", 2)
    wait_until(lambda: store.stats()["client_host_mapped_extents"] <= 1, 20)
    assert np.array_equal(rows.values, experts(1)), "nothing is written over it while it is viewed"


def test_an_extent_recycled_before_it_is_mapped_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the answer and the lock its file becomes another extent: by its name and its inode."""
    path, other = tmp_path / "000000.arrows", tmp_path / "000001.arrows"
    path.write_bytes(b"first" * 1000)
    lock = locking.fcntl.flock

    def recycled(descriptor: int, operation: int) -> None:
        path.rename(other)
        other.write_bytes(b"other" * 1000)
        lock(descriptor, operation)

    monkeypatch.setattr(locking.fcntl, "flock", recycled)
    assert mappings.Mapping.open(path) is None
    other.rename(path)

    def replaced(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        path.rename(other)
        path.write_bytes(b"third" * 1000)

    monkeypatch.setattr(locking.fcntl, "flock", replaced)
    assert mappings.Mapping.open(path) is None


def test_readers_never_see_another_extents_rows(own: Server) -> None:
    """Writers, releases, recycling and mapping readers at once; every chunk has a value of its own."""
    stop = threading.Event()
    wrong: list[str] = []
    seen = [0]
    with arrow_tq.connect(own.url) as writer, arrow_tq.connect(own.url) as reader:
        run, reading = writer.run("r", fields=FIELDS), reader.run("r", fields=FIELDS)
        written: list[tuple[int, Receipt]] = []

        def look() -> None:
            while not stop.is_set():
                for value, receipt in written[-4:]:
                    try:
                        for rows in read(reading, receipt):
                            if not (rows.values == value).all():
                                wrong.append(f"{receipt.chunks[0].id}: not {value}")
                            seen[0] += 1
                    except (errors.ChunkReleased, errors.ChunkPending):
                        continue

        readers = [threading.Thread(target=look) for _ in range(2)]
        for thread in readers:
            thread.start()
        for number in range(60):
            written.append((number % 251, write(run, f"s{number}", number % 251)))
            if number > 3:
                run.discard([f"s{number - 3}"], reason="test")
        stop.set()
        for thread in readers:
            thread.join()
        assert not wrong
        assert seen[0] > 20
        assert reader.stats()["client_wire_reads"] == 0


def test_damage_is_told_by_who_sees_it_first(server: Server, run: Run) -> None:
    receipt = write(run, "s", 9)
    (path,) = server.memory_dir.glob(f"extents/{run.name}/routed_experts.0/*.arrows")
    content = path.read_bytes()
    place = content.index(b"\x09" * 64) + 1000
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\x08")
    with pytest.raises(errors.ChunkLost, match=receipt.chunks[0].id):
        read(run, receipt)


def test_the_server_dies_with_views_out(tmp_path: Path) -> None:
    own = Server(tmp_path / "data", tmp_path / "memory")
    port = own.url.rpartition(":")[2]
    with own, arrow_tq.connect(own.url) as store:
        run = store.run("r", fields=FIELDS)
        receipt = write(run, "s", 5)
        (rows,) = read(run, receipt)
        own.kill()
        assert np.array_equal(rows.values, experts(5))
        with Server(tmp_path / "data", tmp_path / "memory", "--port", port):
            (again,) = read(run, receipt)
            assert np.array_equal(again.values, experts(5))
            assert np.array_equal(rows.values, experts(5))
            stats = store.stats()
            assert (stats["client_host_reads"], stats["client_wire_reads"]) == (2, 0)


CLIENT = """
import os, sys, arrow_tq
from arrow_tq.backend import Read
from arrow_tq import fields
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.spans import to_spans
store = arrow_tq.connect(sys.argv[1])
run = store.run("r")
receipt = Receipt.from_json(sys.argv[2])
rows = list(run.backend.read(Read("r", run.field("routed_experts"), 0, None, to_spans(receipt.spans()))))
assert store.stats()["client_host_reads"] == 1
print("mapped", flush=True)
sys.stdin.read()
"""


def test_released_bytes_count_until_nobody_maps_them(own: Server) -> None:
    """Neither this process nor another one, whatever ended it."""
    with arrow_tq.connect(own.url) as store:
        run = store.run("r", fields=FIELDS)
        receipt = write(run, "s", 5)
        (rows,) = read(run, receipt)
        with WarmProcess("-c", CLIENT, own.url, receipt.to_json()) as client:
            assert client.stdout.readline() == "mapped\n"
            run.discard(["s"], reason="test")
            # A live extent without chunks is sealed when it was idle for 15 s; then it waits for the views.
            wait_until(lambda: store.stats()["zombie_bytes"] > 0, 40)
            assert np.array_equal(rows.values, experts(5))
            del rows
            time.sleep(2.5)
            assert store.stats()["zombie_bytes"] > 0, "the other process views it still"
            client.kill()
        wait_until(lambda: store.stats()["zombie_bytes"] == 0, 20)


def test_pending_chunks_are_waited_for(run: Run) -> None:
    session = run.session("s")
    step = session.step()
    step.put("token_ids", np.arange(TOKENS + 1), start=0)
    receipt = step.put("routed_experts", experts(3), start=0)
    step.flush()
    with pytest.raises(errors.ChunkPending, match=r"not committed within 0.1 s"):
        list(run.backend.read(request(run, EXPERTS, receipt, wait_s=0.1)))
    timer = threading.Timer(0.5, step.commit)
    timer.start()
    (rows,) = list(run.backend.read(request(run, EXPERTS, receipt, wait_s=20.0)))
    timer.join()
    assert np.array_equal(rows.values, experts(3))


def test_large_reads_are_placed_in_parts_the_same_as_over_the_wire(server: Server, store: Store) -> None:
    field = fields.routed_experts(40, 8, 256)
    tokens, pieces = 6000, 12
    kept = np.random.default_rng(0).integers(0, 256, (pieces * tokens, 40, 8), np.uint8)
    run = store.run("large-parts", fields=[fields.token_ids(), field])
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.zeros(len(kept) + 1, np.int32), start=0)
        for piece in range(pieces):
            part = kept[piece * tokens : (piece + 1) * tokens]
            step.put("routed_experts", part, start=piece * tokens)
    session.finalize()
    batch = run.claim(1)
    for _ in range(3):
        out = np.ones((len(kept) + 1, 40, 8), np.int32)
        batch.fetch("routed_experts", out={"routed_experts": out})
        assert np.array_equal(out[:-1], kept)
    with arrow_tq.connect(server.url, options=ClientOptions(same_host=False)) as wired:
        there = wired.run("large-parts").attach(batch.ref, rank=0, world=1)
        assert np.array_equal(there.fetch("routed_experts")["routed_experts"][0], kept)
        there.release()
