"""Many shards, one store: what is written anywhere is read from anywhere, by any Flight client."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.backend import Read
from arrow_tq.client import FlightBackend
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq_schemas import cluster as k, tickets as t
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.ids import ChunkId, IdFactory
from arrow_tq_schemas.spans import Span, to_spans
from tests.clusters import Cluster
from tests.flight import wire

LAYERS, TOPK, STEPS, TURN = 4, 2, 6, 10
NAMES = itertools.count()


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> Iterator[Store]:
    with arrow_tq.connect(cluster.url) as opened:
        yield opened


@pytest.fixture
def run(store: Store) -> Run:
    declared = [fields.token_ids(), fields.logprobs(), fields.routed_experts(LAYERS, TOPK)]
    return store.run(f"run-{next(NAMES)}", fields=declared)


def tokens_of(session: str) -> np.ndarray:
    return np.random.default_rng(list(session.encode())).integers(0, 1 << 20, STEPS * TURN, dtype=np.int32)


def experts_of(session: str) -> np.ndarray:
    random = np.random.default_rng([*session.encode(), 1])
    return random.integers(0, 256, (STEPS * TURN - 1, LAYERS, TOPK), dtype=np.uint8)


def write(run: Run, name: str, shard: int | None = None) -> None:
    """A session of several steps, its chunks wherever they go, or all on one shard."""
    session = run.session(name)
    if shard is not None:
        session.pin_shard(shard)
    tokens, experts = tokens_of(name), experts_of(name)
    for index in range(STEPS):
        start, end = index * TURN, (index + 1) * TURN
        with session.step(id=str(index), sampled=(start + 4, end)) as step:
            step.put("token_ids", tokens[start:end], start=start)
            step.put("logprobs", tokens[start + 4 : end].astype(np.float32), start=start + 4)
            step.put("routed_experts", experts[start:end], start=start)
    session.finalize()


def spread(store: Store, run: Run) -> dict[int, int]:
    """Chunks by shard, as the metadata says."""
    rows = run.sql("SELECT shard, count(*) AS n FROM chunks GROUP BY 1").to_pylist()
    return {row["shard"]: row["n"] for row in rows}


def check(run: Run, names: list[str]) -> None:
    batch = run.claim(1000)
    assert sorted(batch.table["session_id"].to_pylist()) == sorted(names)
    data = batch.fetch(["token_ids", "routed_experts"])
    for index, name in enumerate(batch.table["session_id"].to_pylist()):
        np.testing.assert_array_equal(data["token_ids"][index], tokens_of(name))
        np.testing.assert_array_equal(data["routed_experts"][index], experts_of(name))
    batch.release()


# -- placing and reading ---------------------------------------------------------------------------


def test_one_address_is_enough_and_chunks_go_to_every_shard(cluster: Cluster, store: Store, run: Run) -> None:
    names: list[str] = []
    numbers = {one.number for one in cluster.map().shards}
    assert numbers == {1, 2, 3}
    end = time.monotonic() + 20
    while set(found := spread(store, run)) != numbers:
        # For a moment all of them go to the same one.
        assert time.monotonic() < end, found
        names.append(f"s-{len(names)}")
        write(run, names[-1])
    assert sum(found.values()) == len(names) * STEPS * 3
    check(run, names)


def test_what_is_released_leaves_its_shards(cluster: Cluster, store: Store, run: Run) -> None:
    write(run, "s-gone")
    written = run.sql("SELECT chunk_id FROM chunks").num_rows
    assert written == STEPS * 3
    check(run, ["s-gone"])
    states = run.sql("SELECT DISTINCT state FROM chunks").column(0).to_pylist()
    assert states == ["released"]
    end = time.monotonic() + 15
    while held := held_chunks(cluster, run.name):
        assert time.monotonic() < end, held
        time.sleep(0.1)


def held_chunks(cluster: Cluster, run: str) -> list[str]:
    """Shards that still hold bytes of the run with chunks in them."""
    found = []
    for server in cluster.shards:
        with flight.FlightClient(server.url) as client:
            (result,) = client.do_action(flight.Action("stats", b"{}"), wire.CALL)
            if b'"chunks": 0.0' not in result.body.to_pybytes():
                found.append(server.url)
    return found


def test_a_pinned_session_stays_on_one_shard(store: Store, run: Run) -> None:
    write(run, "s-pinned", shard=2)
    assert set(spread(store, run)) == {2}
    assert run.session("s-free").pin_shard() in (1, 2, 3)
    check(run, ["s-pinned"])


def test_rewrites_and_retries_look_at_tokens_on_far_shards(run: Run) -> None:
    session = run.session("s-rewritten")
    first = np.arange(20, dtype=np.int32)
    with session.step(id="1") as step:
        step.put("token_ids", first, start=0)
    other = first.copy()
    other[12] = 999
    with session.step(id="2") as step:
        step.put("token_ids", other[10:], start=10)
    with session.step(id="1") as step:
        step.put("token_ids", first, start=0)
    with pytest.raises(errors.Conflict, match="position 3"), session.step(id="1") as step:
        wrong = first.copy()
        wrong[3] = 7
        step.put("token_ids", wrong, start=0)
    rows = run.sql("SELECT rewrite_at FROM steps ORDER BY step_index").column(0).to_pylist()
    assert rows == [None, 12]


def test_a_step_does_not_commit_with_a_chunk_that_no_shard_holds(store: Store, run: Run) -> None:
    session = run.session("s-lost")
    step = session.step(id="1")
    receipt = step.put("token_ids", np.arange(5, dtype=np.int32), start=0)
    step.flush()
    ids = IdFactory()
    for shard in (1, 3, 9):
        made_up = receipt.chunks[0].model_copy(update={"id": ids.next(shard).hex})
        with pytest.raises(errors.ChunkLost), session.step(id="bad") as bad:
            bad.attach(receipt.model_copy(update={"chunks": [made_up]}))
    # Trimmed is fine, longer than stored is not.
    longer = receipt.model_copy(
        update={"rows": 6, "chunks": [receipt.chunks[0].model_copy(update={"rows": 6})]}
    )
    with pytest.raises(errors.RowCountMismatch), session.step(id="bad") as bad:
        bad.attach(longer)
    assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 0}]
    step.commit()
    assert run.sql("SELECT step_id FROM steps").to_pylist() == [{"step_id": "1"}]


def test_what_a_failed_step_wrote_is_freed_on_its_shard(cluster: Cluster, run: Run) -> None:
    session = run.session("s-failed")
    with pytest.raises(ZeroDivisionError), session.step(id="1") as step:
        receipt = step.put("token_ids", np.arange(5, dtype=np.int32), start=0)
        step.flush()
        raise ZeroDivisionError
    chunk = receipt.chunks[0]
    with pytest.raises(errors.ChunkLost), session.step(id="2") as again:
        again.attach(receipt)
    url = cluster.map().shard(chunk.chunk_id.shard)
    assert url is not None
    with flight.FlightClient(url.servers[0].url) as client, pytest.raises(errors.ChunkLost):
        wire.get(client, wire.span_ticket(fields.token_ids(), run.name, receipt.spans()))


def test_an_open_step_is_pending_wherever_it_is(store: Store, run: Run) -> None:
    session = run.session("s-pending")
    step = session.step(id="1")
    receipt = step.put("token_ids", np.arange(5, dtype=np.int32), start=0)
    step.flush()
    chunk_id = receipt.chunks[0].chunk_id
    request = read_of(run, "token_ids", receipt.spans())
    with pytest.raises(errors.ChunkPending) as caught:
        list(run.backend.read(request))
    assert caught.value.details["ids"] == [chunk_id.hex]
    step.commit()
    (rows,) = run.backend.read(request)
    np.testing.assert_array_equal(rows.values, np.arange(5))


def read_of(run: Run, field: str, spans: list[Span]) -> Read:
    return Read(run.name, run.field(field), 0, None, to_spans(spans))


def test_whole_dicts_are_kept_by_the_catalog_itself(store: Store) -> None:
    given = {"tokens": [np.arange(9, dtype=np.int32), np.arange(4, dtype=np.int32)], "reward": [1.0, 0.5]}
    ref = store.put_bundle(given)
    back = store.get_bundle(ref)
    assert back["reward"] == given["reward"]
    for one, other in zip(back["tokens"], given["tokens"], strict=True):
        np.testing.assert_array_equal(one, other)
    store.delete_bundle(ref)


# -- any Flight client -----------------------------------------------------------------------------


def test_plain_flight_reads_every_shard_and_puts_the_answers_together(cluster: Cluster, run: Run) -> None:
    names = [f"s-{number}" for number in range(4)]
    for index, name in enumerate(names):
        write(run, name, shard=1 + index % 3)
    for field, expected, domain in (
        ("token_ids", tokens_of, None),
        ("routed_experts", experts_of, None),
        ("logprobs", lambda name: tokens_of(name).astype(np.float32), 4),
    ):
        table = read_plainly(cluster.url, run.name, field)
        for name in names:
            rows = table.filter(pc.equal(table["segment_id"], f"{name}~0")).sort_by("position")
            wanted = expected(name)
            np.testing.assert_array_equal(rows["position"].to_numpy(), np.arange(len(wanted)))
            column = rows[field].combine_chunks()
            values = (
                column.to_numpy_ndarray()
                if isinstance(column.type, pa.FixedShapeTensorType)
                else column.to_numpy()
            )
            if domain is not None:
                # Outside of what was sampled, the field's fill.
                wanted = np.where(np.arange(len(wanted)) % TURN >= domain, wanted, 0.0)
            np.testing.assert_array_equal(values, wanted)


def read_plainly(url: str, run: str, field: str) -> pa.Table:
    """With ``pyarrow.flight`` alone: a descriptor, its endpoints, their tickets and locations."""
    descriptor = flight.FlightDescriptor.for_path(run, field)
    parts = []
    with flight.connect(url) as client:
        info = client.get_flight_info(descriptor)
    assert len({endpoint.locations[0].uri for endpoint in info.endpoints}) == len(info.endpoints) == 3
    for endpoint in info.endpoints:
        with flight.connect(endpoint.locations[0]) as shard:
            part = shard.do_get(endpoint.ticket).read_all()
        assert part.schema.equals(info.schema) and part.num_rows
        parts.append(part)
    table = pa.concat_tables(parts)
    assert table.num_rows == info.total_records
    return table


def test_a_client_that_knows_no_shards_reads_through_the_catalog(cluster: Cluster, run: Run) -> None:
    write(run, "s-old")
    ticket = wire.segment_ticket(run.field("token_ids"), run.name, ["s-old~0"])
    with flight.FlightClient(cluster.url) as client:
        batches = wire.get(client, ticket)
    table = pa.Table.from_batches(batches)
    np.testing.assert_array_equal(table["token_ids"].to_numpy(), tokens_of("s-old"))


# -- who answers what ------------------------------------------------------------------------------


def test_a_shard_sends_everybody_else_to_its_catalog(cluster: Cluster, run: Run) -> None:
    with pytest.raises(errors.Unsupported, match="its catalog at"):
        arrow_tq.connect(cluster.shards[0].url).run(run.name)


def test_chunks_of_another_shard_and_calls_of_another_epoch_are_refused(cluster: Cluster, run: Run) -> None:
    number = cluster.number(0)
    chunk = wire.make_chunk(run.field("token_ids"), run.name, np.arange(3, dtype=np.int32), epoch=run.epoch)
    stream = t.PutStream(run=run.name, field="token_ids")
    header = ChunkHeader.model_validate(chunk.header.model_dump())
    assert header.chunk_id.shard == 0 != number
    for url, kind in ((cluster.shards[0].url, errors.MalformedMessage), (cluster.url, errors.Unsupported)):
        with flight.FlightClient(url) as client:
            message = (chunk.to_batch(run.field("token_ids")), wire.message_of(header))
            acks = wire.put(client, stream, run.field("token_ids").arrow_schema(0), [message])
        (error,) = wire.refusals(acks).values()
        assert isinstance(error, kind), error
    asked = k.ConfirmChunks(number=number, epoch=77, ids=[ChunkId.make(1, number, 0, 1).hex], run=run.name)
    with flight.FlightClient(cluster.shards[0].url) as client, pytest.raises(flight.FlightError) as caught:
        list(client.do_action(flight.Action(asked.verb, asked.model_dump_json().encode()), wire.CALL))
    assert isinstance(wire.told(caught.value), errors.StaleEpoch)


def test_what_was_committed_counts_at_once(tmp_path: Path) -> None:
    """Beats say how full a shard is too, once a second here: a commit does not wait for one."""
    with Cluster(tmp_path, 1, lease_s=30) as one, arrow_tq.connect(one.url) as store:
        seen = []
        for index in range(5):
            # A run's first chunk takes an extent.
            run = store.run(f"run-{index}", fields=[fields.token_ids()])
            with run.session("s").step(sampled=(0, 8)) as step:
                step.put("token_ids", np.arange(8), start=0)
            seen.append(store.pressure().used_bytes)
    assert seen[0] > 0
    assert all(before < after for before, after in itertools.pairwise(seen)), seen


def test_the_store_counts_all_its_shards(cluster: Cluster, store: Store) -> None:
    entries = cluster.map().shards
    pressure = store.pressure()
    assert pressure.capacity_bytes == sum(one.capacity_bytes for one in entries)
    values = store.stats()
    assert [values[f'shard_up{{shard="{one.number}"}}'] for one in entries] == [1.0, 1.0, 1.0]
    assert isinstance(store._backend, FlightBackend)
