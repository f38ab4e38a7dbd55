"""One field of an answer: its layout back into what was put."""

from __future__ import annotations

import numpy as np

from arrow_tq.bundles import tensors_io
from arrow_tq.bundles.collecting import no_collection
from arrow_tq.bundles.column_rows import RowReader, glued
from arrow_tq.bundles.dtypes import json_dtype
from arrow_tq.bundles.infer import ATTACHMENT_ALIGN
from arrow_tq.bundles.objects import Decoder
from arrow_tq.bundles.packed import unpack_value
from arrow_tq.bundles.plans import Bytes, Sizes
from arrow_tq_schemas.errors import ArrowTQError, InvalidInput, MalformedMessage


class Column(RowReader):
    """One field of an answer."""

    def value(self) -> object:
        """The field's value.

        Raises:
            MalformedMessage: buffers that do not fit the layout.
            InvalidInput: ``out`` given for a field without numbers, or it is too small or of another dtype.
        """
        try:
            return self._value()
        except ArrowTQError:
            raise
        except (
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            RuntimeError,
            ArithmeticError,
            MemoryError,
        ) as error:
            raise MalformedMessage(f"bundle field {self._name!r}: {type(error).__name__}: {error}") from None

    def _value(self) -> object:
        layout = self.field.layout
        if self._out is not None and layout not in ("arrays", "lists", "array"):
            raise InvalidInput(f"out: field {self._name!r} holds no arrays ({layout})")
        match layout:
            case "arrays":
                return self._arrays()
            case "lists":
                return self._lists()
            case "array":
                return self._array()
            case "scalars":
                return self._scalars()
            case "strings":
                return self._chosen(self._with_nones(self._strings()))
        rows = self._objects() if layout == "objects" else self._msgpack()
        return self._chosen(rows) if self._meta.get("list") else rows[0]

    # -- ragged numbers ------------------------------------------------------------------------

    def _arrays(self) -> object:
        torch = self._meta["of"] == "torch"
        wanted = self._row_type or ("torch" if torch else "numpy")
        if torch:
            kind = str(self._meta["dtype"])
            item = tensors_io.item_bytes(kind)
            if wanted == "torch":
                return self._shaped(self._flat_tensors(kind, item))
            dtype = _plain_dtype(kind, item)
        else:
            dtype = json_dtype(self._meta["dtype"])
            if wanted == "torch" and tensors_io.can_hold(dtype):
                return self._shaped(self._flat_tensors(dtype.name, dtype.itemsize))
        return self._shaped(self._flat_rows(dtype))

    def _lists(self) -> object:
        dtype = np.dtype(str(self._meta["dtype"]))
        if self._row_type == "torch":
            return self._chosen(self._with_nones(self._flat_tensors(dtype.name, dtype.itemsize)))
        if self._row_type == "numpy" or self._out is not None:
            return self._chosen(self._with_nones(self._flat_rows(dtype)))
        with no_collection():
            return self._chosen(self._with_nones(self._number_lists(dtype)))

    def _number_lists(self, dtype: np.dtype[np.generic]) -> list[object]:
        rows: list[object] = [None] * self.field.count
        for piece, starts, ends in self._cut(dtype.itemsize):
            flat = piece.memory.view(dtype)
            if self._indices is None:
                rows[piece.first : piece.first + piece.rows] = [
                    flat[start:end].tolist() for start, end in zip(starts, ends, strict=True)
                ]
            else:
                for row in self._wanted(piece):
                    rows[row] = flat[starts[row - piece.first] : ends[row - piece.first]].tolist()
        return rows

    def _flat_rows(self, dtype: np.dtype[np.generic]) -> list[object]:
        rows: list[object] = [None] * self.field.count
        length = self._meta.get("lengths")
        taken = 0
        for piece in self.pieces["values"]:
            flat = piece.memory.view(dtype)
            if self._out is not None:
                flat, taken = self._into_out(flat, taken), taken + len(flat)
            if length is not None and length and isinstance(length, int):
                found: list[object] = list(flat.reshape(piece.rows, length))
            else:
                ends = self.ends(piece, dtype.itemsize)
                found = _cut(flat, ends)
            rows[piece.first : piece.first + piece.rows] = found
        return rows

    def _flat_tensors(self, dtype: str, item: int) -> list[object]:
        rows: list[object] = [None] * self.field.count
        for piece, starts, ends in self._cut(item):
            found = tensors_io.rows(piece.memory, dtype, starts, ends)
            rows[piece.first : piece.first + piece.rows] = found
        return rows

    def _shaped(self, rows: list[object]) -> object:
        # None first: it has no shape.
        rows = self._with_nones(rows)
        ndim = int(self._meta["ndim"])  # type: ignore[call-overload]
        if ndim != 1:
            shapes = self._shapes().tolist()
            rows = [
                row if row is None else row.reshape(shape)  # type: ignore[attr-defined]
                for row, shape in zip(rows, shapes, strict=True)
            ]
        return self._chosen(rows)

    # -- other layouts -------------------------------------------------------------------------

    def _array(self) -> object:
        shape = [int(one) for one in self._meta["shape"]]  # type: ignore[attr-defined]
        parts = [piece.memory for piece in self.pieces.get("values", ())]
        memory = parts[0] if len(parts) == 1 else glued(parts)
        indices = self._indices
        if indices is not None:
            memory, shape = self._array_rows(memory, shape, indices)
        torch = self._meta["of"] == "torch"
        wanted = self._row_type or ("torch" if torch else "numpy")
        if torch:
            name = str(self._meta["dtype"])
            dtype = _plain_dtype(name, tensors_io.item_bytes(name))
        else:
            dtype = json_dtype(self._meta["dtype"])
            name = dtype.name
        if wanted == "torch" and (torch or tensors_io.can_hold(dtype)):
            return tensors_io.tensor(memory.copy(), name, shape)
        flat = memory.view(dtype)
        return (flat if self._out is None else self._into_out(flat, 0)).reshape(shape)

    def _array_rows(self, memory: Bytes, shape: list[int], indices: Sizes) -> tuple[Bytes, list[int]]:
        """The chosen rows of an array of which only some blocks were read."""
        width = int(np.prod(shape[1:], dtype=np.int64)) * self._item_bytes()
        places = np.full(shape[0] + 1, -1, np.int64)
        held = 0
        for piece in self.pieces.get("values", ()):
            places[piece.first : piece.first + piece.rows] = np.arange(held, held + piece.rows)
            held += piece.rows
        rows = memory.reshape(held, width)[places[indices]]
        return rows.reshape(-1), [len(indices), *shape[1:]]

    def _item_bytes(self) -> int:
        if self._meta["of"] == "torch":
            return tensors_io.item_bytes(str(self._meta["dtype"]))
        return json_dtype(self._meta["dtype"]).itemsize

    def _scalars(self) -> object:
        numpy = self._meta["element"] == "numpy"
        dtype = json_dtype(self._meta["dtype"])
        values = glued([piece.memory for piece in self.pieces["values"]]).view(dtype)
        places = [np.arange(piece.first, piece.first + piece.rows) for piece in self.pieces["values"]]
        held = np.concatenate(places) if places else np.empty(0, np.int64)
        if self._row_type is not None and "valid" not in self.pieces:
            whole = values if self._indices is None else values[np.searchsorted(held, self._indices)]
            if self._row_type == "numpy" or not tensors_io.can_hold(dtype):
                return whole
            return tensors_io.tensor(whole.view(np.uint8).copy(), dtype.name, [len(whole)])
        found: list[object] = list(values) if numpy else values.tolist()
        if len(found) == self.field.count:
            return self._chosen(self._with_nones(found))
        rows: list[object] = [None] * self.field.count
        for place, one in zip(held.tolist(), found, strict=True):
            rows[int(place)] = one
        return self._chosen(self._with_nones(rows))

    def _strings(self) -> list[object]:
        if self._meta["element"] != "str":
            return self._decoded(lambda raw: raw)
        return self._decoded(lambda raw: raw.decode("utf-8", "surrogatepass"))

    def _objects(self) -> list[object]:
        return self._decoded(Decoder(self._attachments()).value)

    def _attachments(self) -> dict[int, Bytes]:
        """What was read of them, by number."""
        if "attached" not in self.pieces:
            return {}
        sizes = self._side("sizes")
        padded = -(-sizes // ATTACHMENT_ALIGN) * ATTACHMENT_ALIGN
        counts = self._lengths("counts")
        firsts = np.concatenate([[0], np.cumsum(counts)])
        found: dict[int, Bytes] = {}
        for piece in self.pieces["attached"]:
            place = 0
            for number in range(int(firsts[piece.first]), int(firsts[piece.first + piece.rows])):
                found[number] = piece.memory[place : place + int(sizes[number])]
                place += int(padded[number])
        return found

    def _msgpack(self) -> list[object]:
        return self._decoded(unpack_value)


def _cut(flat: np.ndarray, ends: list[int]) -> list[object]:
    """Views between these borders: of the ways to make many, the one that takes least for each."""
    rows: list[object] = []
    add = rows.append
    first = ends[0]
    for end in ends[1:]:
        add(flat[first:end])
        first = end
    return rows


def _plain_dtype(name: str, item: int) -> np.dtype[np.generic]:
    """Numpy's dtype for a torch dtype; the bits, unsigned, where numpy has none."""
    try:
        return np.dtype("bool" if name == "bool" else name)
    except TypeError:
        return np.dtype(f"u{item}")
