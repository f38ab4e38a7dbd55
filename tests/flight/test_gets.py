"""Reading over the wire: by our own client, and by one that has nothing of ours."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from arrow_tq import Field, errors, fields
from arrow_tq.backend import Read, Rows
from arrow_tq.client import ClientOptions, FlightBackend
from arrow_tq.client.connection import Connection
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import LAYER_IDS, declared_fields, make_rollout, write_rollout
from arrow_tq.trainer.scatter import Placement, group_parts, scatter
from arrow_tq_schemas.chunks import Chunk
from arrow_tq_schemas.commands import StepCommit
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import Span, to_spans
from arrow_tq_schemas.tickets import FlightFilter, FlightQuery, SegmentTicket
from tests.flight import wire
from tests.serving import Server

EXPERTS = Field("experts", "uint8", shape=(40, 8), layer_axis=0)


def committed(run: Run, field: Field, chunks: list[Chunk], session: str = "s") -> None:
    """Store chunks as they are and commit them as one step."""
    run.backend.put(field, chunks).wait(20)
    stored = [
        StoredChunk(id=one.header.id, start=one.header.start, rows=one.header.rows, bytes=one.nbytes)
        for one in chunks
    ]
    total = sum(one.rows for one in stored)
    receipt = Receipt(run=run.name, epoch=run.epoch, field=field.name, start=0, rows=total, chunks=stored)
    run.session(session)
    run.backend.commit(
        StepCommit(run=run.name, epoch=run.epoch, session_id=session, step_id="1", receipts=[receipt])
    )


def rows_of(batches: list[pa.RecordBatch]) -> np.ndarray:
    return np.concatenate([batch.column(0).to_numpy_ndarray() for batch in batches])


@pytest.fixture(scope="module")
def big(remote: Store) -> tuple[Run, list[Chunk], np.ndarray]:
    """One chunk of 16 MB and 500 of 6 KB to 12 KB, and their rows one after another."""
    run = remote.run("big", fields=[EXPERTS])
    random = np.random.default_rng(7)
    sizes = [50_000, *random.integers(20, 40, 500).tolist()]
    parts = [random.integers(0, 256, (rows, 40, 8), dtype=np.uint8) for rows in sizes]
    starts = np.cumsum([0, *sizes]).tolist()
    chunks = [
        wire.make_chunk(EXPERTS, run.name, part, start, epoch=run.epoch)
        for part, start in zip(parts, starts, strict=False)
    ]
    committed(run, EXPERTS, chunks)
    return run, chunks, np.concatenate(parts)


def spans_of(chunks: list[Chunk]) -> list[Span]:
    return [Span(one.header.start, one.header.chunk_id, 0, one.header.rows) for one in chunks]


def test_messages_have_a_good_size(server: Server, big: tuple[Run, list[Chunk], np.ndarray]) -> None:
    """A large chunk is cut and small ones are joined; order and values stay."""
    run, chunks, expected = big
    with flight.connect(server.url) as client:
        batches = wire.get(client, wire.span_ticket(EXPERTS, run.name, spans_of(chunks)))
    assert np.array_equal(rows_of(batches), expected)
    sizes = [batch.nbytes for batch in batches]
    assert min(sizes[:-1]) >= 1 << 20
    assert max(sizes) <= 5 << 20


def test_spans_come_in_the_order_asked(server: Server, big: tuple[Run, list[Chunk], np.ndarray]) -> None:
    run, chunks, expected = big
    random = np.random.default_rng(3)
    spans, rows = [], []
    for index in random.integers(0, len(chunks), 300).tolist():
        header = chunks[index].header
        first = int(random.integers(0, header.rows))
        count = int(random.integers(1, header.rows - first + 1)) if index else 3
        spans.append(Span(header.start + first, header.chunk_id, first, count))
        rows.append(expected[header.start + first : header.start + first + count])
    with flight.connect(server.url) as client:
        batches = wire.get(client, wire.span_ticket(EXPERTS, run.name, spans))
    assert np.array_equal(rows_of(batches), np.concatenate(rows))


@pytest.mark.parametrize("layers", [[0], [3, 4, 5], [39, 0, 7], [1, 1]])
def test_layers_are_projected_by_the_server(
    server: Server, big: tuple[Run, list[Chunk], np.ndarray], layers: list[int]
) -> None:
    run, chunks, expected = big
    with flight.connect(server.url) as client:
        batches = wire.get(client, wire.span_ticket(EXPERTS, run.name, spans_of(chunks), layers=layers))
    assert np.array_equal(rows_of(batches), expected[:, layers])
    assert batches[0].schema.field(0).type == pa.fixed_shape_tensor(pa.uint8(), [len(layers), 8])
    assert json.loads(batches[0].schema.field(0).metadata[b"arrow_tq.layer_ids"]) == layers


@pytest.mark.parametrize("split_bytes", [1 << 20, 3_333_333, 1 << 30])
def test_split_reads_keep_the_order(
    server: Server, big: tuple[Run, list[Chunk], np.ndarray], split_bytes: int
) -> None:
    run, chunks, expected = big
    options = ClientOptions(get_streams=3, get_split_bytes=split_bytes, get_spans_max=170)
    backend = FlightBackend(server.url, options=options)
    try:
        request = Read(run.name, EXPERTS, 0, None, to_spans(spans_of(chunks)))
        blocks = list(backend.read(request))
        assert np.array_equal(np.concatenate([block.values for block in blocks]), expected)
        assert not any(block.values.flags.writeable for block in blocks)
        abandoned = backend.read(request)
        next(abandoned)
        abandoned.close()
    finally:
        backend.close()


def test_no_block_is_held_while_the_next_one_comes(
    server: Server, big: tuple[Run, list[Chunk], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is used for the next one; two that are held make the allocator give pages back."""
    run, chunks, expected = big
    backend = FlightBackend(server.url, options=ClientOptions(same_host=False))
    blocks: list[weakref.ref[object]] = []
    alive: list[int] = []
    plain_get, plain_read = Connection.get, backend.read

    class Reader:
        def __init__(self, reader: flight.FlightStreamReader) -> None:
            self._reader = reader

        def read_chunk(self) -> flight.FlightStreamChunk:
            alive.append(sum(block() is not None for block in blocks))
            chunk = self._reader.read_chunk()
            blocks.append(weakref.ref(chunk.data))
            return chunk

    def read(request: Read) -> Iterator[Rows]:
        for rows in plain_read(request):
            blocks.append(weakref.ref(rows.values))
            yield rows
            del rows

    monkeypatch.setattr(Connection, "get", lambda *asked: Reader(plain_get(*asked)))
    monkeypatch.setattr(backend, "read", read)
    out = np.zeros_like(expected)
    placement = Placement(to_spans(spans_of(chunks)), np.cumsum([0, *(len(c.values) for c in chunks[:-1])]))
    try:
        scatter(backend, run.name, EXPERTS, group_parts(EXPERTS, None)[0], placement, out)
    finally:
        backend.close()
    assert np.array_equal(out, expected)
    assert len(alive) > 4
    assert not any(alive)


