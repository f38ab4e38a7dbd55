"""Composing segments: each rule on a small example."""

from __future__ import annotations

import itertools
import random
import time
from collections import namedtuple
from dataclasses import replace

import pytest

from arrow_tq.store.compose import ComposedSegment, TreeStep, compose
from arrow_tq_schemas import ChunkId, Field, Receipt, StoredChunk
from arrow_tq_schemas.errors import InvalidInput, NotFound
from arrow_tq_schemas.ids import IdFactory
from arrow_tq_schemas.manifests import Manifest
from arrow_tq_schemas.presets import indexer_topk, logprobs, routed_experts, token_ids
from arrow_tq_schemas.spans import from_spans

FOLLOWS = -2
TOKENS, LOGPROBS, EXPERTS = token_ids(), logprobs(), routed_experts(layers=2, topk=2)


def put(
    field: Field, number: int, start: int, rows: int, valid: list[tuple[int, int]] | None = None
) -> Receipt:
    """Rows ``[start, start + rows)`` in one chunk, whose id is ``number``."""
    chunks = []
    if rows:
        chunks = [StoredChunk(id=chunk_id(number).hex, start=start, rows=rows, bytes=rows, valid=valid)]
    return Receipt(run="r", epoch=0, field=field.name, start=start, rows=rows, chunks=chunks)


def chunk_id(number: int) -> ChunkId:
    return ChunkId.make(1, 0, 0, number)


def step(
    *receipts: Receipt,
    sampled: tuple[int, int] | None = None,
    rewrite_at: int | None = None,
    version: str | None = None,
    parent: int | None = None,
    cut: str | None = None,
) -> TreeStep:
    """Follows the step given before it, unless ``parent`` is given."""
    cut = cut or (None if rewrite_at is None else "rewrite")
    return TreeStep(
        "call", FOLLOWS if parent is None else parent, sampled, version, rewrite_at, cut, receipts
    )


def segments(
    *steps: TreeStep, fields: tuple[Field, ...] = (TOKENS, LOGPROBS, EXPERTS), view: str = "lineage"
) -> list[ComposedSegment]:
    placed = [
        replace(one, parent=index - 1) if one.parent == FOLLOWS else one for index, one in enumerate(steps)
    ]
    return compose(placed, fields, lambda index: f"s~{index}", view)


def shown(segment: ComposedSegment, field: Field) -> list[tuple[int, int, int, int]]:
    """(start, chunk number, first row, rows) of each span."""
    return [
        (span.start, span.chunk_id.value & 0xFFFF, span.row, span.rows)
        for span in from_spans(segment.manifest.spans[field.name])
    ]


def owned(segment: ComposedSegment) -> list[int]:
    return [low & 0xFFFF for _, low in segment.manifest.owned.tolist()]


def test_no_step_gives_no_segment() -> None:
    assert segments() == []


def test_a_step_without_rows_gives_an_empty_complete_segment() -> None:
    (segment,) = segments(step(put(TOKENS, 0, 7, 0), sampled=(0, 4)))
    assert segment.manifest.num_tokens == 0
    assert segment.complete_fields == ("token_ids", "logprobs", "routed_experts")
    assert (segment.manifest.sampled.tolist(), segment.loss_tokens) == ([], 0)


def test_last_covers_and_first_stays() -> None:
    (segment,) = segments(
        step(put(TOKENS, 1, 0, 6), put(EXPERTS, 2, 0, 5)),
        step(put(TOKENS, 3, 4, 6), put(EXPERTS, 4, 0, 9)),
    )
    assert shown(segment, TOKENS) == [(0, 1, 0, 4), (4, 3, 0, 6)]
    assert shown(segment, EXPERTS) == [(0, 2, 0, 5), (5, 4, 5, 4)]
    assert segment.complete_fields == ("token_ids", "logprobs", "routed_experts")


def test_a_covered_chunk_is_still_owned() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 4)), step(put(TOKENS, 2, 0, 4)))
    assert shown(segment, TOKENS) == [(0, 2, 0, 4)]
    assert owned(segment) == [1, 2]


