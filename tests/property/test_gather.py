"""Reading rows for places: each once, all where they belong, whatever the block borders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings, strategies as st

from arrow_tq import Field
from arrow_tq.backend import Read, Rows
from arrow_tq.trainer.gather import Gather, Placement
from arrow_tq.trainer.scatter import group_parts, scatter
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import Span, from_spans, to_spans

CHUNK_ROWS = 12
LAYERS = (3, 1, 7, 8)
FIELD = Field("f", "uint8", shape=(2, 4), layer_axis=1, layer_ids=LAYERS, layer_groups=[(3, 1), (7, 8)])
CHUNKS = [ChunkId.make(1, 0, 0, number) for number in range(3)]
STORED = {
    (chunk, group): np.random.default_rng([index, group]).integers(0, 99, (CHUNK_ROWS, 2, 2), np.uint8)
    for index, chunk in enumerate(CHUNKS)
    for group in range(2)
}
spans = st.builds(
    lambda chunk, row, rows: Span(row, chunk, row, min(rows, CHUNK_ROWS - row)),
    st.sampled_from(CHUNKS),
    st.integers(0, CHUNK_ROWS - 1),
    st.integers(1, CHUNK_ROWS),
)


class Blocks:
    """A backend that answers in blocks of any size, and says what it was asked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[ChunkId, int]] = []

    def read(self, request: Read) -> Iterator[Rows]:
        parts = [np.empty((0, 2, 2), np.uint8)]
        for span in from_spans(request.spans):
            self.asked += [(span.chunk_id, row) for row in range(span.row, span.row + span.rows)]
            parts.append(STORED[span.chunk_id, request.group][span.row : span.row + span.rows])
        values = np.concatenate(parts)
        if request.layers is not None:
            values = values[:, :, list(request.layers)]
        for first in range(0, len(values), self.size):
            yield Rows(values[first : first + self.size], None)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(spans, min_size=1, max_size=8),
    st.integers(1, 40),
    st.permutations(LAYERS).flatmap(lambda ids: st.integers(1, 4).map(lambda count: ids[:count])),
    st.sampled_from([np.uint8, np.int32]),
    st.integers(1, 5),
)
def test_rows_are_read_once_and_placed(
    wanted: list[Span], size: int, layers: list[int], dtype: type, at_once: int
) -> None:
    packed = to_spans(wanted)
    counts = packed["rows"].astype(np.int64)
    places = np.cumsum(counts) - counts
    gather = Gather.of(Placement(packed, places))
    out = np.full((int(counts.sum()), 2, len(layers)), 111, dtype)
    for part in group_parts(FIELD, layers):
        backend = Blocks(size)
        for piece in gather.parts(at_once):
            scatter(backend, "run", FIELD, part, piece, out)  # type: ignore[arg-type]
        assert len(set(backend.asked)) == len(backend.asked)
    whole = {
        chunk: np.concatenate([STORED[chunk, 0], STORED[chunk, 1]], axis=2)[
            :, :, [LAYERS.index(layer) for layer in layers]
        ]
        for chunk in CHUNKS
    }
    expected = [whole[span.chunk_id][span.row : span.row + span.rows] for span in wanted]
    np.testing.assert_array_equal(out, np.concatenate(expected))
    for row in range(gather.rows):
        chunk, at = backend.asked[row]
        assert gather.position(row) == at, chunk
