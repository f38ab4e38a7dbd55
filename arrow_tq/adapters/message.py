"""Reading an engine's JSON: typed look-ups that name the place when something is not as it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arrow_tq_schemas.errors import MalformedMessage


class Message:
    """One object of a response, and its place in it for error messages."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise MalformedMessage(f"{place}: expected an object, got {kind(value)}")
        self.value = value
        self.place = place

    def where(self, key: str) -> str:
        return f"{self.place}.{key}"

    def get(self, key: str) -> object:
        """What is there; None also where nothing is."""
        return self.value.get(key)

    def child(self, key: str) -> Message | None:
        value = self.get(key)
        return None if value is None else Message(value, self.where(key))

    def items(self, key: str) -> Sequence[object] | None:
        """A list, as JSON or pickled tuples have it."""
        value = self.get(key)
        if value is None or isinstance(value, list | tuple):
            return value
        raise MalformedMessage(f"{self.where(key)}: expected a list, got {kind(value)}")

    def count(self, key: str) -> int | None:
        value = self.get(key)
        if value is None or (type(value) is int and value >= 0):
            return value
        raise MalformedMessage(f"{self.where(key)}: expected an integer from 0 up, got {kind(value)}")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        raise MalformedMessage(f"{self.where(key)}: expected a string, got {kind(value)}")

    def element(self, key: str, index: int) -> Message:
        """Object ``index`` of a list that must be there."""
        items = self.items(key) or ()
        if not 0 <= index < len(items):
            raise MalformedMessage(f"{self.where(key)}: has {len(items)}, number {index} was asked for")
        return Message(items[index], f"{self.where(key)}[{index}]")


def kind(value: object) -> str:
    """A value for a message: its type, and itself where that is short."""
    if isinstance(value, bool | int | float | str) and len(shown := repr(value)[:81]) <= 80:
        return shown
    return type(value).__name__
