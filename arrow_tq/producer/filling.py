"""Rows go where they will stay: checked, narrowed and hashed block by block, main memory read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from arrow_tq.producer.convert import Block, Conversion

BLOCK_BYTES = 512 << 10
"""What is checked, cast and hashed at a time: small enough to stay in the processor's cache."""
SMALL_BYTES = 64 << 10
"""Copied with the interpreter held: giving it up wakes another thread, which takes longer than the copy."""
Selection = tuple[slice, ...]


def fill(
    conversion: Conversion,
    given: Block,
    source: str,
    position: int,
    targets: Sequence[Block],
    selections: Sequence[Selection],
    digests: Sequence[xxhash.xxh3_128],
) -> bool:
    """Write rows to ``targets`` (one a layer group) in the storage dtype, and hash what was written.

    Args:
        conversion: how ``given`` becomes the field's.
        given: ``[rows, *field.shape]``, no row of it null as far as its owner knows.
        source: its logical dtype.
        position: absolute position of its first row.

    Returns:
        False where rows turned out to be null: what was written then means nothing.

    Raises:
        ValueOutOfRange: naming field, value, position and index inside the item.
    """
    if len(targets) == 1 and given.flags.c_contiguous and given.dtype.isnative:
        if conversion.bounds is None and not conversion.narrows_float:
            return _copy(given, targets[0], digests[0])
        if _compares_unsigned(conversion, given.dtype):
            return _narrow(conversion, given, source, position, targets[0], digests[0])
    return _fill_blocks(conversion, given, source, position, targets, selections, digests)


def _copy(given: Block, target: Block, digest: xxhash.xxh3_128) -> bool:
    """Every value fits as it is, or (a small integer into a wider type, or a float) by a plain cast."""
    if given.dtype == target.dtype and 0 < given.nbytes <= SMALL_BYTES:
        small = target.data.cast("B")
        small[:] = given.data.cast("B")
        digest.update(small)
        return True
    rows, out = given.reshape(-1), target.reshape(-1)
    written = out.view(np.uint8).data
    size = out.itemsize
    step = max(BLOCK_BYTES // max(size, rows.itemsize), 1)
    for first in range(0, len(rows), step):
        np.copyto(out[first : first + step], rows[first : first + step], casting="unsafe")
        digest.update(written[first * size : (first + step) * size])
    return True


def _compares_unsigned(conversion: Conversion, kind: np.dtype[np.generic]) -> bool:
    """Whether one comparison finds both values below 0 and beyond the bound."""
    if conversion.bounds is None or conversion.narrows_float or kind.kind not in "iu":
        return False
    low, high = conversion.bounds
    return low == 0 and (kind.kind == "u" or high < 1 << (8 * kind.itemsize - 1))


def _narrow(
    conversion: Conversion, given: Block, source: str, position: int, target: Block, digest: xxhash.xxh3_128
) -> bool:
    """Integers from 0 to a bound: the loop that routed experts take."""
    assert conversion.bounds is not None
    high = conversion.bounds[1]
    item = max(given[:1].size, 1)
    kind: np.dtype[Any] = _UNSIGNED[given.itemsize]
    values = given.reshape(-1).view(kind)
    out = target.reshape(-1)
    written = out.view(np.uint8).data
    size = out.itemsize
    step = max(BLOCK_BYTES // given.itemsize // item, 1) * item
    for first in range(0, len(values), step):
        block = values[first : first + step]
        if np.maximum.reduce(block) > high:
            row = first // item
            rows = given[row : row + step // item]
            if conversion.apply(rows, source, position + row)[1] is not None:
                return False
        np.copyto(out[first : first + step], block, casting="unsafe")
        digest.update(written[first * size : (first + step) * size])
    return True


_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}


def _fill_blocks(
    conversion: Conversion,
    given: Block,
    source: str,
    position: int,
    targets: Sequence[Block],
    selections: Sequence[Selection],
    digests: Sequence[xxhash.xxh3_128],
) -> bool:
    """Any layout, any conversion, any layer groups."""
    flat = [target.reshape(-1).view(np.uint8).data for target in targets]
    sizes = [target[:1].nbytes for target in targets]
    step = max(1, BLOCK_BYTES // max(given[:1].nbytes, 1))
    for row in range(0, len(given), step):
        block, nulls = conversion.apply(given[row : row + step], source, position + row)
        if nulls is not None:
            return False
        for target, selection, written, size, digest in zip(
            targets, selections, flat, sizes, digests, strict=True
        ):
            np.copyto(target[row : row + step], block[selection], casting="unsafe")
            digest.update(written[row * size : (row + step) * size])
    return True
