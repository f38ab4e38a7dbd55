"""Small chunks that share a message: each stays one of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from arrow_tq import Field, errors
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq_schemas.chunks import Chunk, to_array
from arrow_tq_schemas.commands import DropChunks
from arrow_tq_schemas.tickets import CHUNKS_PER_BATCH_MAX, PutMessage, PutStream
from tests.flight import wire
from tests.serving import Server

FIELD = Field("experts", "int16", shape=(3, 2), layer_axis=0, num_experts=300)
TOKENS = Field("token_ids", "int32")


@pytest.fixture
def run(remote: Store, new_name: Callable[[], str]) -> Run:
    return remote.run(new_name(), fields=[FIELD, TOKENS])


def some_chunk(run: Run, rows: int, start: int = 0) -> Chunk:
    values = np.arange(rows * 6, dtype=np.int16).reshape(rows, 3, 2) % 300
    return wire.make_chunk(FIELD, run.name, values, start)


def joined(chunks: list[Chunk]) -> pa.RecordBatch:
    schema = FIELD.arrow_schema(0)
    values = np.concatenate([chunk.values for chunk in chunks])
    return pa.RecordBatch.from_arrays([to_array(values, None, schema.field(0).type)], schema=schema)


def send(
    server: Server, run: Run, chunks: list[Chunk], batch: pa.RecordBatch | None = None
) -> dict[str, object]:
    """Errors by chunk id; the ack counts every chunk."""
    header, *more = [chunk.header.to_bytes().decode() for chunk in chunks]
    message = PutMessage(header=header, ack=True, more=more).model_dump_json().encode()
    stream = PutStream(run=run.name, field=FIELD.name)
    with flight.connect(server.url) as client:
        acks = wire.put(client, stream, FIELD.arrow_schema(0), [(batch or joined(chunks), message)])
    assert acks[-1].stored == len(chunks)
    return dict(wire.refusals(acks))


def test_a_bad_one_is_refused_by_itself(server: Server, remote: Store, run: Run) -> None:
    chunks = [some_chunk(run, 4), some_chunk(run, 1, 4), some_chunk(run, 7, 5)]
    lying = chunks[1].header.model_copy(update={"checksum": "2" * 32})
    before = remote.stats()["chunks"]
    refused = send(server, run, [chunks[0], Chunk(lying, chunks[1].values, None), chunks[2]])
    assert list(refused) == [lying.id]
    assert isinstance(refused[lying.id], errors.MalformedMessage)
    assert remote.stats()["chunks"] == before + 2
    ids = [chunk.header.id for chunk in chunks]
    assert remote._backend.execute(DropChunks(run=run.name, chunk_ids=ids)).body.count == 2


@pytest.mark.parametrize("rows", [11, 13], ids=["too few", "too many"])
def test_rows_that_are_nobodys_refuse_all(server: Server, remote: Store, run: Run, rows: int) -> None:
    chunks = [some_chunk(run, 4), some_chunk(run, 8, 4)]
    before = remote.stats()["chunks"]
    refused = send(server, run, chunks, joined([some_chunk(run, rows)]))
    assert set(refused) == {chunk.header.id for chunk in chunks}
    assert all(f"{rows} rows, their headers say 12" in str(error) for error in refused.values())
    assert remote.stats()["chunks"] == before


def test_more_than_a_message_may_name(server: Server, run: Run) -> None:
    header = some_chunk(run, 1).header.to_bytes().decode()
    more = [header] * CHUNKS_PER_BATCH_MAX
    message = PutMessage.model_construct(header=header, ack=True, more=more).model_dump_json().encode()
    stream = PutStream(run=run.name, field=FIELD.name)
    with flight.connect(server.url) as client, pytest.raises(errors.MalformedMessage, match="more"):
        wire.put(client, stream, FIELD.arrow_schema(0), [(joined([some_chunk(run, 1)]), message)])


def test_thousands_of_small_puts_with_holes_come_back(remote: Store, run: Run) -> None:
    """Whatever the client makes of them on the way."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, 9, 1500)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    expected = random.integers(0, 300, (edges[-1], 3, 2)).astype(np.int64)
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.arange(edges[-1], dtype=np.int32), start=0)
        for first, end in itertools.pairwise(edges):
            step.put("experts", expected[first:end], start=int(first))
    session.finalize()
    batch = run.claim(1)
    data = batch.fetch(["experts"])
    assert np.array_equal(data["experts"][0], expected)
    batch.release()


def test_null_rows_stay_holes(remote: Store, run: Run) -> None:
    """Chunks with and without nulls in one message: the holes are named where they are."""
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.arange(60, dtype=np.int32), start=0)
        for start in range(0, 60, 3):
            rows = np.full((3, 3, 2), start, np.int64)
            if start == 30:
                rows[1] = -1
            step.put("experts", rows, start=start)
    session.finalize()
    batch = run.claim(1)
    with pytest.raises(errors.ArrowTQError, match="31"):
        batch.fetch(["experts"])
    batch.release()
