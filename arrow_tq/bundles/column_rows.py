"""Rows of one field as they were read: where each begins, which are None, which are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.bundles.pieces import Piece
from arrow_tq.bundles.plans import Bytes, Sizes
from arrow_tq.bundles.selection import Selection
from arrow_tq.bundles.structure import FieldLayout
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage


class RowReader:
    """What all layouts need of a field's buffers.

    Attributes:
        field: the field.
        pieces: what was read of it, by buffer.
    """

    def __init__(
        self,
        field: FieldLayout,
        pieces: Mapping[str, Sequence[Piece]],
        selection: Selection,
        name: str,
        out: npt.NDArray[np.generic] | None,
    ) -> None:
        self.field = field
        self._meta = field.meta
        self.pieces = pieces
        self._name = name
        self._row_type = selection.row_type
        self._indices = selection.indices if field.per_row else None
        self._out = out
        self._known_elements: Sizes | None = None
        self._wanted_rows: set[int] | None = None

    def _cut(self, item: int) -> list[tuple[Piece, list[int], list[int]]]:
        cut = []
        for piece in self.pieces["values"]:
            ends = self.ends(piece, item)
            cut.append((piece, ends[:-1], ends[1:]))
        return cut

    def ends(self, piece: Piece, item: int) -> list[int]:
        """Borders of a piece's rows, in elements, from 0."""
        borders = np.zeros(piece.rows + 1, np.int64)
        np.cumsum(self._elements()[piece.first : piece.first + piece.rows], out=borders[1:])
        if int(borders[-1]) * item != len(piece.memory):
            raise MalformedMessage(
                f"bundle field {self._name!r}: {len(piece.memory)} bytes, rows of other sizes"
            )
        return borders.tolist()

    def _elements(self) -> Sizes:
        """Elements of every row of the field."""
        if self._known_elements is None:
            self._known_elements = self._count_elements()
        return self._known_elements

    def _count_elements(self) -> Sizes:
        if "shapes" in self.pieces or "shape" in self._meta:
            shapes = self._shapes()
            elements: Sizes = shapes.prod(axis=1, dtype=np.int64)
            valid = self.valid()
            return elements if valid is None else elements * valid
        return self._lengths()

    def _shapes(self) -> Sizes:
        ndim = int(self._meta["ndim"])  # type: ignore[call-overload]
        shape = self._meta.get("shape")
        if isinstance(shape, list):
            fixed: Sizes = np.tile(np.array(shape, np.int64).reshape(1, ndim), (self.field.count, 1))
            return fixed
        shapes: Sizes = self._side("shapes").reshape(self.field.count, ndim)
        return shapes

    def _decoded(self, decode: Callable[[bytes], object]) -> list[object]:
        """Wanted rows of bytes as what they stand for; of others, a block may hold the text alone."""
        rows: list[object] = [None] * self.field.count
        for piece, starts, ends in self._cut(1):
            raw = piece.memory.tobytes()
            for row in self._wanted(piece):
                rows[row] = decode(raw[starts[row - piece.first] : ends[row - piece.first]])
        return rows

    def _wanted(self, piece: Piece) -> Sequence[int]:
        """Rows of a piece that are part of the answer."""
        rows = range(piece.first, piece.first + piece.rows)
        if self._indices is None:
            return rows
        if self._wanted_rows is None:
            self._wanted_rows = set(self._indices.tolist())
        return [row for row in rows if row in self._wanted_rows]

    def _lengths(self, name: str = "lengths") -> Sizes:
        fixed = self._meta.get(name)
        if isinstance(fixed, int):
            return np.full(self.field.count, fixed, np.int64)
        return self._side(name)

    def _side(self, name: str) -> Sizes:
        return glued([piece.memory for piece in self.pieces.get(name, ())]).view(np.int64)

    def valid(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are not None; None where all are."""
        if "valid" not in self.pieces:
            return None
        return glued([piece.memory for piece in self.pieces["valid"]]).view(np.bool_)

    def _with_nones(self, rows: list[object]) -> list[object]:
        valid = self.valid()
        if valid is not None:
            for index in np.flatnonzero(~valid).tolist():
                rows[index] = None
        return rows

    def _chosen(self, rows: list[object]) -> list[object]:
        if self._indices is None:
            return rows
        return [rows[index] for index in self._indices.tolist()]

    def _into_out(self, flat: npt.NDArray[np.generic], first: int) -> npt.NDArray[np.generic]:
        out = self._out
        assert out is not None
        if out.dtype != flat.dtype or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidInput(
                f"out: field {self._name!r} needs a flat writable array of {flat.dtype}, got {out.dtype} of "
                f"shape {out.shape}"
            )
        if first + len(flat) > len(out):
            raise InvalidInput(f"out: field {self._name!r} has more than the {len(out)} values that fit")
        target = out[first : first + len(flat)]
        target[:] = flat
        return target


def glued(parts: Sequence[Bytes]) -> Bytes:
    """Parts one after another, read-only: the only one as it is, several copied together."""
    if len(parts) == 1:
        return parts[0]
    memory = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    memory.flags.writeable = False
    return memory
