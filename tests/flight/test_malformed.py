"""Anything malformed is refused, naming what and where; the server lives on, its data as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from arrow_tq import Field, errors
from arrow_tq.interface import Store
from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.commands import DropChunks
from arrow_tq_schemas.tickets import PutStream
from tests.flight import wire
from tests.serving import Server

FIELD = Field("experts", "uint8", shape=(4, 2), layer_axis=0, num_experts=64)
TOKENS = Field("token_ids", "int32")
SCHEMA = FIELD.arrow_schema(0)


@dataclass
class Scene:
    """A run with one good chunk in it, and a bare Flight client."""

    server: Server
    store: Store
    client: flight.FlightClient
    run: str
    good: np.ndarray

    @property
    def stream(self) -> PutStream:
        return PutStream(run=self.run, field=FIELD.name)

    def chunk(self, rows: int = 8) -> tuple[pa.RecordBatch, wire.ChunkHeader]:
        values = np.arange(rows * 8, dtype=np.uint8).reshape(rows, 4, 2) % 64
        chunk = wire.make_chunk(FIELD, self.run, values)
        return chunk.to_batch(FIELD), chunk.header

    def refused(self, batch: pa.RecordBatch, metadata: bytes, schema: pa.Schema = SCHEMA) -> Exception:
        """The error of one bad message: its own in the ack, or the stream's."""
        try:
            acks = wire.put(self.client, self.stream, schema, [(batch, metadata)])
        except errors.ArrowTQError as error:
            return error
        (error,) = wire.refusals(acks).values()
        assert acks[-1].stored == 1
        return error


@pytest.fixture
def scene(server: Server, remote: Store, new_name: Callable[[], str]) -> Iterator[Scene]:
    """Afterwards the server still answers, stores, and has what it had, and no more."""
    run = remote.run(new_name(), fields=[FIELD, TOKENS])
    good = np.arange(80, dtype=np.uint8).reshape(10, 4, 2) % 64
    session = run.session("s")
    with session.step(sampled=(0, 10)) as step:
        step.put("experts", good, start=0)
        step.put("token_ids", np.arange(10, dtype=np.int32), start=0)
    session.finalize()
    with flight.connect(server.url) as client:
        shown = Scene(server, remote, client, run.name, good)
        # So that the server has the file open that chunks from the wire go to.
        batch, header = shown.chunk()
        wire.put(client, shown.stream, SCHEMA, [(batch, wire.message_of(header))])
        drop(shown, [header.id])
        before = remote.stats()
        yield shown
    after = remote.stats()
    for name in ("chunks", f'bytes{{run="{run.name}",tier="memory"}}'):
        assert after[name] == before[name], name
    assert after["corrupt_chunks_total"] == 0
    with flight.connect(server.url) as client:
        (batch,) = wire.get(client, wire.segment_ticket(FIELD, run.name, ["s~0"]))
    assert np.array_equal(batch["experts"].to_numpy_ndarray(), good)
    assert server.process.poll() is None


def test_schema_of_another_type(scene: Scene) -> None:
    schema = pa.schema([pa.field("experts", pa.int64())])
    batch = pa.record_batch([pa.array([1, 2])], schema=schema)
    error = scene.refused(batch, wire.message_of(scene.chunk()[1]), schema)
    assert isinstance(error, errors.MalformedMessage)
    assert "experts: int64" in str(error) and "expected experts: extension<arrow.fixed_shape_tensor" in str(
        error
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["a", "b"], pa.string_view()),
        pa.nulls(2),
        pa.array([[1], [2]], pa.large_list(pa.uint8())),
    ],
    ids=["dictionary", "view", "null", "list"],
)
def test_schema_of_a_dangerous_type(scene: Scene, column: pa.Array) -> None:
    schema = pa.schema([pa.field("experts", column.type)])
    error = scene.refused(pa.record_batch([column], schema=schema), b"{}", schema)
    assert isinstance(error, errors.MalformedMessage) and "schema" in str(error)


def test_schema_of_other_layers(scene: Scene) -> None:
    metadata = {**SCHEMA.field(0).metadata, b"arrow_tq.layer_ids": b"[4, 5, 6, 7]"}
    schema = pa.schema([SCHEMA.field(0).with_metadata(metadata)])
    batch, header = scene.chunk()
    error = scene.refused(batch.cast(schema), wire.message_of(header), schema)
    assert isinstance(error, errors.MalformedMessage) and "[4, 5, 6, 7]" in str(error)


@pytest.mark.parametrize("rows", [9, 1000, (1 << 31) - 1])
def test_lying_lengths(scene: Scene, rows: int) -> None:
    """A column of 8 rows that claims more, up to 2^31 - 1 in a few bytes."""
    batch, header = scene.chunk(8)
    header = header.model_copy(update={"rows": rows})
    error = scene.refused(wire.with_length(batch, rows), wire.message_of(header))
    assert isinstance(error, errors.MalformedMessage) and header.id in str(error)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"header": 1}', b'{"header": "{}"}', b'{"header": "{", "ack": true}'],
)
def test_metadata_that_is_none(scene: Scene, metadata: bytes) -> None:
    batch, _ = scene.chunk()
    error = scene.refused(batch, metadata)
    assert isinstance(error, errors.MalformedMessage)


