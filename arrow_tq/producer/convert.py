"""Number rules: which values a field takes, and how they become its storage dtype.

Works on blocks of rows that stay in the processor's cache, so that checking and narrowing read main
memory once. Nothing is ever truncated: what does not fit is refused, naming field, value and place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import InvalidField, ValueOutOfRange
from arrow_tq_schemas.fields import Field

Block = npt.NDArray[np.generic]
_MANTISSA_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


@dataclass(frozen=True, slots=True)
class Conversion:
    """How rows of one source dtype become rows of one field."""

    field: Field
    bounds: tuple[int, int] | None
    """Smallest and largest integer that the field takes; None where every source value fits."""
    null_minus_one: bool
    """A whole row of -1 is null: expert ids, signed, that do not declare -1 as their padding."""
    narrows_float: bool
    """The source is a float of another kind: cast, and refuse finite values that become infinite."""

    @classmethod
    def plan(cls, field: Field, source: str) -> Conversion:
        """The rule from logical dtype ``source`` into ``field``.

        Raises:
            InvalidField: no rule leads there without loss (floats into integers).
        """
        floats = source == "bfloat16" or np.dtype(source).kind == "f"
        if field.type.is_float:
            if source == field.dtype or (field.dtype == "bfloat16" and source == "uint16"):
                return cls(field, None, False, False)
            if field.dtype == "bfloat16" and source == "int16":
                raise InvalidField(
                    f"field {field.name!r}: int16 for bfloat16 could be numbers or bits; pass bits as uint16"
                )
            if floats:
                return cls(field, None, False, True)
            edge = 1 << _MANTISSA_BITS[field.dtype]
            return cls(field, _beyond((-edge, edge), source), False, field.dtype == "bfloat16")
        if floats:
            raise InvalidField(
                f"field {field.name!r}: expected {field.dtype}, got {source} (floats are not rounded)"
            )
        low, high = field.type.integer_range or (0, 1)
        if field.num_experts is not None:
            low, high = 0, field.num_experts - 1
        marks_null = field.num_experts is not None and np.dtype(source).kind == "i" and field.pad != -1
        return cls(field, _beyond((low, high), source), marks_null, False)

    def apply(self, block: Block, source: str, position: int) -> tuple[Block, npt.NDArray[np.bool_] | None]:
        """Check one block and prepare it.

        Args:
            block: ``[n, *field.shape]``, rows that are null already zeroed.
            source: its logical dtype.
            position: absolute position of its first row.

        Returns:
            The block, to be cast to the storage dtype without further checks, and which rows turned out
            to be null (``[n]`` bool), None for none.

        Raises:
            ValueOutOfRange: naming field, value, position and index inside the item.
        """
        nulls = None
        if self.bounds is not None and block.size and not _within(block, *self.bounds):
            nulls = self._outside(block, *self.bounds, position)
        if self.narrows_float:
            block = self._narrow(block, source, position)
        return block, nulls

    def _outside(self, block: Block, low: int, high: int, position: int) -> npt.NDArray[np.bool_] | None:
        """The null rows of a block that holds values outside the bounds; raises for any other."""
        bad = np.asarray((block < low) | (block > high))  # type: ignore[operator]
        nulls: npt.NDArray[np.bool_] | None = None
        if self.field.num_experts is not None and self.field.pad is not None:
            bad &= np.asarray(block != self.field.pad)
        if self.null_minus_one:
            nulls = np.all(np.asarray(block == -1).reshape(len(block), -1), axis=1)
            bad[nulls] = False
        if bad.any():
            raise self._refuse(block, bad, position, f"{low} to {high}")
        return nulls if nulls is not None and nulls.any() else None

    def _narrow(self, block: Block, source: str, position: int) -> Block:
        given = _widen_bfloat16(block) if source == "bfloat16" else block
        if self.field.dtype == "bfloat16":
            cast: Block = round_to_bfloat16(given)
            infinite = (cast & np.uint16(0x7FFF)) == np.uint16(0x7F80)  # type: ignore[operator]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                cast = given.astype(self.field.type.numpy)
            infinite = np.isinf(cast)
        if infinite.any():
            overflow = infinite & np.isfinite(given)
            if overflow.any():
                raise self._refuse(given, overflow, position, f"a finite {self.field.dtype}")
        return cast

    def _refuse(
        self, block: Block, bad: npt.NDArray[np.bool_], position: int, expected: str
    ) -> ValueOutOfRange:
        row, *index = (int(place) for place in np.argwhere(bad)[0])
        return out_of_range(self.field, block[(row, *index)].item(), position + row, index, expected)


def out_of_range(
    field: Field, value: object, position: int, index: list[int], expected: str
) -> ValueOutOfRange:
    """The error for one value at an absolute position and an index inside its item."""
    where = f", index {index}" if index else ""
    return ValueOutOfRange(
        f"field {field.name!r}: value {value!r} at position {position}{where}: expected {expected}",
        field=field.name,
        value=repr(value),
        position=position,
        index=index,
    )


def round_to_bfloat16(values: Block) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even, NaNs kept quiet. Input: any float or integer."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.asarray(values).astype(np.float32)
    bits = single.view(np.uint32)
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        bits = _round_to_odd(np.asarray(values), single)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded = np.where(np.isnan(single), bits | np.uint32(0x400000), rounded)
    out: npt.NDArray[np.uint16] = (rounded >> np.uint32(16)).astype(np.uint16)
    return out


def _round_to_odd(exact: npt.NDArray[np.generic], single: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """float32 bits that a second rounding cannot fool: inexact ones are cut toward zero, last bit set."""
    bits = single.view(np.uint32).copy()
    wide, narrow = np.abs(exact), np.abs(single)
    bits -= (narrow > wide).astype(np.uint32)
    bits |= (narrow != wide) & ~np.isnan(single)
    return bits


def _widen_bfloat16(bits: Block) -> npt.NDArray[np.float32]:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _beyond(bounds: tuple[int, int], source: str) -> tuple[int, int] | None:
    """``bounds``, or None where no value of the integer dtype ``source`` is outside them."""
    if source == "bool":
        low, high = 0, 1
    else:
        info = np.iinfo(source)
        low, high = int(info.min), int(info.max)
    return None if bounds[0] <= low and high <= bounds[1] else bounds


def _within(block: Block, low: int, high: int) -> bool:
    """Whether every value is inside: one pass where a negative one, read as unsigned, is past ``high``."""
    kind = block.dtype
    if low == 0 and kind.kind == "i" and high < 1 << (8 * kind.itemsize - 1):
        return int(block.view(kind.str.replace("i", "u")).max()) <= high
    return int(block.min()) >= low and int(block.max()) <= high
