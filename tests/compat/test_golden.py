"""The contract's bytes never change by accident, and whatever was written with them is still read.

Where a change is meant, ``python tests/compat/make_golden.py`` makes the files anew.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest

from arrow_tq_schemas import handles, tickets
from arrow_tq_schemas.blobs import BlobRef
from arrow_tq_schemas.chunks import METADATA_KEY, Chunk, ChunkHeader, from_array, verify
from arrow_tq_schemas.commands import (
    COMMANDS,
    REPLIES,
    CommitSteps,
    GetStats,
    RenewClaim,
    StreamAnswers,
    StreamMessage,
    parse_command,
    unpack_reply,
)
from arrow_tq_schemas.errors import from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.receipts import Receipt


def load() -> ModuleType:
    """The script beside this file, however tests are imported."""
    place = Path(__file__).with_name("make_golden.py")
    spec = importlib.util.spec_from_file_location("make_golden", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load()
MADE: dict[str, bytes] = make.golden()


def frozen(name: str) -> bytes:
    return bytes((make.FOLDER / name).read_bytes())


def named_lines(name: str) -> dict[str, bytes]:
    pairs = (line.split(b" ", 1) for line in frozen(name).splitlines())
    return {key.decode(): value for key, value in pairs}


@pytest.mark.parametrize("name", sorted(MADE))
def test_bytes_are_the_frozen_ones(name: str) -> None:
    # The repr of two lists of lines shows where they part; the bytes decide.
    assert MADE[name].splitlines() == frozen(name).splitlines()
    assert MADE[name] == frozen(name)


def test_no_file_is_left_over() -> None:
    assert {path.name for path in make.FOLDER.iterdir()} == {*MADE, "manifest.bin"}


def test_frozen_ids_and_headers_are_read() -> None:
    first, last_group, second = frozen("chunk_id.txt").decode().split()
    assert ChunkId.from_hex(first) == make.FIRST
    assert ChunkId.from_hex(last_group) == make.FIRST.sibling(255)
    assert ChunkId.from_hex(second) == make.SECOND
    assert ChunkHeader.from_bytes(frozen("chunk_header.json")) == make.chunk()[1].header
    assert Receipt.from_json(frozen("receipt.json")) == make.receipt()
    assert BlobRef.from_json(frozen("blob_ref.json").decode()) == make.blob_ref()


def test_a_frozen_chunk_is_read_and_its_checksum_fits() -> None:
    field, chunk = make.chunk()
    with pa.ipc.open_stream(frozen("chunk.arrows")) as reader:
        assert reader.schema.equals(field.arrow_schema(1), check_metadata=True)
        batch, metadata = reader.read_next_batch_with_custom_metadata()
    values, valid = from_array(batch.column(0), field.group_shape(1))
    stored = Chunk(ChunkHeader.from_bytes(metadata[METADATA_KEY]), values, valid)
    assert verify(stored)
    assert stored.header == chunk.header
    assert values.tolist() == chunk.values.tolist()
    assert valid is not None and valid.tolist() == chunk.valid.tolist()


def test_a_frozen_manifest_is_read() -> None:
    manifest, expected = Manifest.decode(frozen("manifest.bin")), make.manifest()
    assert manifest.parts() == expected.parts()
    assert manifest.segment_id == expected.segment_id
    assert {name: spans.tolist() for name, spans in manifest.spans.items()} == {
        name: spans.tolist() for name, spans in expected.spans.items()
    }
    assert manifest.owned.tolist() == expected.owned.tolist()


def test_frozen_handles_are_read() -> None:
    rows = np.frombuffer(frozen("handles.bin"), "<i4").reshape(-1, handles.WORDS)
    kinds = [handles.Kind.ROW] * 5 + [handles.Kind.FILL, handles.Kind.HOLE]
    assert handles.kinds(rows).tolist() == kinds


def test_frozen_tickets_are_read() -> None:
    messages = named_lines("tickets.json")
    for name, value in make.all_tickets().items():
        parse = tickets.parse_put if name.endswith("Stream") else tickets.parse_ticket
        assert parse(messages[name]) == value
    for name, value in make.flight_messages().items():
        assert tickets.parse(type(value), messages[name]) == value
    assert tickets.unpack_spans(make.PACKED_SPANS).tolist() == make.SPANS.tolist()


def test_frozen_messages_of_a_commit_stream_are_read() -> None:
    messages = named_lines("stream.json")
    for name, value in make.stream_messages().items():
        assert type(value).model_validate_json(messages[name]) == value
    # Older clients send steps alone, older servers answer with results alone.
    steps, results = named_lines("commands.json")["commit_steps"], named_lines("replies.json")["StepResults"]
    assert StreamMessage.model_validate_json(steps).steps == CommitSteps.model_validate_json(steps).steps
    assert StreamAnswers.model_validate_json(results).results == make.replies()["StepResults"].results


def test_every_command_is_frozen_and_read() -> None:
    messages = named_lines("commands.json")
    assert set(messages) == set(COMMANDS)
    for command in make.all_commands():
        assert parse_command(command.verb, messages[command.verb]) == command


def test_every_reply_is_frozen_and_read() -> None:
    messages = named_lines("replies.json")
    values = make.replies()
    assert set(values) == {kind.__name__ for kind in REPLIES.values()}
    for name, value in values.items():
        assert type(value).model_validate_json(messages[name]) == value
    reply = unpack_reply(RenewClaim(run="r", claim_id=make.CLAIM), frozen("reply.bin"))
    assert (reply.body.count, list(reply.blobs)) == (2, [b"one", b"", b"three"])  # type: ignore[attr-defined]
    assert REPLIES[GetStats].__name__ == "Stats"


def test_frozen_declarations_and_errors_are_read() -> None:
    declared = json.loads(frozen("fields.json"))
    assert {name: Field.from_json(value) for name, value in declared.items()} == make.fields()
    error = from_wire(json.loads(frozen("error.json")))
    assert (type(error).__name__, error.details) == ("Misaligned", {"position": 3})
