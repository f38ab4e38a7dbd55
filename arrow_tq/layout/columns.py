"""The record batch of a chunk: one column of fixed-width items, its message before its body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.layout.messages import BatchMessages, Template, pad
from arrow_tq_schemas.chunks import METADATA_KEY

Values = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]
PLANS_MAX = 256
"""Plans kept, one for each number of rows and length of the metadata: small chunks are mostly alike."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Where the parts of one batch are, from the start of its message."""

    rows: int
    template: Template
    valid_at: int
    valid_bytes: int
    values_at: int
    values_bytes: int
    length: int
    """Of the message, body included."""
    before: bytes = b""
    after: bytes = b""
    """What is around the custom metadata in the message before its body, where no row is null."""


class ColumnLayout:
    """Batches of one column: a primitive, or a fixed-shape tensor of primitives. Thread-safe."""

    def __init__(self, schema: pa.Schema) -> None:
        kind = schema.field(0).type
        self._tensor = isinstance(kind, pa.BaseExtensionType)
        self.item_shape: tuple[int, ...] = tuple(kind.shape) if self._tensor else ()
        value = kind.value_type if self._tensor else kind
        self.dtype: np.dtype[np.generic] = np.dtype(value.to_pandas_dtype())
        self.item_values = int(np.prod(self.item_shape, dtype=np.int64))
        self.row_bytes = self.item_values * self.dtype.itemsize
        self._messages = BatchMessages(schema, METADATA_KEY)
        self._plans: dict[tuple[int, bool, int], BatchPlan] = {}

    def plan(self, rows: int, nullable: bool, metadata_bytes: int) -> BatchPlan:
        """The places of a batch of so many rows; ``nullable``: validity bits precede the values."""
        key = (rows, nullable, metadata_bytes)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            found = self._plans[key] = self._planned(rows, nullable, metadata_bytes)
        return found

    def head(self, plan: BatchPlan, nulls: int, metadata: bytes) -> bytes:
        """The message before its body."""
        if not nulls:
            return plan.before + metadata + plan.after
        return bytes(self._head(plan, nulls, metadata))

    def _planned(self, rows: int, nullable: bool, metadata_bytes: int) -> BatchPlan:
        template = self._messages.template(metadata_bytes)
        head = len(template.raw)
        valid_bytes = -(-rows // 8) if nullable else 0
        values_bytes = rows * self.row_bytes
        values_at = head + pad(valid_bytes)
        plan = BatchPlan(
            rows, template, head, valid_bytes, values_at, values_bytes, values_at + pad(values_bytes)
        )
        raw, end = bytes(self._head(plan, 0, b"")), template.value + metadata_bytes
        return replace(plan, before=raw[: template.value], after=raw[end:])

    def _head(self, plan: BatchPlan, nulls: int, metadata: bytes) -> bytearray:
        rows = plan.rows
        first = plan.values_at - plan.valid_at
        body_bytes = plan.length - plan.valid_at
        nodes: tuple[int, ...]
        buffers: tuple[int, ...]
        if self._tensor:
            nodes = (rows, nulls, rows * self.item_values, 0)
            buffers = (0, plan.valid_bytes, first, 0, first, plan.values_bytes)
        else:
            nodes = (rows, nulls)
            buffers = (0, plan.valid_bytes, first, plan.values_bytes)
        return plan.template.fill(rows, nodes, buffers, body_bytes, metadata)

    def read(
        self, memory: Callable[[int, int], Buffer], end: int, rows: int, nullable: bool
    ) -> tuple[Values, Mask | None]:
        """Values ``[rows, *item]`` and validity of the batch whose message ends at ``end``.

        ``memory`` gives so many bytes (its second argument) from a place on: what it gives is viewed.
        """
        size = rows * self.row_bytes
        first = end - pad(size)
        values = np.frombuffer(memory(first, size), self.dtype)
        valid: Mask | None = None
        if nullable:
            count = -(-rows // 8)
            bits = np.frombuffer(memory(first - pad(count), count), np.uint8)
            valid = np.unpackbits(bits, bitorder="little", count=rows).view(np.bool_)
        return values.reshape(rows, *self.item_shape), valid


Buffer = bytes | bytearray | memoryview
