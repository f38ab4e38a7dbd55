"""Commands, tickets, chunk headers: what does not fit is refused, naming key and value."""

from __future__ import annotations

import base64
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest

from arrow_tq_schemas import presets, tickets
from arrow_tq_schemas.chunks import Chunk, ChunkHeader, checksum, from_array, to_array, verify
from arrow_tq_schemas.commands import (
    COMMANDS,
    REPLIES,
    GetStats,
    Mutation,
    Reply,
    Stats,
    StepCommit,
    StepResult,
    pack_reply,
    parse_command,
    unpack_reply,
)
from arrow_tq_schemas.errors import MalformedMessage, StaleEpoch
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.tables import RESERVED_COLUMNS, TABLES

FIRST = ChunkId.make(5, 1, 0, 7)


@pytest.mark.parametrize(
    ("verb", "body", "message"),
    [
        ("explode", b"{}", r"unknown action 'explode': expected one of open_run, "),
        ("claim", b'{"run":"r"}', r"action claim: limit: Field required"),
        ("claim", b'{"run":"r","limit":0}', r"action claim: limit: .*greater than or equal to 1, got '0'"),
        ("claim", b'{"run":"r","limit":1,"unit":"token"}', r"action claim: unit: .*got 'token'"),
        ("claim", b'{"run":"r","limit":1,"lease_s":NaN}', r"action claim: lease_s: .*got 'nan'"),
        ("claim", b'{"run":"r","limit":1,"request_id":"x"}', r"action claim: request_id: .*got 'x'"),
        ("stats", b'{"surprise":1}', r"action stats: surprise: Extra inputs"),
        ("stats", b"\xff", r"action stats: \(whole\): Invalid JSON"),
        ("stats", b"[" * 100_000, r"action stats: \(whole\): Invalid JSON: recursion"),
        (
            "finalize_session",
            b'{"run":"r","epoch":0,"session_id":"s","reward":NaN}',
            r"action finalize_session: reward: Input should be a finite number, got 'nan'",
        ),
        (
            "commit_steps",
            b'{"steps":[{"run":"r","epoch":0,"session_id":"s","step_id":"a","sampled":[5,3]}]}',
            r"action commit_steps: steps.0: .*sampled \(5, 3\): expected start <= end",
        ),
    ],
)
def test_a_command_that_does_not_fit_is_named(verb: str, body: bytes, message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        parse_command(verb, body)


def test_every_command_has_a_reply_and_every_mutation_a_request_id() -> None:
    assert set(COMMANDS.values()) == set(REPLIES)
    for command in COMMANDS.values():
        if command.mutates and command.verb != "commit_steps":
            assert issubclass(command, Mutation)


def test_a_step_s_range_has_a_start_before_its_end() -> None:
    with pytest.raises(ValueError, match=r"greater than or equal to 0"):
        StepCommit(run="r", epoch=0, session_id="s", step_id="a", sampled=(-1, 3))
    assert StepCommit(run="r", epoch=0, session_id="s", step_id="a", sampled=(3, 3)).sampled == (3, 3)


def test_a_step_s_error_is_raised_as_what_it_was() -> None:
    StepResult(step_id="a").check()
    result = StepResult(step_id="a", error=StaleEpoch("epoch 2 is over", epoch=2).to_wire())
    with pytest.raises(StaleEpoch, match=r"^epoch 2 is over$"):
        result.check()


def test_replies_carry_numbers_that_json_has_no_word_for() -> None:
    reply = Reply(body=Stats(values={"fill": float("inf")}), blobs=[b"\0" * 3])
    back = unpack_reply(GetStats(), pack_reply(reply))
    assert back.body == reply.body
    assert list(back.blobs) == [b"\0\0\0"]


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"body":{"values":{}}}',
        b'{"body":{"values":3},"blobs":[]}',
        b'{"body":{"values":{}},"blobs":[5,-5]}',
        b'{"body":{"values":{}},"blobs":[1]}',
        b'{"body":{"values":{}},"blobs":3}',
        b"\xff",
    ],
)
def test_a_reply_that_lies_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedMessage, match=r"^reply to stats: "):
        unpack_reply(GetStats(), struct.pack("<I", len(head)) + head)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"kind":"shell"}', r"ticket: .*got"),
        (b'{"kind":"spans","run":"r","field":"f"}', r"ticket: spans.spans: Field required"),
        (
            b'{"kind":"spans","run":"r","field":"f","spans":"","layers":[-1]}',
            r"ticket: spans.layers.0: .*'-1'",
        ),
        (b'{"kind":"spans","run":"r","field":"f","spans":"","wait_s":NaN}', r"ticket: spans.wait_s: .*'nan'"),
        (b'{"kind":"spans","run":"r","field":"f","spans":"","wait_s":-1}', r"ticket: spans.wait_s: .*'-1'"),
        (
            b'{"kind":"segments","run":"r","field":"f","segment_ids":[],"group":256}',
            r"segments.group: .*'256'",
        ),
        (b'{"kind":"segments","run":"r","field":"f","segment_ids":[],"start":-1}', r"segments.start: .*'-1'"),
    ],
)
def test_a_ticket_that_does_not_fit_is_named(raw: bytes, message: str) -> None:
    with pytest.raises(MalformedMessage, match=message):
        tickets.parse_ticket(raw)


