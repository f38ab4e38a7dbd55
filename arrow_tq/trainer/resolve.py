"""Handles to payload: grouped by chunk, read once, laid out as the handles are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.alignment import Positions, check_handles
from arrow_tq.trainer.fetch import Array, buffer, chosen_layers, fetch, read_parts, token_field
from arrow_tq.trainer.gather import Placement
from arrow_tq.trainer.scatter import convert
from arrow_tq_schemas.errors import Hole, InvalidInput, Misaligned
from arrow_tq_schemas.fields import TOKEN_FIELD, Field
from arrow_tq_schemas.handles import Grouped, Kind, group

if TYPE_CHECKING:
    from arrow_tq.runs import Run

Handles = npt.NDArray[np.integer]


def resolve(
    run: Run,
    handles: object,
    name: str,
    layers: Sequence[int] | None,
    expect_tokens: object,
    out: object,
    valid: object,
) -> Array:
    """The payload that handles stand for; see ``Run.resolve``."""
    field = run.field(name)
    grouped = group(as_handles(handles))
    check_kinds(field, grouped, valid)
    if expect_tokens is not None:
        _check_tokens(run, field, grouped, expect_tokens)
    chosen = chosen_layers(field, layers)
    packed = buffer(field, chosen, len(grouped.kinds), out)
    other = grouped.kinds != Kind.ROW
    if other.any():
        packed[other] = convert(field, np.array([field.fill_value]), packed.dtype)[0]
    placement = Placement(grouped.spans, grouped.places)
    reads = read_parts(run.backend, run.name, field, chosen, placement, packed, run.reading.wait_s)
    run.reading.run(reads, packed.nbytes)
    return packed


def _check_tokens(run: Run, field: Field, grouped: Grouped, expected: object) -> None:
    """Compare with the tokens that the segments of this process's batches have at the handles' positions."""
    manifests = [manifest for batch in run.batches.alive() for manifest in batch.manifests()]
    owners, positions = Positions(field.name, manifests).locate(grouped.spans)
    used, owners = np.unique(owners, return_inverse=True)
    shown = [manifests[index] for index in used.tolist()]
    tokens = fetch(run.backend, run.name, shown, [token_field(run.fields)], reading=run.reading)
    stored = tokens[TOKEN_FIELD].packed[tokens.offsets[owners] + positions]
    names = [manifest.segment_id for manifest in shown]
    check_handles(grouped, owners, positions, stored, expected, names)


def as_handles(value: object) -> Handles:
    """``[rows, 6]`` integers from numpy or from a torch tensor on any device.

    Raises:
        InvalidInput: neither.
    """
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise InvalidInput(f"handles: expected an array or tensor, got {type(value).__name__}")
    return value


def check_kinds(field: Field, grouped: Grouped, valid: object) -> None:
    """Refuse holes, and all-zero rows where a row is declared to be there.

    Args:
        field: for messages.
        grouped: the handles.
        valid: which rows are there: None for all, their number (the rest is padding), or ``[rows]`` bool.

    Raises:
        Hole: a handle stands for a position that nobody wrote; names the rows.
        Misaligned: an all-zero row inside; names it.
        InvalidInput: ``valid`` does not fit.
    """
    rows = len(grouped.kinds)
    holes = np.flatnonzero(grouped.kinds == Kind.HOLE)
    if len(holes):
        raise Hole(
            f"field {field.name!r}: {len(holes)} handles stand for positions that nobody wrote, the first "
            f"at row {holes[0]}",
            field=field.name,
            rows=holes[:8].tolist(),
            count=len(holes),
        )
    inside = grouped.kinds == 0
    if valid is not None:
        inside &= _mask(valid, rows)
    if inside.any():
        row = int(np.flatnonzero(inside)[0])
        raise Misaligned(
            f"field {field.name!r}: {int(inside.sum())} handles inside the declared rows are all zero, the "
            f"first at row {row}: layout machinery lost them, or padding was not declared (valid=)",
            field=field.name,
            row=row,
        )


def _mask(valid: object, rows: int) -> npt.NDArray[np.bool_]:
    if hasattr(valid, "detach") and hasattr(valid, "cpu"):
        valid = valid.detach().cpu().numpy()
    if isinstance(valid, int | np.integer) and not isinstance(valid, bool):
        if not 0 <= valid <= rows:
            raise InvalidInput(f"valid {valid}: there are {rows} handles")
        return np.arange(rows) < valid
    mask = np.asarray(valid)
    if mask.shape != (rows,) or mask.dtype.kind not in "bui":
        raise InvalidInput(f"valid: expected a number or [{rows}] bool, got {mask.dtype}{list(mask.shape)}")
    return mask.astype(np.bool_)