def test_a_chunk_of_nulls_alone_is_owned_and_counts_for_the_length() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 4, valid=[])))
    assert (shown(segment, TOKENS), owned(segment)) == ([], [1])
    assert segment.manifest.num_tokens == 4
    assert "token_ids" not in segment.complete_fields


def test_a_cover_in_the_middle_leaves_both_ends() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 9)), step(put(TOKENS, 2, 3, 2)))
    assert shown(segment, TOKENS) == [(0, 1, 0, 3), (3, 2, 0, 2), (5, 1, 5, 4)]


def test_null_rows_let_an_earlier_step_through() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 4)), step(put(TOKENS, 2, 0, 4, valid=[(0, 1), (3, 4)])))
    assert shown(segment, TOKENS) == [(0, 2, 0, 1), (1, 1, 1, 2), (3, 2, 3, 1)]


def test_the_last_token_has_no_routing() -> None:
    (exact,) = segments(step(put(TOKENS, 1, 0, 5), put(EXPERTS, 2, 0, 4)))
    (over,) = segments(step(put(TOKENS, 1, 0, 5), put(EXPERTS, 2, 0, 5)))
    (short,) = segments(step(put(TOKENS, 1, 0, 5), put(EXPERTS, 2, 0, 3)))
    assert shown(exact, EXPERTS) == shown(over, EXPERTS) == [(0, 2, 0, 4)]
    assert "routed_experts" in exact.complete_fields
    assert "routed_experts" not in short.complete_fields


def test_sampled_rows_outside_their_ranges_are_left_out() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 8), put(LOGPROBS, 2, 0, 8), sampled=(5, 8)))
    assert shown(segment, LOGPROBS) == [(5, 2, 5, 3)]
    assert "logprobs" in segment.complete_fields


def test_sampled_ranges_merge_and_end_with_the_tokens() -> None:
    (segment,) = segments(
        step(put(TOKENS, 1, 0, 5), sampled=(3, 5)),
        step(put(TOKENS, 2, 5, 3), sampled=(5, 20)),
        step(put(TOKENS, 3, 0, 2), sampled=(0, 1)),
    )
    assert segment.manifest.sampled.tolist() == segment.manifest.loss.tolist() == [[0, 1], [3, 8]]
    assert segment.loss_tokens == 6
    assert segment.complete_fields == ("token_ids",)


def test_a_rewrite_ends_the_segment_and_keeps_what_lies_before() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 10), put(EXPERTS, 2, 0, 9), sampled=(4, 10), version="1"),
        step(put(TOKENS, 3, 6, 6), put(EXPERTS, 4, 4, 7), sampled=(8, 12), rewrite_at=6, version="2"),
    )
    assert (first.finish_reason, second.finish_reason) == ("rewrite", "end")
    assert (first.manifest.segment_id, second.manifest.segment_id) == ("s~0", "s~1")
    assert (first.manifest.num_tokens, second.manifest.num_tokens) == (10, 12)
    assert shown(second, TOKENS) == [(0, 1, 0, 6), (6, 3, 0, 6)]
    # "first" keeps positions 4 and 5, and has nothing left from 6 on.
    assert shown(second, EXPERTS) == [(0, 2, 0, 6), (6, 4, 2, 5)]
    assert first.manifest.loss.tolist() == [[4, 10]]
    assert second.manifest.sampled.tolist() == [[4, 6], [8, 12]]
    assert second.manifest.loss.tolist() == [[8, 12]]
    assert (first.versions, second.versions) == (("1",), ("2",))
    assert (owned(first), owned(second)) == ([1, 2], [1, 2, 3, 4])


def test_context_sampled_again_with_equal_tokens_carries_loss_once() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 10), sampled=(2, 10)),
        step(put(TOKENS, 2, 0, 12), sampled=(4, 12), rewrite_at=8),
    )
    assert first.manifest.loss.tolist() == [[2, 10]]
    assert second.manifest.loss.tolist() == [[8, 12]]


