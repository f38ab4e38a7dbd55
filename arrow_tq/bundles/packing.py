"""Puts the blocks of all fields into chunks, and has each chunk written as soon as it is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from arrow_tq.bundles.plans import BlockPlan, Bytes, FieldPlan
from arrow_tq.bundles.structure import Block, FieldLayout, Structure

ALIGN_BYTES = 64
"""Buffers begin at such an offset; the blocks of one buffer follow each other without a gap."""
FULL_SHARE = 16
"""A chunk with less room left than this part of it is full: the next block is not looked at before."""
Write = Callable[[int, Callable[[Bytes], Iterable[int]]], None]
"""Stores the next chunk: its size, and what writes it (``ChunkPlan.fill``)."""


@dataclass(slots=True, eq=False)
class ChunkPlan:
    """One chunk: its size, and the blocks in it."""

    nbytes: int = 0
    blocks: list[tuple[int, BlockPlan]] = field(default_factory=list)

    def fill(self, out: Bytes) -> Iterator[int]:
        """Write the chunk; ``out`` is of ``nbytes``. Gives the end of each block that is written."""
        end = 0
        for offset, block in self.blocks:
            # What lies between two buffers is hashed, and must not be what was there before.
            out[end:offset] = 0
            end = offset + block.nbytes
            if block.nbytes:
                block.fill(out[offset:end])
                yield end
        out[end:] = 0


def pack(fields: Sequence[FieldPlan], rows: int | None, chunk_bytes: int, write: Write) -> Structure:
    """Have everything written in chunks of ``chunk_bytes``, or of one block where that is larger.

    Blocks are taken one by one: rows that nobody looked at yet are looked at right before they are gathered,
    while they are in the processor's caches. ``rows`` None: as many samples as most fields have rows.

    Raises:
        LayoutMiss: rows were not what their field's first ones promised; some chunks are written.
        InvalidInput: a row that cannot be stored, likewise.
    """
    packer = _Packer(chunk_bytes, write)
    buffers = [_placed(packer, one) for one in fields]
    packer.close()
    rows = most_common(fields) if rows is None else rows
    layouts = [
        FieldLayout(
            one.key,
            one.layout,
            one.count,
            one.sequence and one.count == rows and not one.meta.get("whole"),
            one.meta,
            placed,
        )
        for one, placed in zip(fields, buffers, strict=True)
    ]
    return Structure(rows, packer.sizes, layouts)


def most_common(fields: Sequence[FieldPlan]) -> int:
    """The number of rows that most sequences have: of two that are as common, the larger."""
    counts: dict[int, int] = {}
    for one in fields:
        if one.sequence and not one.meta.get("whole"):
            counts[one.count] = counts.get(one.count, 0) + 1
    return max(counts, key=lambda count: (counts[count], count), default=0)


def _placed(packer: _Packer, plan: FieldPlan) -> dict[str, list[Block]]:
    placed = {name: packer.place(blocks) for name, blocks in plan.buffers.items()}
    if plan.late is not None:
        placed |= {name: packer.place(blocks) for name, blocks in plan.late().items()}
    return placed


class _Packer:
    """Fills one chunk after the other.

    Attributes:
        sizes: of the chunks that are full; the open one is the next.
    """

    def __init__(self, chunk_bytes: int, write: Write) -> None:
        self._chunk_bytes = chunk_bytes
        self._write = write
        self._open: ChunkPlan | None = None
        self.sizes: list[int] = []

    def place(self, blocks: Iterable[BlockPlan]) -> list[Block]:
        """Places of one buffer's blocks."""
        placed = []
        aligned = False
        for block in blocks:
            if not block.nbytes:
                # No bytes, no place; but its rows count.
                placed.append(Block(self._some_chunk(), 0, 0, block.rows))
                continue
            chunk = self._chunk_for(block.nbytes)
            offset = chunk.nbytes if aligned and chunk.nbytes else _align(chunk.nbytes)
            aligned = True
            chunk.blocks.append((offset, block))
            chunk.nbytes = offset + block.nbytes
            placed.append(Block(len(self.sizes) + 1, offset, block.nbytes, block.rows))
            if chunk.nbytes + max(self._chunk_bytes // FULL_SHARE, 1) > self._chunk_bytes:
                self.close()
        return placed

    def close(self) -> None:
        """Have the open chunk written, if there is one."""
        chunk, self._open = self._open, None
        if chunk is not None:
            # A chunk of no bytes is none: where nothing is stored, one byte is.
            chunk.nbytes = max(chunk.nbytes, 1)
            self._write(chunk.nbytes, chunk.fill)
            self.sizes.append(chunk.nbytes)

    def _some_chunk(self) -> int:
        """Number of the last chunk."""
        if self._open is None and not self.sizes:
            self._open = ChunkPlan()
        return len(self.sizes) + (self._open is not None)

    def _chunk_for(self, nbytes: int) -> ChunkPlan:
        last = self._open
        if last is not None and last.nbytes and _align(last.nbytes) + nbytes > self._chunk_bytes:
            self.close()
        if self._open is None:
            self._open = ChunkPlan()
        return self._open


def _align(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
