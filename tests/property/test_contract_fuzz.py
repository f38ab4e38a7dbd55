"""Whatever bytes arrive, parsing gives a value or one of our errors: nothing else ever escapes."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable

import numpy as np
from hypothesis import example, given, settings, strategies as st

from arrow_tq_schemas import tickets
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import (
    COMMANDS,
    Done,
    GetStats,
    RenewClaim,
    Reply,
    pack_reply,
    parse_command,
    unpack_reply,
)
from arrow_tq_schemas.errors import ArrowTQError, from_wire
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import OWNED_DTYPE, Manifest, ranges
from arrow_tq_schemas.presets import indexer_topk, routed_experts
from arrow_tq_schemas.receipts import Receipt, StoredChunk
from arrow_tq_schemas.spans import Span, to_spans

FIRST = ChunkId.make(1 << 40, 5, 0, 9)
SPANS = to_spans([Span(0, FIRST, 0, 3), Span(3, FIRST, 9, 4)])
HEADER = ChunkHeader(id=FIRST.hex, run="r", epoch=1, field="x", start=0, rows=4, checksum="0" * 32)
RECEIPT = Receipt(
    run="r",
    epoch=1,
    field="x",
    start=0,
    rows=4,
    chunks=[StoredChunk(id=FIRST.hex, start=0, rows=4, bytes=16, valid=[(0, 1), (2, 4)])],
)
BODIES: dict[str, dict[str, object]] = {
    "open_run": {"run": "r", "fields": [Field("x", "int32").to_json()], "tasks": [{"name": "a"}], "epoch": 1},
    "open_session": {"run": "r", "epoch": 1, "session_id": "s", "ttl_s": 3.5, "tasks": ["a"]},
    "commit_steps": {
        "steps": [
            {
                "run": "r",
                "epoch": 1,
                "session_id": "s",
                "step_id": "a",
                "sampled": [1, 4],
                "receipts": [json.loads(RECEIPT.to_json())],
            }
        ]
    },
    "claim": {"run": "r", "limit": 4, "where": "reward > 0", "unit": "group", "lease_s": 4.0},
    "discard": {"run": "r", "epoch": 1, "ids": ["s"], "reason": "stale"},
}
TICKETS: list[dict[str, object]] = [
    {
        "kind": "spans",
        "run": "r",
        "field": "x",
        "group": 1,
        "layers": [0],
        "spans": tickets.pack_spans(SPANS),
    },
    {"kind": "segments", "run": "r", "field": "x", "segment_ids": ["s~0"], "start": 1, "end": 9},
    {"kind": "sql", "query": "SELECT 1", "run": None},
    {"kind": "chunks", "run": "r", "field": "x", "group": 3},
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 3),
    st.sampled_from([1 << 31, 1 << 48, 1 << 64, -1 << 63]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "\ud800", "0" * 32, FIRST.hex, "all", "int32", "AAAA", "\x00"]),
)
anything = st.recursive(
    scalars,
    lambda part: st.one_of(st.lists(part, max_size=3), st.dictionaries(st.text(max_size=3), part)),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, value: object) -> object:
    """``value`` with one thing in it replaced, dropped or added, somewhere."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        change = draw(st.sampled_from(["inside", "inside", "inside", "drop", "add"]))
        rest = {name: part for name, part in value.items() if name != key}
        if change == "inside":
            return {**rest, key: draw(mutated(value[key]))}
        return rest if change == "drop" else {**value, draw(st.text(max_size=3)): draw(anything)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(mutated(value[place])), *value[place + 1 :]]
    return draw(anything)


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes cut, with bytes flipped, or with some put in."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        data[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def only_ours(call: Callable[[], object]) -> object | None:
    """The value, or None where one of our errors with a message came out."""
    try:
        return call()
    except ArrowTQError as error:
        assert error.message
        assert json.dumps(error.to_wire())
        return None


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(BODIES)).flatmap(lambda verb: st.tuples(st.just(verb), mutated(BODIES[verb]))))
def test_mutated_commands(verb_and_body: tuple[str, object]) -> None:
    verb, body = verb_and_body
    command = only_ours(lambda: parse_command(verb, as_json(body)))
    if command is not None:
        again = parse_command(verb, command.model_dump_json().encode())  # type: ignore[attr-defined]
        assert again.model_dump_json() == command.model_dump_json()  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(COMMANDS)), st.one_of(st.binary(), broken(as_json(BODIES["commit_steps"]))))