def test_a_rewrite_from_the_start_leaves_no_context() -> None:
    first, second = segments(step(put(TOKENS, 1, 0, 4)), step(put(TOKENS, 2, 0, 3), rewrite_at=0))
    assert (shown(first, TOKENS), shown(second, TOKENS)) == ([(0, 1, 0, 4)], [(0, 2, 0, 3)])
    assert (owned(first), owned(second)) == ([1], [2])
    assert second.manifest.num_tokens == 3


def test_a_shorter_end_is_no_rewrite() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 8)), step(put(TOKENS, 2, 0, 3)))
    assert shown(segment, TOKENS) == [(0, 2, 0, 3), (3, 1, 3, 5)]
    assert segment.manifest.num_tokens == 8


def test_the_root_has_nothing_to_rewrite() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 4), rewrite_at=2))
    assert shown(segment, TOKENS) == [(0, 1, 0, 4)]


def test_consecutive_rows_of_one_chunk_are_one_span() -> None:
    (segment,) = segments(step(put(TOKENS, 1, 0, 6)), step(put(TOKENS, 2, 2, 2)), step(put(TOKENS, 1, 0, 6)))
    assert shown(segment, TOKENS) == [(0, 1, 0, 6)]
    assert owned(segment) == [1, 2]


def test_receipts_of_one_step_lie_in_their_order() -> None:
    (segment,) = segments(
        step(put(TOKENS, 1, 0, 4), put(TOKENS, 2, 2, 4), put(EXPERTS, 3, 0, 4), put(EXPERTS, 4, 2, 3))
    )
    assert shown(segment, TOKENS) == [(0, 1, 0, 2), (2, 2, 0, 4)]
    assert shown(segment, EXPERTS) == [(0, 3, 0, 4), (4, 4, 2, 1)]


def test_an_undeclared_field_is_named() -> None:
    with pytest.raises(NotFound, match=r"step 'call': field 'logprobs' is not among token_ids"):
        segments(step(put(LOGPROBS, 1, 0, 4)), fields=(TOKENS,))


def test_more_spans_than_a_manifest_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_tq.store.compose.SPANS_MAX", 2)
    with pytest.raises(InvalidInput, match=r"segment 's~0': 3 spans, at most 2"):
        segments(step(put(TOKENS, 1, 0, 4), put(TOKENS, 2, 4, 4), put(TOKENS, 3, 8, 4)))


def reasons(composed: list[ComposedSegment]) -> list[str]:
    return [segment.finish_reason for segment in composed]


def test_each_leaf_is_a_segment_and_the_shared_prefix_is_trained_once() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 6), sampled=(2, 6), version="1"),
        step(put(TOKENS, 2, 6, 4), sampled=(8, 10), version="2"),
        step(put(TOKENS, 3, 6, 3), sampled=(6, 9), version="3", parent=0),
    )
    assert reasons([first, second]) == ["end", "end"]
    assert shown(first, TOKENS) == [(0, 1, 0, 6), (6, 2, 0, 4)]
    assert shown(second, TOKENS) == [(0, 1, 0, 6), (6, 3, 0, 3)]
    assert (first.manifest.loss.tolist(), second.manifest.loss.tolist()) == ([[2, 6], [8, 10]], [[6, 9]])
    assert second.manifest.sampled.tolist() == [[2, 9]]
    assert (first.versions, second.versions) == (("1", "2"), ("3",))
    assert second.manifest.versions == ((2, 6, "1"), (6, 9, "3"))


def test_segments_come_in_the_order_of_their_last_steps() -> None:
    early, late = segments(
        step(put(TOKENS, 1, 0, 4), sampled=(0, 4)),
        step(put(TOKENS, 2, 4, 4), parent=0),
        step(put(TOKENS, 3, 4, 2), parent=0),
        step(put(TOKENS, 4, 8, 4), parent=1),
    )
    assert [shown(one, TOKENS)[-1][1] for one in (early, late)] == [3, 4]
    assert (early.loss_tokens, late.loss_tokens) == (4, 0)


