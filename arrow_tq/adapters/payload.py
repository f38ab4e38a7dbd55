"""The forms in which rows of ids arrive: base64 text, tensors, nested lists. Read in blocks of rows."""

from __future__ import annotations

import binascii
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.message import kind
from arrow_tq_schemas.errors import MalformedMessage

Block = npt.NDArray[np.generic]
Item = tuple[int, int]
"""Layers that the engine sends, and ids a layer."""


class Payload(Protocol):
    """``rows`` rows of ``[layers, topk]`` integers of one dtype."""

    @property
    def rows(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    def read(self, first: int, end: int) -> Block:
        """``[end - first, layers, topk]``."""
        ...


class Base64Text:
    """Bytes in base64 with padding, decoded where they are asked for, so that no whole copy is made."""

    def __init__(self, text: str | bytes, place: str) -> None:
        self._text = text
        self.place = place
        if len(text) % 4:
            raise MalformedMessage(f"{place}: {len(text)} characters are no base64, expected a multiple of 4")
        tail = text[-2:] if isinstance(text, str) else text[-2:].decode("latin-1")
        self.nbytes = len(text) // 4 * 3 - tail.count("=")

    def read(self, first: int, end: int) -> memoryview:
        """Bytes ``[first, end)``."""
        group = first // 3
        piece = self._text[4 * group : 4 * -(-end // 3)]
        try:
            raw = binascii.a2b_base64(piece, strict_mode=True) if piece else b""
        except ValueError as error:
            raise self._refuse(group, str(error)) from None
        part = memoryview(raw)[first - 3 * group : end - 3 * group]
        if len(part) != end - first:
            raise self._refuse(group, "padding before its end")
        return part

    def _refuse(self, group: int, why: str) -> MalformedMessage:
        return MalformedMessage(f"{self.place}: no base64 at or after character {4 * group}: {why}")


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows in C order inside base64 text, after a header of ``offset`` bytes."""

    text: Base64Text
    item: Item
    dtype: np.dtype[np.generic]
    rows: int
    offset: int = 0

    @classmethod
    def flat(cls, text: Base64Text, item: Item, dtype: np.dtype[np.generic]) -> EncodedRows:
        """Text that is rows and nothing else.

        Raises:
            MalformedMessage: it holds no whole number of rows; names bytes, layers, ids a layer and dtype.
        """
        rows, left = divmod(text.nbytes, math.prod(item) * dtype.itemsize)
        if left:
            raise MalformedMessage(
                f"{text.place}: {text.nbytes} bytes are no whole number of rows of {item[0]} layers x "
                f"{item[1]} ids of {dtype.name} ({math.prod(item) * dtype.itemsize} bytes each)",
                bytes=text.nbytes,
                layers=item[0],
                topk=item[1],
                dtype=dtype.name,
            )
        return cls(text, item, dtype, rows)

    def read(self, first: int, end: int) -> Block:
        row_bytes = math.prod(self.item) * self.dtype.itemsize
        raw = self.text.read(self.offset + first * row_bytes, self.offset + end * row_bytes)
        return np.frombuffer(raw, self.dtype).reshape(end - first, *self.item)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Rows that are an array already."""

    values: Block
    """``[rows, layers, topk]``."""

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.values.dtype

    def read(self, first: int, end: int) -> Block:
        return self.values[first:end]

    @classmethod
    def of(cls, value: object, item: Item, place: str) -> ArrayRows:
        """A tensor (numpy or torch) or nested lists: ``[rows, layers, topk]``, or any part of it flat.

        Raises:
            MalformedMessage: no integers, ragged, or another shape.
        """
        values = _integers(value, place)
        layers, topk = item
        if not values.size and values.shape[:1] == (0,):
            return cls(np.empty((0, layers, topk), values.dtype))
        inner = values.shape[1:]
        fits = inner in ((layers, topk), (layers * topk,)) or (
            values.ndim == 1 and values.size % (layers * topk) == 0
        )
        if not fits:
            raise MalformedMessage(
                f"{place}: an array of shape {list(values.shape)}, expected [rows, {layers} layers, "
                f"{topk} ids]",
                shape=list(values.shape),
                layers=layers,
                topk=topk,
            )
        return cls(values.reshape(-1, layers, topk))


def _integers(value: object, place: str) -> npt.NDArray[Any]:
    if isinstance(value, list | tuple):
        values = _from_lists(value, place)
    elif isinstance(value, np.ndarray):
        values = value
    elif hasattr(value, "detach") and hasattr(value, "cpu"):
        values = _from_tensor(value, place)
    else:
        raise MalformedMessage(f"{place}: expected base64 text, a tensor or nested lists, got {kind(value)}")
    if values.dtype.kind not in "iu":
        raise MalformedMessage(f"{place}: an array of {values.dtype}, expected integers")
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _from_lists(value: list[Any] | tuple[Any, ...], place: str) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise MalformedMessage(f"{place}: nested lists that are no array: {error}") from None
    # numpy calls an empty list float64; it holds nothing that could say otherwise.
    return values if values.size else values.astype(np.int64)


def _from_tensor(value: Any, place: str) -> npt.NDArray[Any]:
    """By a tensor's methods alone: this module must not import torch."""
    try:
        values = value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise MalformedMessage(f"{place}: a tensor that numpy cannot show: {error}") from None
    if not isinstance(values, np.ndarray):
        raise MalformedMessage(f"{place}: a tensor that numpy cannot show")
    return values


def concatenate(parts: list[ArrayRows]) -> ArrayRows:
    """Rows of several arrays, one after the other."""
    return ArrayRows(np.concatenate([part.values for part in parts]))
