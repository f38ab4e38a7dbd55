"""JSON texts that are edited in place: members are cut, replaced and added, every other byte stays.

A text is held as latin-1, one character a byte, whatever is in it; JSON's own characters are ASCII, so
places and cuts are right. Only the objects that may be edited are walked here; all other values are
parsed by the standard library's scanner, and large payloads not at all: they are taken as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.scanner import make_scanner

from arrow_tq_schemas.errors import MalformedMessage

_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_blank = re.compile(r"[ \t\n\r]*").match


@dataclass(frozen=True, slots=True)
class Shape:
    """Which members of a text are walked, and which are large.

    Args:
        walked: keys whose objects, or objects in a list, may be edited.
        large: keys whose string values are not parsed: base64 has no escapes.
    """

    walked: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One member of an object: where it is, and its value.

    ``value`` is parsed JSON, an ``Object`` or a list of them where the shape says so. Text in it has one
    character a byte (``Document.parsed`` gives it decoded).
    """

    key_start: int
    start: int
    end: int
    value: object


@dataclass(slots=True, eq=False)
class Object:
    """A JSON object that may be edited; changes show in ``Document.render``."""

    members: dict[str, Member]
    end: int
    """Place after its closing brace."""
    _dropped: set[str] = field(default_factory=set)
    _texts: dict[str, str] = field(default_factory=dict)
    _added: dict[str, str] = field(default_factory=dict)

    def get(self, key: str) -> object:
        """The member's value; None also where there is none."""
        member = self.members.get(key)
        return None if member is None else member.value

    def child(self, key: str) -> Object | None:
        value = self.get(key)
        return value if isinstance(value, Object) else None

    def children(self, key: str) -> list[Object]:
        """The objects of a list."""
        value = self.get(key)
        return [one for one in value if isinstance(one, Object)] if isinstance(value, list) else []

    def drop(self, *keys: str) -> None:
        """Take members out; those that are not there are passed over."""
        self._dropped.update(key for key in keys if key in self.members)

    def set(self, key: str, text: str) -> None:
        """Give a member another value, as JSON text in ASCII; add it where there is none."""
        if key in self.members:
            self._texts[key] = text
            self._dropped.discard(key)
        else:
            self._added[key] = text

    def null(self, *keys: str) -> None:
        """Make members null; those that are not there stay away."""
        for key in keys:
            if key in self.members:
                self.set(key, "null")

    @property
    def empty(self) -> bool:
        """Whether nothing is left in it."""
        return len(self._dropped) == len(self.members) and not self._added

    def plain(self) -> dict[str, object]:
        """Its members as parsed, those that were dropped too."""
        return {key: _plain(member.value) for key, member in self.members.items()}

    def edits(self) -> Iterator[tuple[int, int, str]]:
        """Places to replace, in any order, none inside another."""
        members = list(self.members.items())
        kept = [index for index, (key, _) in enumerate(members) if key not in self._dropped]
        last = kept[-1] if kept else -1
        for index, (key, member) in enumerate(members):
            if key not in self._dropped:
                text = self._texts.get(key)
                if text is not None:
                    yield member.start, member.end, text
                else:
                    yield from _inner(member.value)
            elif index < last:
                yield member.key_start, members[index + 1][1].key_start, ""
        if last + 1 < len(members):
            start = members[last][1].end if kept else members[0][1].key_start
            yield start, members[-1][1].end, ""
        if self._added:
            added = ",".join(f"{json.dumps(key)}:{text}" for key, text in self._added.items())
            yield self.end - 1, self.end - 1, f",{added}" if kept else added


class Document:
    """One JSON object as text."""

    def __init__(self, raw: bytes | bytearray | memoryview, what: str, shape: Shape) -> None:
        """A bytearray is emptied: its memory is not needed twice.

        Raises:
            MalformedMessage: no JSON object; ``what`` is what it is called there.
        """
        self.text = str(raw, "latin-1")
        if isinstance(raw, bytearray):
            raw.clear()
        self._what = what
        self._shape = shape
        try:
            start = _skip(self.text, 0)
            if self.text[start : start + 1] != "{":
                raise ValueError("expected an object")
            self.root = self._object(start)
            if _skip(self.text, self.root.end) != len(self.text):
                raise ValueError(f"more after its end at character {self.root.end}")
        except (StopIteration, ValueError, RecursionError) as error:
            reason = f"cut off at character {error.value}" if isinstance(error, StopIteration) else error
            raise MalformedMessage(f"{what}: no JSON object: {reason}") from None

    def parsed(self, member: Member) -> object:
        """A member's value parsed anew from its bytes, its text decoded as UTF-8.

        Raises:
            MalformedMessage: it is no UTF-8.
        """
        try:
            return json.loads(self.text[member.start : member.end].encode("latin-1").decode("utf-8"))
        except ValueError as error:
            raise MalformedMessage(f"{self._what}: {error}") from None

    def render(self) -> bytes:
        """The bytes with every edit made."""
        pieces: list[str] = []
        place = 0
        for start, end, text in sorted(self.root.edits()):
            pieces += (self.text[place:start], text)
            place = end
        pieces.append(self.text[place:])
        return "".join(pieces).encode("latin-1")

    def _object(self, start: int) -> Object:
        text = self.text
        members: dict[str, Member] = {}
        place = _skip(text, start + 1)
        while text[place : place + 1] != "}" or members:
            if text[place : place + 1] != '"':
                raise ValueError(f"expected a name at character {place}")
            key_start = place
            key, place = _scan(text, place)
            place = _skip(text, place)
            if text[place : place + 1] != ":":
                raise ValueError(f"expected ':' at character {place}")
            value_start = _skip(text, place + 1)
            value, value_end = self._value(key, value_start)
            if key in members:
                # A cut of one of them would leave the other: nobody means to send this.
                raise ValueError(f"the name {key!r} twice")
            members[key] = Member(key_start, value_start, value_end, value)
            place = _skip(text, value_end)
            if text[place : place + 1] == "}":
                break
            if text[place : place + 1] != ",":
                raise ValueError(f"expected ',' at character {place}")
            place = _skip(text, place + 1)
        return Object(members, place + 1)

    def _value(self, key: str, place: int) -> tuple[object, int]:
        text, first = self.text, self.text[place : place + 1]
        if key in self._shape.large and first == '"':
            end = text.find('"', place + 1)
            if end < 0:
                raise ValueError(f"a string without an end at character {place}")
            return text[place + 1 : end], end + 1
        if key in self._shape.walked and first == "{":
            found = self._object(place)
            return found, found.end
        if key in self._shape.walked and first == "[":
            return self._list(key, place)
        value, end = _scan(text, place)
        return value, end

    def _list(self, key: str, place: int) -> tuple[object, int]:
        text = self.text
        items: list[object] = []
        place = _skip(text, place + 1)
        while text[place : place + 1] != "]":
            item, place = self._value(key, place)
            items.append(item)
            place = _skip(text, place)
            if text[place : place + 1] == ",":
                place = _skip(text, place + 1)
            elif text[place : place + 1] != "]":
                raise ValueError(f"expected ',' at character {place}")
        return items, place + 1


def _inner(value: object) -> Iterator[tuple[int, int, str]]:
    if isinstance(value, Object):
        yield from value.edits()
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Object):
                yield from item.edits()


def _plain(value: object) -> object:
    if isinstance(value, Object):
        return value.plain()
    if isinstance(value, list) and any(isinstance(item, Object) for item in value):
        return [_plain(item) for item in value]
    return value


def _skip(text: str, place: int) -> int:
    found = _blank(text, place)
    return found.end() if found is not None else place