def test_truncated_metadata(scene: Scene) -> None:
    batch, header = scene.chunk()
    whole = wire.message_of(header)
    for end in (1, 20, len(whole) // 2, len(whole) - 1):
        assert isinstance(scene.refused(batch, whole[:end]), errors.MalformedMessage)


def test_metadata_alone(scene: Scene) -> None:
    writer, reader = wire.open_put(scene.client, scene.stream, SCHEMA)
    writer.write_metadata(pa.py_buffer(b"{}"))
    with pytest.raises(errors.MalformedMessage, match="expected batches"):
        wire.end(writer, reader)


def test_wrong_checksum(scene: Scene) -> None:
    batch, header = scene.chunk()
    error = scene.refused(batch, wire.message_of(header.model_copy(update={"checksum": "0" * 32})))
    assert isinstance(error, errors.MalformedMessage)
    assert header.id in str(error) and "checksum" in str(error)


def test_flipped_values(scene: Scene) -> None:
    """Valid in every way but for one bit of one value."""
    values = np.zeros((8, 4, 2), np.uint8)
    chunk = wire.make_chunk(FIELD, scene.run, values)
    values[3, 1, 1] ^= 4
    error = scene.refused(chunk.to_batch(FIELD), wire.message_of(chunk.header))
    assert isinstance(error, errors.MalformedMessage) and "checksum" in str(error)


def test_rows_that_disagree_with_the_header(scene: Scene) -> None:
    batch, header = scene.chunk(8)
    error = scene.refused(batch, wire.message_of(header.model_copy(update={"rows": 9})))
    assert isinstance(error, errors.MalformedMessage)
    assert "8 rows" in str(error) and "9" in str(error)


def test_expert_out_of_range(scene: Scene) -> None:
    values = np.zeros((8, 4, 2), np.uint8)
    values[5, 2, 0] = 64
    chunk = wire.make_chunk(FIELD, scene.run, values, start=100)
    error = scene.refused(chunk.to_batch(FIELD), wire.message_of(chunk.header))
    assert isinstance(error, errors.ValueOutOfRange) and "64" in str(error)


def test_header_of_another_run(scene: Scene) -> None:
    values = np.zeros((8, 4, 2), np.uint8)
    chunk = wire.make_chunk(FIELD, "elsewhere", values)
    error = scene.refused(chunk.to_batch(FIELD), wire.message_of(chunk.header))
    assert isinstance(error, errors.MalformedMessage) and "elsewhere" in str(error)


def test_header_of_another_epoch(scene: Scene) -> None:
    chunk = wire.make_chunk(FIELD, scene.run, np.zeros((8, 4, 2), np.uint8), epoch=7)
    assert isinstance(scene.refused(chunk.to_batch(FIELD), wire.message_of(chunk.header)), errors.StaleEpoch)


def test_compressed_body(scene: Scene) -> None:
    values = np.zeros((4096, 4, 2), np.uint8)
    chunk = wire.make_chunk(FIELD, scene.run, values)
    message = (chunk.to_batch(FIELD), wire.message_of(chunk.header))
    (ack,) = wire.put(scene.client, scene.stream, SCHEMA, [message], compression="zstd")
    (error,) = wire.refusals([ack]).values()
    assert isinstance(error, errors.MalformedMessage) and "compressed" in str(error)


def test_oversize_message(scene: Scene) -> None:
    values = np.zeros(((65 << 20) // 8, 4, 2), np.uint8)
    chunk = wire.make_chunk(FIELD, scene.run, values)
    error = scene.refused(chunk.to_batch(FIELD), wire.message_of(chunk.header))
    assert isinstance(error, errors.MalformedMessage) and "message_bytes_max" in str(error)


def test_a_refused_chunk_does_not_end_the_stream(scene: Scene) -> None:
    """Good, bad, good: both good ones are stored, the ack counts three and names one."""
    first, second = scene.chunk(4), scene.chunk(5)
    bad_batch, bad_header = scene.chunk(6)
    messages = [
        (first[0], wire.message_of(first[1], ack=False)),
        (bad_batch, wire.message_of(bad_header.model_copy(update={"checksum": "1" * 32}), ack=False)),
        (second[0], wire.message_of(second[1], ack=True)),
    ]
    before = scene.store.stats()["chunks"]
    acks = wire.put(scene.client, scene.stream, SCHEMA, messages)
    assert acks[-1].stored == 3
    assert list(wire.refusals(acks)) == [bad_header.id]
    assert scene.store.stats()["chunks"] == before + 2
    drop(scene, [first[1].id, second[1].id])


def test_what_came_before_a_broken_message_is_acked(scene: Scene) -> None:
    batch, header = scene.chunk(4)
    writer, reader = wire.open_put(scene.client, scene.stream, SCHEMA)
    writer.write_with_metadata(batch, pa.py_buffer(wire.message_of(header, ack=False)))
    writer.write_with_metadata(batch, pa.py_buffer(b"{"))
    ack = wire.PutAck.model_validate_json(reader.read().to_pybytes())
    assert (ack.stored, ack.errors) == (1, {})
    with pytest.raises(errors.MalformedMessage):
        wire.end(writer, reader)
    drop(scene, [header.id])


def drop(scene: Scene, ids: list[str]) -> None:
    command = DropChunks(run=scene.run, chunk_ids=ids)
    list(scene.client.do_action(flight.Action(command.verb, command.model_dump_json().encode()), wire.CALL))


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        ({"run": "nowhere"}, errors.NotFound, "nowhere"),
        ({"field": "nothing"}, errors.NotFound, "nothing"),
        ({"group": 3}, errors.MalformedMessage, "layer group 3"),
    ],
)
def test_unknown_run_field_or_group(
    scene: Scene, change: dict[str, object], expected: type[Exception], words: str
) -> None:
    batch, header = scene.chunk()
    stream = scene.stream.model_copy(update=change)
    with pytest.raises(expected, match=words):
        wire.put(scene.client, stream, SCHEMA, [(batch, wire.message_of(header))])
    spans = [wire.Span(0, header.chunk_id, 0, 1)]
    ticket = wire.span_ticket(FIELD, scene.run, spans).model_copy(update=change)
    with pytest.raises(expected, match=words):
        wire.get(scene.client, ticket)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\x00\xff", b"[]", b'{"kind": "other"}', b'{"kind": "spans"}', b"a" * 100_000]
)
def test_garbage_tickets_and_descriptors(scene: Scene, raw: bytes) -> None:
    with pytest.raises(errors.MalformedMessage):
        wire.get(scene.client, raw)
    descriptor = flight.FlightDescriptor.for_command(raw)
    for call in (scene.client.get_flight_info, scene.client.get_schema):
        with pytest.raises((flight.FlightError, pa.ArrowException)) as caught:
            call(descriptor, wire.CALL)
        assert isinstance(wire.told(caught.value), errors.MalformedMessage)
    writer, reader = scene.client.do_put(descriptor, SCHEMA, wire.CALL)
    with pytest.raises(errors.MalformedMessage):
        wire.end(writer, reader)