def test_random_commands(verb: str, body: bytes) -> None:
    only_ours(lambda: parse_command(verb, body))


@settings(max_examples=150, deadline=None)
@given(mutated(json.loads(RECEIPT.to_json())))
def test_mutated_receipts(value: object) -> None:
    receipt = only_ours(lambda: Receipt.from_json(as_json(value)))
    if isinstance(receipt, Receipt):
        only_ours(receipt.spans)
        assert Receipt.from_json(receipt.to_json()) == receipt


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(), broken(HEADER.to_bytes()), mutated(json.loads(HEADER.to_bytes())).map(as_json)))
def test_broken_chunk_headers(raw: bytes) -> None:
    header = only_ours(lambda: ChunkHeader.from_bytes(raw))
    if isinstance(header, ChunkHeader):
        only_ours(lambda: header.chunk_id)
        assert ChunkHeader.from_bytes(header.to_bytes()) == header


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(), st.sampled_from(TICKETS).flatmap(mutated).map(as_json)))
def test_broken_tickets(raw: bytes) -> None:
    ticket = only_ours(lambda: tickets.parse_ticket(raw))
    if isinstance(ticket, tickets.SpanTicket):
        only_ours(lambda: tickets.unpack_spans(ticket.spans))
    only_ours(lambda: tickets.parse_put(raw))
    only_ours(lambda: tickets.parse(tickets.FlightQuery, raw))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [
            routed_experts(layers=3, topk=2, layer_groups=[[0], [1, 2]]).to_json(),
            indexer_topk(layers=1, topk=2).to_json(),
            Field("x", "bfloat16", fill=0.5).to_json(),
            Field("x", "bool", fill=1).to_json(),
        ]
    ).flatmap(mutated)
)
@example({"name": "x", "dtype": "int32", "fill": float("inf")})
@example({"name": "x", "dtype": "float32", "fill": 10**400})
@example({"name": "x", "dtype": "int32", "shape": [10**30]})
def test_mutated_field_declarations(value: object) -> None:
    field = only_ours(lambda: Field.from_json(value))  # type: ignore[arg-type]
    if isinstance(field, Field):
        # Whatever is accepted works, and survives the trip that every declaration makes.
        assert Field.from_json(json.loads(json.dumps(field.to_json(), allow_nan=False))) == field
        assert field.fill_value.dtype == field.type.numpy
        for group in range(len(field.groups)):
            assert field.arrow_schema(group).names == [field.name]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(), broken(pack_reply(Reply(body=Done(count=3), blobs=[b"one", b"two"])))))
def test_broken_replies(raw: bytes) -> None:
    only_ours(lambda: unpack_reply(RenewClaim(run="r", claim_id="0" * 32), raw))
    only_ours(lambda: unpack_reply(GetStats(), raw))


def manifest() -> Manifest:
    owned = np.array([(FIRST.value >> 64, FIRST.value & (1 << 64) - 1)], OWNED_DTYPE)
    return Manifest("s~0", 14, {"x": SPANS, "y": SPANS[:0]}, ranges([(0, 3)]), ranges([]), owned)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(), broken(manifest().encode())))
def test_broken_manifests(raw: bytes) -> None:
    found = only_ours(lambda: Manifest.decode(raw))
    if isinstance(found, Manifest):
        only_ours(found.encode)


@settings(max_examples=150, deadline=None)
@given(mutated(json.loads(manifest().parts()[0])))
def test_manifests_whose_head_lies(head: object) -> None:
    raw = as_json(head)
    whole = struct.pack("<4sBI", b"ATQM", 1, len(raw)) + raw + zlib.compress(manifest().parts()[1])
    only_ours(lambda: Manifest.decode(whole))


@settings(deadline=None)
@given(st.one_of(st.text(), st.binary().map(base64.b64encode).map(bytes.decode)))
def test_broken_packed_spans(text: str) -> None:
    only_ours(lambda: tickets.unpack_spans(text))


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=20), st.text(alphabet="0123456789abcdef ", max_size=34)))
def test_broken_ids(value: bytes | str) -> None:
    parse = ChunkId.from_bytes if isinstance(value, bytes) else ChunkId.from_hex
    found = only_ours(lambda: parse(value))  # type: ignore[operator]
    if isinstance(found, ChunkId):
        assert value in (found.to_bytes(), found.hex)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["code", "message", "details"]), anything))
def test_any_wire_error_is_an_error(wire: dict[str, object]) -> None:
    assert isinstance(from_wire(wire), ArrowTQError)
