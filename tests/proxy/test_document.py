"""Editing JSON in place: what is not meant to change keeps its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq.proxy.calls import with_reference
from arrow_tq.proxy.document import Document, Object, Shape
from arrow_tq_schemas.errors import MalformedMessage

SHAPE = Shape(walked=frozenset(["meta", "choices"]), large=frozenset(["big"]))
names = st.sampled_from(["a", "b", "c", "big", "é", "meta", "choices"])
text = st.text('a\\"é€🦜\ud800\n}],:', max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
plain = scalars | st.lists(scalars, max_size=3) | st.dictionaries(text, scalars, max_size=3)
leaves = st.dictionaries(names, plain, max_size=4)
objects = st.dictionaries(names, plain | leaves | st.lists(leaves, max_size=2), max_size=5)


def spelled(value: object, indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def no_escapes_in_big(value: object) -> bool:
    if isinstance(value, dict):
        big = value.get("big")
        fits = not isinstance(big, str) or json.dumps(big, ensure_ascii=False)[1:-1] == big
        return fits and all(no_escapes_in_big(one) for one in value.values())
    return not isinstance(value, list) or all(no_escapes_in_big(one) for one in value)


documents = objects.filter(no_escapes_in_big)


@settings(max_examples=60)
@given(documents, st.sampled_from([None, 0, 2]), st.booleans())
def test_a_document_that_is_not_edited_keeps_every_byte(
    value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    raw = b" \n" + spelled(value, indent, ascii_only) + b" "
    assert Document(raw, "text", SHAPE).render() == raw


def edit(node: Object, value: dict[str, Any], data: st.DataObject) -> None:
    """The same edits on a document's object and on plain data."""
    for key in list(value):
        if not key.isascii():
            # Members that are edited have names in ASCII.
            continue
        choice = data.draw(st.sampled_from(["keep", "drop", "set", "null"]))
        inner = node.get(key)
        if choice == "drop":
            node.drop(key)
            del value[key]
        elif choice == "set":
            node.set(key, "[1, 2]")
            value[key] = [1, 2]
        elif choice == "null":
            node.null(key)
            value[key] = None
        elif isinstance(inner, Object):
            edit(inner, value[key], data)
        elif key in SHAPE.walked and isinstance(inner, list):
            for one, plain_one in zip(inner, value[key], strict=True):
                if isinstance(one, Object):
                    edit(one, plain_one, data)
    if data.draw(st.booleans()):
        node.set("added", "true")
        value["added"] = True


@settings(max_examples=60)
@given(documents, st.sampled_from([None, 2]), st.booleans(), st.data())
def test_edits_say_what_the_same_edits_of_the_data_say(
    value: dict[str, Any], indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    document = Document(spelled(value, indent, ascii_only), "text", SHAPE)
    edit(document.root, value, data)
    assert document.root.empty == (not value)
    rendered = document.render().decode("utf-8", "surrogatepass")
    assert json.loads(rendered) == value
    referred = with_reference(rendered.encode("utf-8", "surrogatepass"), b'{"x":1}')
    assert json.loads(referred.decode("utf-8", "surrogatepass")) == {**value, "arrow_tq": {"x": 1}}


def test_numbers_keep_their_text() -> None:
    raw = (
        b'{"meta":{"x":1.10, "y":1e-07,"z":0.1000000000000000055, "gone": [1,2]},"n":12345678901234567890123}'
    )
    document = Document(raw, "text", SHAPE)
    meta = document.root.child("meta")
    assert meta is not None
    meta.drop("gone")
    expected = b'{"meta":{"x":1.10, "y":1e-07,"z":0.1000000000000000055},"n":12345678901234567890123}'
    assert document.render() == expected


@settings(max_examples=60)
@given(documents.filter(bool), st.data())
def test_a_text_that_was_cut_off_is_refused(value: dict[str, Any], data: st.DataObject) -> None:
    raw = spelled(value, None, ascii_only=True)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(MalformedMessage, match="engine"):
        Document(raw[:cut], "engine's answer", SHAPE)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"1", b'{"a":1}{}', b'{"a":1,}', b'{"a" 1}', b'{a:1}', b'{"a":1,"a":2}', b'{"a":}',
     b"{" * 9999, b'{"meta":[1', b'{"meta":[1 2]}', b'{"big":"abc', b'{"a":"\\ud83d"'],
)  # fmt: skip
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Document(raw, "text", SHAPE)


def test_text_is_decoded_on_demand() -> None:
    document = Document('{"a":"h\\u00e9 wörld 🦜","b":2}'.encode(), "text", SHAPE)
    assert document.parsed(document.root.members["a"]) == "hé wörld 🦜"
    document.root.drop("b")
    assert document.render() == '{"a":"h\\u00e9 wörld 🦜"}'.encode()
