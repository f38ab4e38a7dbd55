"""Blobs over the wire: what a client says of its bytes is checked before anything is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored, wait_until
from arrow_tq_schemas.blobs import BLOB_FIELD, StepBlob, blob_id
from arrow_tq_schemas.commands import StepCommit
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.tickets import PutStream
from tests.flight import wire
from tests.serving import Server

BYTES_MAX = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    with Server(folder / "data", folder / "memory", "--set", f"blob_bytes_max={BYTES_MAX}") as running:
        yield running
        assert running.stop() == 0
        assert "handler failed" not in running.log.read_text()


@pytest.fixture(scope="module")
def store(server: Server) -> Iterator[Store]:
    with arrow_tq.connect(server.url) as store:
        yield store


@pytest.fixture
def run(store: Store) -> Run:
    return store.run("r", fields=[fields.token_ids()])


def test_a_lie_about_content_is_found_at_the_commit(server: Server, store: Store, run: Run) -> None:
    before = chunks_stored(store)
    content = b"what it is"
    chunk = wire.make_chunk(BLOB_FIELD, "r", np.frombuffer(content, np.uint8))
    with flight.connect(server.url) as client:
        stream = PutStream(run="r", field=BLOB_FIELD.name)
        message = chunk.to_batch(BLOB_FIELD), wire.message_of(chunk.header)
        assert not wire.refusals(wire.put(client, stream, BLOB_FIELD.arrow_schema(), [message]))
        stored = StoredChunk(id=chunk.header.id, start=0, rows=len(content), bytes=len(content))
        receipt = Receipt(
            run="r", epoch=0, field=BLOB_FIELD.name, start=0, rows=len(content), chunks=[stored]
        )
        with pytest.raises(errors.Hole):
            session = run.session("holes")
            with session.step() as step:
                step.put("token_ids", [1], start=0)
            session.finalize()
            wire.get(client, wire.segment_ticket(BLOB_FIELD, "r", ["holes~0"]))
    session = run.session("lies")
    for said in (b"what it is not", b"what it is!"):
        lie = StepBlob(blob_id=blob_id(said), media_type="x/y", bytes=len(content), receipt=receipt)
        step = StepCommit(run="r", epoch=0, session_id="lies", step_id="a", blobs=[lie])
        with pytest.raises(errors.MalformedMessage, match=blob_id(content)):
            run.backend.commit(step)
        with pytest.raises(errors.NotFound):
            run.blob(blob_id(said))
    truth = StepBlob(blob_id=blob_id(content), media_type="x/y", bytes=len(content), receipt=receipt)
    run.backend.commit(StepCommit(run="r", epoch=0, session_id="lies", step_id="a", blobs=[truth]))
    assert run.blob(blob_id(content)) == content
    session.abort()
    run.discard(["holes"], reason="over")
    wait_until(lambda: chunks_stored(store) == before)


def test_the_size_is_bounded_by_a_setting(store: Store, run: Run) -> None:
    with run.session("large").step() as step:
        ref = step.attach_blob(bytes(BYTES_MAX), "x/y")
        with pytest.raises(errors.InvalidInput, match=f"blob_bytes_max is {BYTES_MAX}"):
            step.attach_blob(bytes(BYTES_MAX + 1), "x/y")
    assert run.blob(ref) == bytes(BYTES_MAX)
    assert run.sql("SELECT bytes FROM blobs WHERE state = 'stored'").column(0).to_pylist() == [BYTES_MAX]
    run.session("large").abort()


def test_another_process_sees_it_by_reference(server: Server, run: Run) -> None:
    with run.session("s").step() as step:
        text = step.attach_blob(b"seen", "text/plain").to_json()
    with arrow_tq.connect(server.url) as other:
        assert other.run("r").blob(text) == b"seen"
        with other.run("r").session("t").step() as step:
            step.attach_blob(b"seen", "text/plain")
        run.session("s").abort()
        assert other.run("r").blob(text) == b"seen"
