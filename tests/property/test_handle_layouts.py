"""Whatever layout machinery does to handles, resolving them gives what it does to the payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import arrow_tq
from arrow_tq.runs import Run
from arrow_tq.testing import layouts
from arrow_tq.testing.rollouts import LAYER_IDS, make_rollout, write_rollout
from arrow_tq.testing.scenes import open_run
from arrow_tq.trainer.batch import Batch

Rows = np.ndarray
Move = Callable[[Rows], Rows]
SEGMENTS = 5


@dataclass
class Scene:
    run: Run
    batch: Batch
    handles: dict[str, list[Rows]]
    payload: dict[str, list[Rows]]
    tokens: list[Rows]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with arrow_tq.open(tmp_path_factory.mktemp("layouts") / "store", capacity_bytes=1 << 30) as store:
        run = open_run(store)
        run.chunk_bytes = 64  # many chunks a segment
        rollouts = [make_rollout(seed) for seed in range(SEGMENTS)]
        for index, rollout in enumerate(rollouts):
            write_rollout(run.session(f"s-{index}"), rollout)
            run.session(f"s-{index}").finalize()
        batch = run.claim(SEGMENTS)
        last = np.zeros((1, 6, 2), np.uint8)
        yield Scene(
            run,
            batch,
            {name: batch.handles(name) for name in ("routed_experts", "logprobs", "token_ids")},
            {
                "routed_experts": [np.concatenate([one.experts, last]) for one in rollouts],
                "logprobs": [one.logprobs for one in rollouts],
                "token_ids": [one.tokens for one in rollouts],
            },
            [one.tokens for one in rollouts],
        )
        batch.release()


@st.composite
def per_sample(draw: st.DrawFn) -> Move:
    """What is done to each sample before packing."""
    size = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(["whole", "contiguous", "zigzag", "gathered"]))
    if kind == "whole":
        return lambda rows: layouts.pad_multiple(rows, size)
    if kind == "contiguous":
        return lambda rows: layouts.contiguous(layouts.pad_multiple(rows, size), rank, size)
    if kind == "zigzag":
        return lambda rows: layouts.zigzag(layouts.pad_multiple(rows, 2 * size), rank, size)

    def gathered(rows: Rows) -> Rows:
        padded = layouts.pad_multiple(rows, 2 * size)
        return layouts.zigzag_join([layouts.zigzag(padded, one, size) for one in range(size)])

    return gathered


@st.composite
def packed(draw: st.DrawFn) -> Move:
    """What is done to the packed rows."""
    size = draw(st.sampled_from([1, 2, 3, 8]))
    rank = draw(st.integers(0, size - 1))
    kind = draw(st.sampled_from(["pad", "slice", "reverse", "permute", "repeat", "none"]))
    seed = draw(st.integers(0, 99))
    moves: dict[str, Move] = {
        "pad": lambda rows: layouts.pad_multiple(rows, 16),
        "slice": lambda rows: layouts.contiguous(layouts.pad_multiple(rows, size), rank, size),
        "reverse": lambda rows: rows[::-1],
        "permute": lambda rows: rows[np.random.default_rng(seed).permutation(len(rows))],
        "repeat": lambda rows: np.concatenate([rows, rows[: len(rows) // 2]]),
        "none": lambda rows: rows,
    }
    return moves[kind]


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["routed_experts", "logprobs", "token_ids"]),
    st.lists(st.integers(0, SEGMENTS - 1), min_size=1, max_size=6),
    per_sample(),
    st.lists(packed(), max_size=3),
    st.sampled_from(["int32", "int64", "summed"]),
    st.permutations(LAYER_IDS).flatmap(lambda ids: st.integers(1, len(ids)).map(lambda count: ids[:count])),
)
def test_handles_move_as_payload(
    scene: Scene, field: str, chosen: list[int], each: Move, moves: list[Move], kind: str, layers: list[int]
) -> None:
    def moved(samples: list[Rows]) -> Rows:
        rows = layouts.pack([each(samples[index]) for index in chosen])
        for move in moves:
            rows = move(rows)
        return rows

    handles = moved(scene.handles[field])
    if kind == "int64":
        handles = handles.astype(np.int64)
    if kind == "summed":
        third = len(handles) // 3
        handles = layouts.single_writer_sum([handles[:third], handles[third:]], len(handles))
    mask = moved([np.ones(len(one), np.bool_) for one in scene.tokens])
    wanted = moved(scene.payload[field])
    if field == "routed_experts":
        wanted = wanted[:, [LAYER_IDS.index(layer) for layer in layers]]
    got = scene.run.resolve(handles, field, layers, expect_tokens=moved(scene.tokens), valid=mask)
    np.testing.assert_array_equal(got, wanted)
    if not mask.all():
        with pytest.raises(arrow_tq.errors.Misaligned, match="all zero"):
            scene.run.resolve(handles, field, layers)
