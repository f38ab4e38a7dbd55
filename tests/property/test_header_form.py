"""Headers read by their form are those that the model reads, and nothing else is taken for one."""

from __future__ import annotations

from hypothesis import assume, given, strategies as st

from arrow_tq_schemas.chunks import ChunkHeader, header_form
from arrow_tq_schemas.errors import MalformedMessage

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
hexes = st.integers(0, (1 << 128) - 1).map(lambda value: f"{value:032x}")
headers = st.builds(
    ChunkHeader,
    id=hexes,
    run=names,
    epoch=st.integers(0, (1 << 48) - 1),
    field=names,
    start=st.integers(0, (1 << 48) - 1),
    rows=st.integers(1, (1 << 31) - 1),
    checksum=hexes,
)


@given(headers)
def test_stored_headers_are_read_as_the_model_reads_them(header: ChunkHeader) -> None:
    raw = header.to_bytes()
    assert raw == header.model_dump_json(exclude_defaults=True).encode()
    read = header_form(header.run, header.epoch, header.field).read(raw)
    if header.rows < 10**9:
        assert read == ChunkHeader.from_bytes(raw) == header
        assert read.to_bytes() == raw
    else:
        assert read is None, "rare ones are left to the model"


@given(headers, st.data())
def test_changed_headers_are_left_to_the_model_unless_they_are_headers_too(
    header: ChunkHeader, data: st.DataObject
) -> None:
    raw = bytearray(header.to_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    change = data.draw(st.sampled_from(["cut", "drop", "put", "digit"]))
    if change == "cut":
        del raw[at:]
    elif change == "drop":
        del raw[at]
    elif change == "put":
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=3))
    else:
        raw[at] = data.draw(st.sampled_from(b"0123456789abcdefA-"))
    changed = bytes(raw)
    read = header_form(header.run, header.epoch, header.field).read(changed)
    if read is not None:
        assert read == ChunkHeader.from_bytes(changed)
        assert read.to_bytes() == changed


@given(headers, names, st.sampled_from(["run", "epoch", "field"]))
def test_headers_of_others_are_not_of_the_form(header: ChunkHeader, name: str, which: str) -> None:
    value = header.epoch ^ 1 if which == "epoch" else name
    other = header.model_copy(update={which: value})
    assume(other != header)
    assert header_form(header.run, header.epoch, header.field).read(other.to_bytes()) is None


def test_positions_past_the_end_are_refused_by_the_model() -> None:
    raw = ChunkHeader(id="0" * 32, run="r", epoch=0, field="f", start=5, rows=1, checksum="0" * 32).to_bytes()
    beyond = raw.replace(b'"start":5', b'"start":%d' % (1 << 48))
    assert header_form("r", 0, "f").read(beyond) is None
    try:
        ChunkHeader.from_bytes(beyond)
    except MalformedMessage as error:
        assert "start" in error.message
    else:
        raise AssertionError("a position past 2^48 was taken")