def test_packed_spans_that_lie_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(raw: bytes) -> str:
        return base64.b64encode(raw).decode()

    whole = zlib.compress(bytes(64))
    for text in (
        "é",
        "****",
        pack(b"x"),
        pack(zlib.compress(bytes(33))),
        pack(whole[:-1]),
        pack(whole + b"x"),
    ):
        with pytest.raises(MalformedMessage, match=r"^packed spans"):
            tickets.unpack_spans(text)
    assert len(tickets.unpack_spans(pack(whole))) == 2
    monkeypatch.setattr("arrow_tq_schemas.tickets.SPANS_MAX", 1)
    with pytest.raises(MalformedMessage, match=r"packed spans of 33 bytes: expected whole rows, 32 at most"):
        tickets.unpack_spans(pack(whole))


# -- chunks ----------------------------------------------------------------------------------------


def test_a_chunk_header_that_does_not_fit_is_named() -> None:
    good = ChunkHeader(id=FIRST.hex, run="r", epoch=0, field="x", start=0, rows=1, checksum="0" * 32)
    assert ChunkHeader.from_bytes(good.to_bytes()) == good
    for change, message in (
        ({"rows": 0}, r"chunk header: rows: .*got '0'"),
        ({"start": -1}, r"chunk header: start: .*got '-1'"),
        ({"id": "XYZ"}, r"chunk header: id: .*got 'XYZ'"),
        ({"epoch": "1"}, r"chunk header: epoch: .*got '1'"),
        ({"run": ""}, r"chunk header: run: "),
        ({"token": "x" * 65}, r"chunk header: token: "),
    ):
        raw = json.dumps({**good.model_dump(), **change}).encode()
        with pytest.raises(MalformedMessage, match=message):
            ChunkHeader.from_bytes(raw)


def test_the_checksum_covers_everything_but_the_token() -> None:
    values = np.arange(6, dtype=np.uint8).reshape(3, 2)
    base = (FIRST, "run", 1, "x", 0, values, None)
    valid = np.array([True, False, True])
    other = [
        (FIRST.sibling(1), "run", 1, "x", 0, values, None),
        (FIRST, "ru", 1, "nx", 0, values, None),
        (FIRST, "run", 2, "x", 0, values, None),
        (FIRST, "run", 1, "y", 0, values, None),
        (FIRST, "run", 1, "x", 1, values, None),
        (FIRST, "run", 1, "x", 0, values + np.uint8(1), None),
        (FIRST, "run", 1, "x", 0, values.reshape(2, 3), None),
        (FIRST, "run", 1, "x", 0, values, valid),
    ]
    digests = {checksum(*arguments) for arguments in [base, *other]}
    assert len(digests) == 1 + len(other)
    # Arrow has no bits where there is no null, so a mask that is all true is the same as none.
    assert checksum(*base[:6], np.ones(3, bool)) == checksum(*base)


def test_a_sliced_batch_gives_its_own_rows() -> None:
    field = presets.routed_experts(layers=2, topk=2)
    values = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    valid = np.arange(10) % 3 != 1
    values[~valid] = 0
    digest = checksum(FIRST, "r", 0, field.name, 0, values, valid)
    header = ChunkHeader(id=FIRST.hex, run="r", epoch=0, field=field.name, start=0, rows=10, checksum=digest)
    chunk = Chunk(header, values, valid)
    assert verify(chunk)
    assert not verify(Chunk(header, values, None))
    part, there = from_array(chunk.to_batch(field).slice(3, 5).column(0), (2, 2))
    assert part.tolist() == values[3:8].tolist()
    assert there is not None
    assert there.tolist() == valid[3:8].tolist()
    assert not part.flags.writeable


def test_arrow_arrays_share_the_chunk_s_memory() -> None:
    values = np.arange(8, dtype="<f4").reshape(4, 2)
    array = to_array(values, None, pa.fixed_shape_tensor(pa.float32(), [2]))
    array.validate(full=True)
    back, valid = from_array(array, (2,))
    assert np.shares_memory(back, values)
    assert valid is None


# -- tables ----------------------------------------------------------------------------------------


def test_user_columns_cannot_take_our_names() -> None:
    assert {"reward", "status", "segment_id", "run"} <= RESERVED_COLUMNS
    for name, schema in TABLES.items():
        assert len(set(schema.names)) == len(schema.names), name