def test_a_step_that_something_goes_on_from_ends_no_segment() -> None:
    # The second step is rewritten by the third, but the fourth goes on from it.
    rewritten, gone_on = segments(
        step(put(TOKENS, 1, 0, 4), sampled=(0, 4)),
        step(put(TOKENS, 2, 4, 4), sampled=(4, 8)),
        step(put(TOKENS, 3, 2, 4), sampled=(2, 6), rewrite_at=2),
        step(put(TOKENS, 4, 8, 4), sampled=(8, 12), parent=1),
    )
    assert reasons([rewritten, gone_on]) == ["end", "end"]
    assert shown(rewritten, TOKENS) == [(0, 1, 0, 2), (2, 3, 0, 4)]
    assert rewritten.manifest.loss.tolist() == [[2, 6]]
    assert gone_on.manifest.loss.tolist() == [[0, 12]]


def test_a_covered_chunk_of_the_prefix_is_owned_where_the_prefix_is_trained() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 4)),
        step(put(TOKENS, 2, 0, 4)),
        step(put(TOKENS, 3, 4, 1)),
        step(put(TOKENS, 4, 4, 1), parent=1),
    )
    assert (owned(first), owned(second)) == ([1, 2, 3], [2, 4])


def test_two_roots_share_nothing() -> None:
    first, second = segments(step(put(TOKENS, 1, 0, 4)), step(put(TOKENS, 2, 0, 2), parent=-1))
    assert (shown(first, TOKENS), shown(second, TOKENS)) == ([(0, 1, 0, 4)], [(0, 2, 0, 2)])
    assert (owned(first), owned(second)) == ([1], [2])


def test_a_change_of_tools_ends_the_segment_and_leaves_its_tokens() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 4), sampled=(2, 4)),
        step(put(TOKENS, 2, 4, 4), sampled=(6, 8), cut="tools"),
    )
    assert reasons([first, second]) == ["tools", "end"]
    assert shown(second, TOKENS) == [(0, 1, 0, 4), (4, 2, 0, 4)]
    assert second.manifest.loss.tolist() == [[6, 8]]


def test_a_mismatch_is_told_from_a_rewrite() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 4)), step(put(TOKENS, 2, 2, 4), rewrite_at=3, cut="mismatch")
    )
    assert reasons([first, second]) == ["mismatch", "end"]
    assert shown(second, TOKENS) == [(0, 1, 0, 2), (2, 2, 0, 4)]


def test_the_timeline_follows_commits() -> None:
    steps = (
        step(put(TOKENS, 1, 0, 4), sampled=(0, 4)),
        step(put(TOKENS, 2, 4, 4), sampled=(4, 8)),
        step(put(TOKENS, 3, 4, 3), sampled=(4, 7), parent=0),
        step(put(TOKENS, 4, 8, 2), sampled=(8, 10), parent=1),
        step(put(TOKENS, 5, 10, 2), sampled=(10, 12)),
        step(put(TOKENS, 6, 9, 2), sampled=(9, 11), rewrite_at=9),
    )
    timeline = segments(*steps, view="timeline")
    assert reasons(timeline) == ["branch", "branch", "rewrite", "end"]
    assert [one.manifest.loss.tolist() for one in timeline] == [[[0, 8]], [[4, 7]], [[8, 12]], [[9, 11]]]
    assert [[number for _, number, _, _ in shown(one, TOKENS)] for one in timeline] == [
        [1, 2],
        [1, 3],
        [1, 2, 4, 5],
        [1, 2, 4, 6],
    ]
    assert [owned(one) for one in timeline] == [[1, 2], [1, 3], [1, 2, 4, 5], [1, 2, 4, 6]]
    assert reasons(segments(*steps)) == ["end", "rewrite", "end"]
    assert segments(view="timeline") == []