def test_views_and_joined_rows_keep_their_order(
    server: Server, big: tuple[Run, list[Chunk], np.ndarray]
) -> None:
    """Views that are made ahead and rows that were joined, in turns."""
    run, chunks, expected = big
    first = np.cumsum([0, *(len(chunk.values) for chunk in chunks)]).tolist()
    order = [1, 2, 0, 3, 0, 4, 5]
    with flight.connect(server.url) as client:
        batches = wire.get(
            client, wire.span_ticket(EXPERTS, run.name, spans_of([chunks[index] for index in order]))
        )
    wanted = np.concatenate([expected[first[index] : first[index + 1]] for index in order])
    assert np.array_equal(rows_of(batches), wanted)


def test_null_rows_travel_as_nulls(server: Server, remote: Store, new_name: Callable[[], str]) -> None:
    field = Field("topk", "int32", shape=(2,), pad=-1)
    run = remote.run(new_name(), fields=[field])
    values = np.arange(40, dtype=np.int32).reshape(20, 2)
    valid = np.arange(20) % 3 > 0
    values[~valid] = 0
    committed(run, field, [wire.make_chunk(field, run.name, values, valid=valid, epoch=run.epoch)])
    run.session("s").finalize()
    with flight.connect(server.url) as client:
        (batch,) = wire.get(client, wire.segment_ticket(field, run.name, ["s~0"]))
    expected = values.copy()
    expected[~valid] = -1
    assert np.array_equal(batch["topk"].to_numpy_ndarray(), expected)