@pytest.mark.parametrize("spans", ["AAAA", "eJxLTAQAASUAxA==", "not base64!"])
def test_garbage_spans(scene: Scene, spans: str) -> None:
    ticket = wire.SpanTicket(run=scene.run, field=FIELD.name, spans=spans)
    with pytest.raises(errors.MalformedMessage, match="packed spans"):
        wire.get(scene.client, ticket)


@pytest.mark.parametrize("layers", [[4], [], [0, 9]])
def test_layers_that_are_none(scene: Scene, layers: list[int]) -> None:
    ticket = wire.span_ticket(FIELD, scene.run, [wire.Span(0, wire.IDS.next(0), 0, 1)], layers=layers)
    with pytest.raises(errors.MalformedMessage, match="layer"):
        wire.get(scene.client, ticket)


def test_chunks_that_were_never_stored(scene: Scene) -> None:
    missing = wire.IDS.next(0)
    with pytest.raises(errors.ChunkLost, match=missing.hex):
        wire.get(scene.client, wire.span_ticket(FIELD, scene.run, [wire.Span(0, missing, 0, 1)]))


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("no_such_verb", b"{}"),
        ("claim", b"{"),
        ("claim", b""),
        ("open_run", b'{"run": 5}'),
        ("open_run", b'{"run": "x", "more": 1}'),
        ("get_segments", b"\xff\xff"),
    ],
)
def test_garbage_actions(scene: Scene, verb: str, body: bytes) -> None:
    with pytest.raises(flight.FlightError) as caught:
        list(scene.client.do_action(flight.Action(verb, body), wire.CALL))
    error = wire.told(caught.value)
    assert isinstance(error, errors.MalformedMessage) and verb in str(error)


def test_garbage_commits(scene: Scene) -> None:
    descriptor = flight.FlightDescriptor.for_command(b'{"kind": "commits"}')
    for raw in (b"{", b'{"steps": [{}]}', b"\xff"):
        writer, reader = scene.client.do_put(descriptor, pa.schema([]), wire.CALL)
        writer.write_metadata(pa.py_buffer(raw))
        with pytest.raises(errors.MalformedMessage, match="commit message"):
            wire.end(writer, reader)


def test_null_slots_with_leftover_memory_are_zeroed(scene: Scene) -> None:
    """What a sender left in null slots is neither stored nor part of the checksum."""
    values = np.ones((4, 4, 2), np.uint8)
    valid = np.array([True, False, True, True])
    clean = values.copy()
    clean[~valid] = 0
    chunk = wire.make_chunk(FIELD, scene.run, clean, valid=valid)
    dirty = pa.RecordBatch.from_arrays([to_array(values, valid, SCHEMA.field(0).type)], schema=SCHEMA)
    (ack,) = wire.put(scene.client, scene.stream, SCHEMA, [(dirty, wire.message_of(chunk.header))])
    assert (ack.stored, ack.errors) == (1, {})
    drop(scene, [chunk.header.id])
