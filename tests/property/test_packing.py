"""Plans keep what they promise, whatever the lengths."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from arrow_tq.trainer.packing import PlanPolicy, pack, shuffled
from arrow_tq_schemas.errors import InvalidInput

lengths = st.lists(st.integers(0, 100), max_size=60)


@settings(deadline=None, max_examples=100)
@given(lengths, st.integers(1, 5), st.integers(60, 200), st.none() | st.integers(0, 9), st.integers(1, 3))
def test_every_segment_is_in_one_micro_batch_of_one_rank(
    tokens: list[int], world: int, max_tokens: int, seed: int | None, multiple: int
) -> None:
    policy = PlanPolicy(oversize="alone", micros_multiple_of=multiple)
    plan = pack(tokens, world, max_tokens, seed, policy)
    assert sorted(index for bins in plan for one in bins for index in one) == list(range(len(tokens)))
    assert len(plan) == world
    assert len({len(bins) for bins in plan}) == 1
    assert len(plan[0]) % multiple == 0
    for bins in plan:
        for one in bins:
            assert len(one) == 1 or sum(tokens[index] for index in one) <= max_tokens
    assert plan == pack(np.array(tokens), world, max_tokens, seed, policy)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=64, max_size=200), st.integers(1, 8))
def test_ranks_have_like_loads(tokens: list[int], world: int) -> None:
    plan = pack(tokens, world, 2000, 1, PlanPolicy())
    loads = [sum(tokens[index] for one in bins for index in one) for bins in plan]
    assert max(loads) - min(loads) <= max(tokens)
    # No more micro-batches than first-fit could need, twice the least number and one.
    assert len(plan[0]) <= 2 * -(-max(loads) // 2000) + 1
    assert all(one for bins in plan for one in bins)


def test_seeds_shuffle_and_no_seed_keeps() -> None:
    tokens = list(range(1, 101))
    one, two, none = (pack(tokens, 2, 500, seed, PlanPolicy()) for seed in (1, 2, None))
    assert one != two
    sums = [[sum(tokens[index] for index in micro) for micro in bins] for bins in none]
    assert all(bins == sorted(bins, reverse=True) for bins in sums)
    assert all(micro == sorted(micro) for bins in none for micro in bins)
    assert sorted(shuffled(50, 3)) == list(range(50))
    # Frozen: ranks of two versions must still agree.
    assert shuffled(8, 3) == [2, 1, 3, 0, 6, 4, 7, 5]


def test_another_process_plans_alike() -> None:
    code = (
        "from arrow_tq.trainer.packing import PlanPolicy, pack\n"
        "print(pack([(7 * i * i) % 97 + 1 for i in range(200)], 3, 300, 5, PlanPolicy()))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    mine = pack([(7 * i * i) % 97 + 1 for i in range(200)], 3, 300, 5, PlanPolicy())
    assert runs == [f"{mine}\n"] * 2


def test_forty_thousand_segments() -> None:
    tokens = np.random.default_rng(0).integers(100, 60_000, 40_000)
    plan = pack(tokens, 64, 65_536, 1, PlanPolicy())
    loads = [int(sum(tokens[one].sum() for one in bins)) for bins in plan]
    assert max(loads) / min(loads) < 1.001
    assert {len(bins) for bins in plan} == {len(plan[0])}
    full = sum(loads) / (64 * len(plan[0]) * 65_536)
    assert full > 0.9, "micro-batches are to be filled"


def test_policies_refuse() -> None:
    with pytest.raises(InvalidInput, match=r"segments 1 \(9 tokens\) are longer than max_tokens 5"):
        pack([1, 9], 1, 5, None, PlanPolicy())
    with pytest.raises(InvalidInput, match="1 segments do not give 1 micro-batches to each of 2"):
        pack([1], 2, 5, None, PlanPolicy(short="refuse"))
    for wrong in ({"oversize": "cut"}, {"short": "zero"}, {"micros_multiple_of": 0}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            PlanPolicy(**wrong)
    with pytest.raises(InvalidInput, match="max_tokens 0"):
        pack([1], 1, 0, None, PlanPolicy())
    assert pack([], 2, 5, 1, PlanPolicy()) == [[], []]