def test_an_error_in_mid_stream_keeps_its_type(
    server: Server, remote: Store, big: tuple[Run, list[Chunk], np.ndarray]
) -> None:
    """Rows past the end of the second chunk: found when the first is on its way already."""
    run, chunks, _ = big
    spans = [*spans_of(chunks[:1]), Span(0, chunks[1].header.chunk_id, 0, 10_000)]
    backend = FlightBackend(server.url)
    try:
        read = backend.read(Read(run.name, EXPERTS, 0, None, to_spans(spans)))
        seen = 0
        with pytest.raises(errors.MalformedMessage, match=chunks[1].header.id):
            for block in read:
                seen += len(block.values)
        assert seen > 0
    finally:
        backend.close()


def test_uncommitted_chunks_are_pending(remote: Store, new_name: Callable[[], str]) -> None:
    run = remote.run(new_name(), fields=[EXPERTS])
    chunk = wire.make_chunk(EXPERTS, run.name, np.zeros((4, 40, 8), np.uint8), epoch=run.epoch)
    run.backend.put(EXPERTS, [chunk]).wait(20)
    request = Read(run.name, EXPERTS, 0, None, to_spans(spans_of([chunk])), wait_s=0.3)
    with pytest.raises(errors.ChunkPending, match=chunk.header.id) as caught:
        list(run.backend.read(request))
    assert caught.value.details["ids"] == [chunk.header.id]


# -- a client of another make: pyarrow.flight alone ------------------------------------------------


@pytest.fixture(scope="module")
def shown(remote: Store) -> tuple[str, list[object]]:
    run = remote.run("shown", fields=declared_fields())
    rollouts = []
    for index in range(3):
        rollout = make_rollout(index)
        session = run.session(f"s-{index}")
        write_rollout(session, rollout)
        session.finalize(reward=float(index))
        rollouts.append(rollout)
    return run.name, rollouts


def read_flight(client: flight.FlightClient, info: flight.FlightInfo) -> pa.Table:
    (endpoint,) = info.endpoints
    with flight.connect(endpoint.locations[0]) as other:
        return other.do_get(endpoint.ticket, flight.FlightCallOptions(timeout=20)).read_all()


def test_a_plain_client_reads_a_field_by_path(server: Server, shown: tuple[str, list]) -> None:
    run, rollouts = shown
    with flight.connect(server.url) as client:
        path = flight.FlightDescriptor.for_path(run, "logprobs", "s-2~0", "s-0~0")
        info = client.get_flight_info(path)
        table = read_flight(client, info)
        assert client.get_schema(path).schema == info.schema == table.schema
    lengths = [len(rollouts[2].tokens), len(rollouts[0].tokens)]
    assert info.total_records == table.num_rows == sum(lengths)
    assert info.total_bytes == 4 * sum(lengths)
    assert table["segment_id"].to_pylist() == ["s-2~0"] * lengths[0] + ["s-0~0"] * lengths[1]
    assert table["position"].to_pylist() == [*range(lengths[0]), *range(lengths[1])]
    expected = np.concatenate([rollouts[2].logprobs, rollouts[0].logprobs])
    assert np.array_equal(table["logprobs"].to_numpy(), expected)


@pytest.mark.parametrize(("group", "first", "last"), [(0, 0, 2), (1, 2, 6)])
def test_a_plain_client_reads_a_layer_group(
    server: Server, shown: tuple[str, list], group: int, first: int, last: int
) -> None:
    run, rollouts = shown
    query = FlightQuery(run=run, field="routed_experts", group=group, where="reward = 1")
    with flight.connect(server.url) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_command(query.model_dump_json().encode()))
        table = read_flight(client, info)
        by_path = flight.FlightDescriptor.for_path(run, f"routed_experts:{group}", "s-1~0")
        assert client.get_flight_info(by_path).total_records == info.total_records
    expected = rollouts[1].experts[:, first:last]
    assert np.array_equal(table["routed_experts"].combine_chunks().to_numpy_ndarray(), expected)
    ids = json.loads(table.schema.field("routed_experts").metadata[b"arrow_tq.layer_ids"])
    assert ids == list(LAYER_IDS[first:last])


def test_ranges_are_clipped_to_each_segment(server: Server, shown: tuple[str, list]) -> None:
    run, rollouts = shown
    ticket = SegmentTicket(run=run, field="token_ids", segment_ids=["s-0~0", "s-1~0"], start=5, end=10_000)
    with flight.connect(server.url) as client:
        table = pa.Table.from_batches(wire.get(client, ticket.model_dump_json().encode()))
    expected = np.concatenate([rollouts[0].tokens[5:], rollouts[1].tokens[5:]])
    assert np.array_equal(table["token_ids"].to_numpy(), expected)


