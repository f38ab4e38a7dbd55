"""Appends chunks to memory as one IPC stream: reserve, fill, publish."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arrow_tq.layout.columns import BatchPlan, ColumnLayout, Mask, Values
from arrow_tq.layout.messages import END_OF_STREAM

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class Reserved:
    """Room for one chunk behind everything that is complete. Nobody sees it before ``complete``."""

    offset: int
    plan: BatchPlan
    values: Values
    """``[rows, *item]``, writable, with whatever the memory held before."""

    @property
    def end(self) -> int:
        return self.offset + self.plan.length


class Appender:
    """The stream in one mapping. One thread at a time.

    Attributes:
        used_bytes: end of the last complete message.
    """

    def __init__(self, memory: Bytes, layout: ColumnLayout, used_bytes: int = 0) -> None:
        self._memory = memory
        # The same bytes: small pieces go through it at a tenth of what numpy's assignment costs.
        self._bytes = memory.data
        self._layout = layout
        self.used_bytes = used_bytes

    def begin(self, schema: bytes) -> None:
        """Write the schema message, which comes first."""
        self._bytes[: len(schema)] = schema
        self.used_bytes = len(schema)

    def reserve(self, rows: int, metadata_bytes: int, nullable: bool = False) -> Reserved:
        """Room for a chunk; whoever reserves again without completing gets the same room."""
        return self.reserve_planned(self._layout.plan(rows, nullable, metadata_bytes))

    def reserve_planned(self, plan: BatchPlan) -> Reserved:
        """The same, for a plan of this layout's."""
        layout, offset = self._layout, self.used_bytes
        values: Values = np.ndarray(
            (plan.rows, *layout.item_shape), layout.dtype, self._memory, offset + plan.values_at
        )
        return Reserved(offset, plan, values)

    def complete(self, reserved: Reserved, metadata: bytes, valid: Mask | None = None) -> None:
        """Write what is around the values, which are there; the message is part of the stream after."""
        plan, memory, offset = reserved.plan, self._bytes, reserved.offset
        end = offset + plan.length
        nulls = 0
        if valid is not None and plan.valid_bytes:
            first = offset + plan.valid_at
            bits = np.packbits(valid, bitorder="little").tobytes()
            memory[first : offset + plan.values_at] = bits.ljust(plan.values_at - plan.valid_at, b"\x00")
            nulls = len(valid) - int(np.count_nonzero(valid))
        padding = plan.length - plan.values_at - plan.values_bytes
        if padding:
            memory[end - padding : end] = bytes(padding)
        head = self._layout.head(plan, nulls, metadata)
        memory[offset : offset + len(head)] = head
        self.used_bytes = end

    def rewind(self, offset: int) -> None:
        """Take back the messages from ``offset`` on. Whoever walks the file must not find them either."""
        self._bytes[offset : offset + len(END_OF_STREAM)] = bytes(len(END_OF_STREAM))
        self.used_bytes = offset

    def end(self) -> int:
        """Write the end of the stream, and give where it ends."""
        first, end = self.used_bytes, self.used_bytes + len(END_OF_STREAM)
        self._bytes[first:end] = END_OF_STREAM
        return end