def test_a_step_samples_only_what_is_there() -> None:
    first, second = segments(
        step(put(TOKENS, 1, 0, 4), sampled=(2, 9)),
        step(put(TOKENS, 2, 4, 2)),
        step(put(TOKENS, 3, 4, 8), parent=0),
    )
    assert first.manifest.sampled.tolist() == second.manifest.sampled.tolist() == [[2, 4]]


def test_versions_are_those_that_sampled_first() -> None:
    (segment,) = segments(
        step(put(TOKENS, 1, 0, 6), sampled=(2, 6), version="1"),
        step(put(TOKENS, 2, 0, 9), sampled=(2, 9), version="2"),
        step(put(TOKENS, 3, 9, 3), sampled=(9, 12), version="2"),
        step(put(TOKENS, 4, 12, 2), sampled=(12, 14)),
    )
    assert segment.manifest.versions == ((2, 6, "1"), (6, 12, "2"))
    assert segment.versions == ("1", "2")
    assert Manifest.decode(segment.manifest.encode()).versions == segment.manifest.versions


def test_the_manifest_of_a_trajectory_of_gigabytes_is_a_few_kilobytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Chunks are written now and then, not all in one millisecond.
    waits = random.Random(7)
    clock = itertools.accumulate(iter(lambda: waits.randrange(5, 500), 0), initial=1_790_000_000_000)
    monkeypatch.setattr("arrow_tq_schemas.ids.time.time_ns", lambda: next(clock) * 1_000_000)
    topk = indexer_topk(layers=12, topk=2048, layer_groups=[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
    turns, rows_a_turn = 12, 3300
    rows_a_chunk = 10_000_000 // topk.row_bytes + 1
    ids = IdFactory()
    steps, position = [], 0
    for _ in range(turns):
        receipts = []
        for one, chunk_rows in ((TOKENS, 1 << 20), (topk, rows_a_chunk)):
            chunks = []
            for start in range(position, position + rows_a_turn, chunk_rows):
                rows = min(chunk_rows, position + rows_a_turn - start)
                chunks.append(
                    StoredChunk(
                        id=ids.next(0).hex,
                        start=start,
                        rows=rows,
                        bytes=rows * one.row_bytes,
                        groups=len(one.groups),
                    )
                )
            receipts.append(
                Receipt(run="r", epoch=0, field=one.name, start=position, rows=rows_a_turn, chunks=chunks)
            )
        steps.append(step(*receipts, sampled=(position + rows_a_turn // 2, position + rows_a_turn)))
        position += rows_a_turn
    assert topk.row_bytes == 96 << 10
    assert position * topk.row_bytes > 3.7e9
    (segment,) = segments(*steps, fields=(TOKENS, topk))
    assert segment.complete_fields == ("token_ids", "indexer_topk")
    assert len(segment.manifest.spans["indexer_topk"]) > 380
    assert len(segment.manifest.encode()) < 8 << 10, "with one chunk a 10 MB, whatever its groups"


@pytest.mark.parametrize("turns", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_million_spans_are_composed_within_a_second(turns: int) -> None:
    chunks_a_turn, first_id = 10_000, chunk_id(0).value
    Stored = namedtuple("Stored", "id start rows valid")
    steps = []
    for turn in range(turns):
        start = turn * chunks_a_turn
        chunks = [
            Stored(f"{first_id + start + index:032x}", start + index, 1, None)
            for index in range(chunks_a_turn)
        ]
        receipt = Receipt.model_construct(
            v=1, run="r", epoch=0, field="token_ids", start=start, rows=chunks_a_turn, chunks=chunks
        )
        steps.append(step(receipt, sampled=(start, start + chunks_a_turn)))
    begun = time.process_time()
    (segment,) = segments(*steps, fields=(TOKENS,))
    took_s = time.process_time() - begun
    assert len(segment.manifest.spans["token_ids"]) == turns * chunks_a_turn
    assert took_s < 0.03 * turns, "the target is 1 s for a million; a loaded machine may take longer"
