"""Whether handles stand for the tokens that their holder thinks they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arrow_tq.trainer.fetch import Array
from arrow_tq.trainer.gather import chunk_numbers
from arrow_tq_schemas.errors import InvalidInput, Misaligned
from arrow_tq_schemas.handles import Grouped
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.spans import SPAN_DTYPE, Spans, empty_spans

_LINE_BITS = 33


class Positions:
    """Finds the segment and position that a chunk's row is seen at, from segments' manifests.

    A row that several segments share stands for the same token in each of them: they share its path.
    """

    def __init__(self, field: str, manifests: Sequence[Manifest]) -> None:
        spans = [manifest.spans.get(field, empty_spans()) for manifest in manifests]
        joined = np.concatenate([empty_spans(), *spans]).astype(SPAN_DTYPE, copy=False)
        owners = np.repeat(np.arange(len(manifests)), [len(part) for part in spans])
        order = np.lexsort([joined[name] for name in ("row", "low", "high")])
        self._spans: Spans = joined[order]
        self._owners = owners[order]
        self._manifests = manifests

    def locate(self, runs: Spans) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Index of the manifest, and position in it, of every row of ``runs``.

        Raises:
            InvalidInput: a row that no manifest shows; names its chunk.
        """
        if not len(runs):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        both = np.concatenate([self._spans, runs])
        order = np.lexsort([both["low"], both["high"]])
        numbers = np.empty(len(both), np.int64)
        numbers[order] = chunk_numbers(both[order])
        line = numbers << _LINE_BITS | both["row"].astype(np.int64)
        starts, wanted = line[: len(self._spans)], line[len(self._spans) :]
        ends = starts + self._spans["rows"].astype(np.int64)
        # What two segments share counts for the first of them, so that the intervals do not overlap.
        reach = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(ends)[:-1]])
        cut = np.maximum(starts, reach)
        kept = np.flatnonzero(cut < ends)
        counts = runs["rows"].astype(np.int64)
        rows = np.repeat(wanted - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        index = np.searchsorted(cut[kept], rows, side="right") - 1
        known = index >= 0
        known[known] = rows[known] < ends[kept[index[known]]]
        if not known.all():
            at = int(np.searchsorted(np.cumsum(counts), int(np.flatnonzero(~known)[0]), side="right"))
            chunk = ChunkId(int(runs["high"][at]) << 64 | int(runs["low"][at]))
            raise InvalidInput(
                f"expect_tokens: chunk {chunk.hex} is in no segment of a batch that this process claimed or "
                "attached, so its tokens are not known here: attach the batch's ref first",
                chunk_id=chunk.hex,
            )
        span = kept[index]
        positions = self._spans["start"][span] + rows - starts[span]
        return self._owners[span], positions


def check_handles(
    grouped: Grouped,
    owners: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    stored: Array,
    expected: object,
    segment_ids: Sequence[str],
) -> None:
    """Compare the tokens that handles stand for with those that the caller has.

    Args:
        grouped: the handles; only rows of chunks are compared.
        owners: index into ``segment_ids`` of every row of its runs.
        positions: position of every row of its runs.
        stored: token id of every row of its runs.
        expected: ``[rows]`` token ids, one a handle.
        segment_ids: for messages.

    Raises:
        Misaligned: naming row, segment, position and both ids.
    """
    if hasattr(expected, "detach") and hasattr(expected, "cpu"):
        expected = expected.detach().cpu().numpy()
    wanted = np.asarray(expected)
    if wanted.shape != grouped.kinds.shape:
        raise Misaligned(
            f"expect_tokens has shape {list(wanted.shape)}, there are {len(grouped.kinds)} handles"
        )
    counts = grouped.spans["rows"].astype(np.int64)
    places = np.repeat(grouped.places - (np.cumsum(counts) - counts), counts) + np.arange(len(stored))
    different = np.flatnonzero(wanted[places] != stored)
    if len(different):
        at = int(different[0])
        name = segment_ids[int(owners[at])]
        raise Misaligned(
            f"handle at row {places[at]}: it stands for position {positions[at]} of segment {name!r}, token "
            f"{stored[at]}; expected {wanted[places[at]]}",
            segment_id=name,
            position=int(positions[at]),
            row=int(places[at]),
        )
