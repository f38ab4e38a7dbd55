"""Fields: the named per-token columns that a run declares, and the tasks that read them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields as dataclass_fields
from typing import Any, cast

import numpy as np
import pyarrow as pa

from arrow_tq_schemas import dtypes
from arrow_tq_schemas.errors import ArrowTQError, InvalidField
from arrow_tq_schemas.names import check_identifier

TOKEN_FIELD = "token_ids"
"""The field whose values tell overlay from rewrite, and that ``expect_tokens`` checks against."""
DOMAINS = ("all", "sampled", "forwarded")
OVERLAYS = ("last", "first")
ROW_BYTES_MAX = 16 << 20
LAYER_GROUPS_MAX = 256

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Field:
    """One per-token column of a run.

    Args:
        name: column name.
        dtype: logical dtype of one value (``dtypes.NAMES``).
        shape: shape of one token's item: ``()``, ``(layers, topk)``.
        layer_axis: which axis of ``shape`` counts layers, if any.
        layer_ids: global layer id of each index on that axis; ``0..L-1`` when left out.
        layer_groups: lists of global layer ids, each stored as chunks of its own.
        num_experts: values are expert ids ``0 .. num_experts - 1``; a whole row of -1 is null.
        domain: which of a segment's T tokens have a row: ``all``, ``sampled`` or ``forwarded`` (T-1).
        fill: what rows outside the domain read as; zero when left out.
        pad: a value that marks padding *inside* rows (``-1`` for indexer top-k); null rows read as it.
        overlay: who wins where two steps wrote one position: the ``last`` or the ``first``.

    Raises:
        InvalidField: naming the field and the value that does not fit.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    layer_axis: int | None = None
    layer_ids: tuple[int, ...] | None = None
    layer_groups: tuple[tuple[int, ...], ...] | None = None
    num_experts: int | None = None
    domain: str = "all"
    fill: Number | None = None
    pad: Number | None = None
    overlay: str = "last"

    def __post_init__(self) -> None:
        check_identifier(self.name, "field name")
        try:
            dtypes.dtype(self.dtype)
        except ArrowTQError as error:
            raise self._refuse(error.message) from None
        self._set("shape", self._int_tuple(self.shape, "shape"))
        if any(extent < 1 for extent in self.shape):
            raise self._refuse(f"shape {self.shape}: every extent must be at least 1")
        if self.row_bytes > ROW_BYTES_MAX:
            raise self._refuse(f"a row of {self.row_bytes} bytes: at most {ROW_BYTES_MAX}")
        if self.domain not in DOMAINS:
            raise self._refuse(f"domain {self.domain!r}: expected one of {', '.join(DOMAINS)}")
        if self.overlay not in OVERLAYS:
            raise self._refuse(f"overlay {self.overlay!r}: expected one of {', '.join(OVERLAYS)}")
        self._check_layers()
        self._check_experts()
        for label in ("fill", "pad"):
            self._check_value(label, getattr(self, label))

    # -- what others ask of a field ------------------------------------------------------------

    @property
    def type(self) -> dtypes.DType:
        return dtypes.dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's item as stored."""
        return math.prod(self.shape) * self.type.numpy.itemsize

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Global layer ids of each layer group; one empty group for a field without layers."""
        if self.layer_groups is not None:
            return self.layer_groups
        return (self.layer_ids or (),)

    @property
    def fill_value(self) -> np.generic:
        """``fill`` (or zero) in the storage dtype."""
        return self._stored(0 if self.fill is None else self.fill)

    @property
    def pad_value(self) -> np.generic | None:
        """``pad`` in the storage dtype, or None."""
        return None if self.pad is None else self._stored(self.pad)

    def group_shape(self, group: int) -> tuple[int, ...]:
        """Item shape of one layer group's chunks."""
        if self.layer_axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.layer_axis] = len(self.groups[group])
        return tuple(shape)

    def layer_index(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Indices on the layer axis of these global layer ids, in the order asked."""
        if self.layer_axis is None:
            raise self._refuse("has no layer axis, so layers cannot be chosen")
        place = {layer: index for index, layer in enumerate(self.layer_ids or ())}
        missing = [layer for layer in layers if layer not in place]
        if missing:
            raise self._refuse(f"layers {missing} are not among its layer ids {list(place)}")
        return tuple(place[layer] for layer in layers)

    def arrow_type(self, group: int = 0) -> pa.DataType:
        """Arrow type of one layer group: a primitive, or ``arrow.fixed_shape_tensor``."""
        shape = self.group_shape(group)
        return pa.fixed_shape_tensor(self.type.arrow, list(shape)) if shape else self.type.arrow

    def arrow_schema(self, group: int = 0) -> pa.Schema:
        """Schema of a chunk: one nullable column, logical dtype and layers in its metadata."""
        return _arrow_schema(self, group)

    def to_json(self) -> dict[str, object]:
        """JSON-safe declaration; ``from_json`` gives an equal field."""
        return {slot.name: _lists(getattr(self, slot.name)) for slot in dataclass_fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Field:
        known = {slot.name for slot in dataclass_fields(cls)}
        if not isinstance(value, Mapping):
            raise InvalidField(f"field declaration {value!r}: expected an object")
        unknown = sorted(set(value) - known)
        if unknown or "name" not in value or "dtype" not in value:
            raise InvalidField(f"field declaration {dict(value)!r}: unknown or missing keys {unknown}")
        return cls(**value)  # type: ignore[arg-type]

    # -- validation ----------------------------------------------------------------------------

    def _check_layers(self) -> None:
        if self.layer_axis is None:
            if self.layer_ids is not None or self.layer_groups is not None:
                raise self._refuse("layer_ids and layer_groups need a layer_axis")
            return
        if type(self.layer_axis) is not int or not 0 <= self.layer_axis < len(self.shape):
            raise self._refuse(f"layer_axis {self.layer_axis!r} is no axis of shape {self.shape}")
        count = self.shape[self.layer_axis]
        ids = range(count) if self.layer_ids is None else self.layer_ids
        self._set("layer_ids", self._int_tuple(ids, "layer_ids"))
        assert self.layer_ids is not None
        if len(self.layer_ids) != count:
            raise self._refuse(f"{len(self.layer_ids)} layer_ids for {count} layers of shape {self.shape}")
        if len(set(self.layer_ids)) != count or min(self.layer_ids) < 0:
            raise self._refuse(f"layer_ids {list(self.layer_ids)}: expected distinct ids from 0 up")
        if self.layer_groups is None:
            return
        try:
            lists = tuple(self.layer_groups)
        except TypeError:
            raise self._refuse(f"layer_groups {self.layer_groups!r}: expected lists of layer ids") from None
        groups = tuple(self._int_tuple(group, "layer_groups") for group in lists)
        self._set("layer_groups", groups)
        flat = [layer for group in groups for layer in group]
        if flat != list(self.layer_ids) or not all(groups):
            raise self._refuse(
                f"layer_groups {[list(group) for group in groups]}: expected non-empty groups that "
                f"list layer_ids {list(self.layer_ids)} once, in order"
            )
        if len(groups) > LAYER_GROUPS_MAX:
            raise self._refuse(f"{len(groups)} layer_groups: at most {LAYER_GROUPS_MAX}")

    def _check_experts(self) -> None:
        if self.num_experts is None:
            return
        bounds = self.type.integer_range
        if type(self.num_experts) is not int or self.num_experts < 1:
            raise self._refuse(f"num_experts {self.num_experts!r}: expected a positive integer")
        if bounds is None or self.num_experts - 1 > bounds[1]:
            raise self._refuse(f"dtype {self.dtype} cannot hold ids up to {self.num_experts - 1}")

    def _check_value(self, label: str, value: Number | None) -> None:
        if value is None:
            return
        if not isinstance(value, int | float):
            raise self._refuse(f"{label} {value!r}: expected a number")
        bounds = self.type.integer_range
        if bounds is not None:
            whole = isinstance(value, int) or value.is_integer()
            if not (whole and bounds[0] <= value <= bounds[1]):
                raise self._refuse(f"{label} {value!r} does not fit {self.dtype}")
        elif self.type.is_float:
            self._check_float(label, value)
        if self.dtype == "bool" and value not in (0, 1):
            raise self._refuse(f"{label} {value!r} is not a bool")

    def _check_float(self, label: str, value: Number) -> None:
        # JSON has no NaN and no infinity, so a declaration could not travel with one.
        try:
            with np.errstate(over="ignore"):
                finite = math.isfinite(value) and np.isfinite(self._as_float(value))
        except OverflowError:
            finite = False
        if not finite:
            raise self._refuse(f"{label} {value!r}: expected a finite {self.dtype}")

    def _as_float(self, value: Number) -> np.floating[Any]:
        """``value`` as the float dtype, or as the float32 that holds the bfloat16 nearest to it."""
        if self.dtype != "bfloat16":
            return cast("np.floating[Any]", self.type.numpy.type(value))
        bits = np.float32(value).view(np.uint32)
        rounded = (int(bits) + 0x7FFF + (int(bits) >> 16 & 1)) & 0xFFFF0000
        return np.uint32(rounded).view(np.float32)

    def _stored(self, value: Number) -> np.generic:
        if self.dtype == "bfloat16":
            return np.uint16(self._as_float(value).view(np.uint32) >> np.uint32(16))
        return self.type.numpy.type(value)

    def _int_tuple(self, values: Sequence[int], label: str) -> tuple[int, ...]:
        try:
            plain = tuple(values)
        except TypeError:
            raise self._refuse(f"{label} {values!r}: expected a sequence of integers") from None
        if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in plain):
            raise self._refuse(f"{label} {plain!r}: expected integers")
        return tuple(int(value) for value in plain)

    def _set(self, slot: str, value: object) -> None:
        object.__setattr__(self, slot, value)

    def _refuse(self, why: str) -> InvalidField:
        return InvalidField(f"field {self.name!r}: {why}", field=self.name)


def _lists(value: object) -> object:
    """As JSON has it, so that a declaration equals itself after a trip."""
    return [_lists(part) for part in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer of a run. It claims and releases on its own.

    Args:
        name: the task's name (``actor``, ``critic``).
        fields: names of the fields it reads; None for all. A field's bytes live until every task that
            reads it is done.
    """

    name: str
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_identifier(self.name, "task name")
        if self.fields is not None:
            if isinstance(self.fields, str) or not isinstance(self.fields, Iterable):
                raise InvalidField(f"task {self.name!r}: fields must be a list of names")
            names = tuple(check_identifier(name, f"task {self.name!r}: field") for name in self.fields)
            object.__setattr__(self, "fields", names)

    def reads(self, field: str) -> bool:
        return self.fields is None or field in self.fields

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "fields": None if self.fields is None else list(self.fields)}


@functools.lru_cache(maxsize=1024)
def _arrow_schema(field: Field, group: int) -> pa.Schema:
    """Kept, since every chunk on its way is compared with it."""
    metadata = {"arrow_tq.dtype": field.dtype}
    if field.layer_axis is not None:
        metadata["arrow_tq.layer_axis"] = str(field.layer_axis)
        metadata["arrow_tq.layer_ids"] = json.dumps(list(field.groups[group]))
    return pa.schema([pa.field(field.name, field.arrow_type(group), nullable=True, metadata=metadata)])
