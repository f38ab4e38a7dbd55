"""Puts the blocks of all fields into chunks: which block goes where is known before the first is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from arrow_tq.bundles.plans import BlockPlan, Bytes, FieldPlan
from arrow_tq.bundles.structure import Block, FieldLayout, Structure

ALIGN_BYTES = 64
"""Buffers begin at such an offset; the blocks of one buffer follow each other without a gap."""


@dataclass(slots=True, eq=False)
class ChunkPlan:
    """One chunk: its size, and the blocks in it."""

    nbytes: int = 0
    blocks: list[tuple[int, BlockPlan]] = field(default_factory=list)

    def fill(self, out: Bytes) -> None:
        """Write the chunk; ``out`` is of ``nbytes``."""
        end = 0
        for offset, block in self.blocks:
            # What lies between two buffers is hashed, and must not be what was there before.
            out[end:offset] = 0
            end = offset + block.nbytes
            if block.nbytes:
                block.fill(out[offset:end])
        out[end:] = 0


def pack(
    fields: Sequence[FieldPlan], rows: int | None, chunk_bytes: int
) -> tuple[Structure, list[ChunkPlan]]:
    """Structure and chunks of ``chunk_bytes`` each, or of one block where that is larger.

    ``rows`` None: as many samples as most fields have rows.
    """
    rows = most_common(fields) if rows is None else rows
    packer = _Packer(chunk_bytes)
    layouts = [
        FieldLayout(
            one.key,
            one.layout,
            one.count,
            one.sequence and one.count == rows and not one.meta.get("whole"),
            one.meta,
            {name: packer.place(blocks) for name, blocks in one.buffers.items()},
        )
        for one in fields
    ]
    chunks = packer.chunks
    for chunk in chunks:
        # A chunk of no bytes is none: where nothing is stored, one byte is.
        chunk.nbytes = max(chunk.nbytes, 1)
    return Structure(rows, [chunk.nbytes for chunk in chunks], layouts), chunks


def most_common(fields: Sequence[FieldPlan]) -> int:
    """The number of rows that most sequences have: of two that are as common, the larger."""
    counts: dict[int, int] = {}
    for one in fields:
        if one.sequence and not one.meta.get("whole"):
            counts[one.count] = counts.get(one.count, 0) + 1
    return max(counts, key=lambda count: (counts[count], count), default=0)


class _Packer:
    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self.chunks: list[ChunkPlan] = []

    def place(self, blocks: Sequence[BlockPlan]) -> list[Block]:
        """Places of one buffer's blocks."""
        placed = []
        aligned = False
        for block in blocks:
            if not block.nbytes:
                # No bytes, no place; but its rows count.
                self._chunk_for(0)
                placed.append(Block(len(self.chunks), 0, 0, block.rows))
                continue
            chunk = self._chunk_for(block.nbytes)
            offset = chunk.nbytes if aligned and chunk.nbytes else _align(chunk.nbytes)
            aligned = True
            chunk.blocks.append((offset, block))
            chunk.nbytes = offset + block.nbytes
            placed.append(Block(len(self.chunks), offset, block.nbytes, block.rows))
        return placed

    def _chunk_for(self, nbytes: int) -> ChunkPlan:
        last = self.chunks[-1] if self.chunks else None
        if last is None or (last.nbytes and _align(last.nbytes) + nbytes > self._chunk_bytes):
            last = ChunkPlan()
            self.chunks.append(last)
        return last


def _align(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