def test_many_segments_share_messages(server: Server, shown: tuple[str, list]) -> None:
    run, rollouts = shown
    ids = [f"s-{index % 3}~0" for index in range(300)]
    ticket = SegmentTicket(run=run, field="token_ids", segment_ids=list(dict.fromkeys(ids)))
    with flight.connect(server.url) as client:
        batches = wire.get(client, ticket.model_dump_json().encode())
    assert len(batches) == 1
    expected = np.concatenate([rollout.tokens for rollout in rollouts])
    assert np.array_equal(batches[0]["token_ids"].to_numpy(), expected)


def test_a_field_of_several_groups_has_to_name_one(server: Server, shown: tuple[str, list]) -> None:
    with flight.connect(server.url) as client:
        path = flight.FlightDescriptor.for_path(shown[0], "routed_experts", "s-0~0")
        with pytest.raises(pa.ArrowException, match="has 2 layer groups"):
            client.get_flight_info(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (["nowhere", "token_ids"], "nowhere"),
        (["shown", "nothing"], "nothing"),
        (["shown", "token_ids", "s-9~0"], "s-9~0"),
        (["shown"], "expected run, field"),
        (["shown", "token_ids:x"], "field:group"),
    ],
)
def test_flights_that_do_not_exist(
    server: Server, shown: tuple[str, list], path: list[str], words: str
) -> None:
    with (
        flight.connect(server.url) as client,
        pytest.raises((pa.ArrowException, flight.FlightError), match=words),
    ):
        client.get_flight_info(flight.FlightDescriptor.for_path(*path))


def test_flights_are_listed(server: Server, shown: tuple[str, list]) -> None:
    run, _ = shown
    criteria = FlightFilter(run=run, where="reward >= 1").model_dump_json().encode()
    with flight.connect(server.url) as client:
        infos = list(client.list_flights(criteria))
        everything = list(client.list_flights())
        table = read_flight(client, infos[0])
    paths = {tuple(part.decode() for part in info.descriptor.path) for info in infos}
    labels = ("token_ids", "logprobs", "routed_experts:0", "routed_experts:1")
    assert paths == {(run, label, f"s-{index}~0") for index in (1, 2) for label in labels}
    assert len(everything) >= len(infos) + 4
    assert table.num_rows == infos[0].total_records


def test_a_hole_is_an_error_that_names_its_positions(
    server: Server, remote: Store, new_name: Callable[[], str]
) -> None:
    run = remote.run(new_name(), fields=[fields.token_ids(), fields.logprobs()])
    session = run.session("s")
    with session.step(sampled=(2, 10)) as step:
        step.put("token_ids", np.arange(10, dtype=np.int32), start=0)
        step.put("logprobs", np.ones(3, np.float32), start=2)
    session.finalize()
    with flight.connect(server.url) as client:
        with pytest.raises(errors.Hole, match=r"nobody wrote 5 of its positions: 5\.\.9") as caught:
            wire.get(client, wire.segment_ticket(run.fields["logprobs"], run.name, ["s~0"]))
        assert caught.value.details["positions"] == [5, 10]
        (batch,) = wire.get(client, wire.segment_ticket(run.fields["logprobs"], run.name, ["s~0"], end=5))
    assert batch["logprobs"].to_pylist() == [0, 0, 1, 1, 1]


def test_sql_streams(server: Server, shown: tuple[str, list]) -> None:
    ticket = json.dumps({"kind": "sql", "query": "SELECT sum(reward) AS r FROM segments", "run": shown[0]})
    with flight.connect(server.url) as client:
        assert pa.Table.from_batches(wire.get(client, ticket.encode())).to_pylist() == [{"r": 3.0}]
        bad = json.dumps({"kind": "sql", "query": "SELECT nothing FROM nowhere"})
        with pytest.raises(errors.InvalidQuery):
            wire.get(client, bad.encode())


def test_a_reader_that_leaves_gives_its_place_back(
    server: Server, remote: Store, big: tuple[Run, list[Chunk], np.ndarray]
) -> None:
    """More readers than places start, read one message, and go."""
    run, chunks, expected = big
    request = Read(run.name, EXPERTS, 0, None, to_spans(spans_of(chunks)))
    for _ in range(80):
        reading = run.backend.read(request)
        next(reading)
        reading.close()
    blocks = list(run.backend.read(request))
    assert sum(len(block.values) for block in blocks) == len(expected)
