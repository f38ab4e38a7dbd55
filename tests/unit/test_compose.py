"""Composing segments: each rule on a small example."""

from __future__ import annotations

import pytest

from arrow_tq.store.compose import ComposedSegment, StepPath, compose
from arrow_tq_schemas import ChunkId, Field, Receipt, StoredChunk
from arrow_tq_schemas.errors import InvalidInput, NotFound
from arrow_tq_schemas.presets import logprobs, routed_experts, token_ids
from arrow_tq_schemas.spans import from_spans

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
) -> StepPath:
    return StepPath("call", sampled, version, rewrite_at, receipts)


def segments(
    *steps: StepPath, fields: tuple[Field, ...] = (TOKENS, LOGPROBS, EXPERTS)
) -> list[ComposedSegment]:
    return compose(steps, fields, lambda index: f"s~{index}")


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
