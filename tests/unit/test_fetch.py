"""Fetch: buffers of the caller, layouts of the answer, widening, parallel parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import arrow_tq
from arrow_tq import Field, errors, fields, tensors
from arrow_tq.backend import Read, Rows
from arrow_tq.interface import Store
from arrow_tq.parallel import run_all
from arrow_tq.runs import Run
from arrow_tq.testing.rollouts import LAYER_IDS
from arrow_tq.testing.scenes import fill, open_run
from arrow_tq.trainer import PlanPolicy
from arrow_tq.trainer.fetch import Reading
from arrow_tq_schemas import handles
from arrow_tq_schemas.spans import to_spans

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


def finalized(run: Run, **rows: tuple[int, object]) -> None:
    """One session of one step: field to (start, rows)."""
    session = run.session(f"s-{len(run.sql('SELECT 1 FROM sessions'))}")
    tokens = len(rows["token_ids"][1])  # type: ignore[arg-type]
    with session.step(sampled=(0, tokens)) as step:
        for name, (start, values) in rows.items():
            step.put(name, values, start=start)
    session.finalize()


@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
def test_rows_are_widened_into_a_torch_buffer(store: Store, kind: str) -> None:
    run = open_run(store)
    kept = fill(run, 3)
    batch = run.claim(3)
    total = int(batch.num_tokens.sum())
    out = torch.empty((total, 2, 2), dtype=getattr(torch, kind))
    layers = [9, 2]
    data = batch.fetch("routed_experts", layers=layers, out={"routed_experts": out})
    for index, name in enumerate(batch.segment_ids):
        wanted = kept[name].experts[:, [LAYER_IDS.index(layer) for layer in layers]]
        np.testing.assert_array_equal(data["routed_experts"][index], wanted)
        start, end = data.offsets[index : index + 2]
        np.testing.assert_array_equal(out[start : end - 1].numpy(), wanted)
        assert not out[end - 1].any()


def test_buffers_that_do_not_fit_are_refused(store: Store) -> None:
    run = open_run(store)
    fill(run, 1)
    batch = run.claim(1)
    total = int(batch.num_tokens.sum())
    for wrong in (
        torch.empty((total, 6, 2), dtype=torch.int8),
        torch.empty((total, 6, 2), dtype=torch.bfloat16),
        torch.empty((2, 6, total), dtype=torch.int32).permute(2, 1, 0),
        torch.empty((total, 6), dtype=torch.int32),
        torch.empty((total, 6, 2), dtype=torch.int32, device="meta"),
        [[1]],
    ):
        with pytest.raises(errors.InvalidField, match="routed_experts"):
            batch.fetch("routed_experts", out={"routed_experts": wrong})


def test_bfloat16_goes_into_its_own_kind_or_widens_to_floats(store: Store) -> None:
    run = store.run(
        "b", fields=[fields.token_ids(), Field("h", "bfloat16", (2,), domain="forwarded", fill=0.5)]
    )
    values = torch.randn(3, 2).to(torch.bfloat16)
    finalized(run, token_ids=(0, [1, 2, 3, 4]), h=(0, values))
    batch = run.claim(1)
    own = torch.empty((4, 2), dtype=torch.bfloat16)
    batch.fetch("h", out={"h": own})
    assert torch.equal(own[:3], values)
    assert own[3].tolist() == [0.5, 0.5]
    wide = np.empty((4, 2), np.float32)
    data = batch.fetch("h", out={"h": wide})
    np.testing.assert_array_equal(wide[:3], values.float().numpy())
    assert wide[3].tolist() == [0.5, 0.5]
    assert data.padded("h", length=5)[0, 3:].tolist() == [[0.5, 0.5]] * 2
    assert torch.equal(data.tensor("h")[:3], values.float())
    assert batch.fetch("h").tensor("h").dtype == torch.bfloat16


def test_layouts_of_the_answer(store: Store) -> None:
    run = open_run(store)
    kept = fill(run, 3)
    batch = run.claim(3)
    rollouts = [kept[name] for name in batch.segment_ids]
    data = batch.fetch(["token_ids", "logprobs"])
    np.testing.assert_array_equal(data.packed("token_ids"), np.concatenate([one.tokens for one in rollouts]))
    padded = data.padded("token_ids", value=-7)
    longest = max(len(one.tokens) for one in rollouts)
    assert padded.shape == (3, longest)
    for row, one in zip(padded, rollouts, strict=True):
        assert row.tolist() == one.tokens.tolist() + [-7] * (longest - len(one.tokens))
    with pytest.raises(errors.InvalidInput, match="tokens, length is 2"):
        data.padded("token_ids", length=2)
    mask = np.concatenate([one.logprobs for one in rollouts]) != 0
    np.testing.assert_array_equal(data.loss_mask(), mask)
    for index, one in enumerate(rollouts):
        start = one.turns[0][1]
        np.testing.assert_array_equal(data.response("logprobs")[index], one.logprobs[start:])
        np.testing.assert_array_equal(data.sampled("logprobs")[index], one.logprobs[one.logprobs != 0])
    assert data.origin.response_starts().tolist() == [one.turns[0][1] for one in rollouts]


def test_positions_are_moved_by_the_packed_offset(store: Store) -> None:
    run = store.run("p", fields=[fields.token_ids(), fields.indexer_topk(2, 3)])
    topk = np.array([[[0, -1, -1]] * 2, [[1, 0, -1]] * 2, [[2, 0, 1]] * 2], np.int32)
    finalized(run, token_ids=(0, [1, 2, 3, 4]), indexer_topk=(0, topk))
    finalized(run, token_ids=(0, [5, 6, 7]), indexer_topk=(0, topk[:2]))
    data = run.claim(2).fetch(["indexer_topk", "token_ids"])
    np.testing.assert_array_equal(data["indexer_topk"][1], topk[:2])
    rebased = data.packed("indexer_topk", rebase=True)
    np.testing.assert_array_equal(rebased[:3], topk)
    np.testing.assert_array_equal(rebased[4:6], np.where(topk[:2] == -1, -1, topk[:2] + 4))
    assert (rebased[[3, 6]] == -1).all()
    np.testing.assert_array_equal(data.packed("indexer_topk")[4:6], topk[:2])


def test_uint16_never_reaches_torch_arithmetic(store: Store) -> None:
    run = store.run("u", fields=[fields.token_ids(), fields.routed_experts(2, 2, 60_000)])
    ids = np.array([[[59_999, 1], [2, 40_000]]], np.int32)
    finalized(run, token_ids=(0, [1, 2]), routed_experts=(0, ids))
    data = run.claim(1).fetch("routed_experts")
    assert data["routed_experts"].packed.dtype == np.uint16
    assert data.tensor("routed_experts").dtype == torch.int32
    assert data.tensor("routed_experts", device="cpu")[0].tolist() == ids[0].tolist()
    assert data.tensor("routed_experts", "int64").dtype == torch.int64


@needs_gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "bfloat16", "bool", "float32"])
def test_tensors_go_to_a_gpu_from_pinned_memory(dtype: str) -> None:
    values = (
        np.arange(24)
        .reshape(4, 6)
        .astype("uint16" if dtype == "bfloat16" else dtype.replace("bool", "uint8"))
    )
    if dtype == "bool":
        values %= 2
    there = tensors.to_device(values, dtype, None, "cuda")
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), tensors.from_storage(values, dtype))
    assert tensors.pinned((2, 3), torch.int32).is_pinned()


def test_pinned_buffers_take_rows_where_there_is_no_gpu_too(store: Store) -> None:
    run = open_run(store)
    kept = fill(run, 1)
    batch = run.claim(1)
    out = tensors.pinned((int(batch.num_tokens[0]),), torch.int32)
    batch.fetch("token_ids", out={"token_ids": out})
    assert out.tolist() == next(iter(kept.values())).tokens.tolist()


def test_parts_are_read_in_parallel_and_the_first_error_is_raised(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(store)
    fill(run, 1)
    batch = run.claim(1)
    run.reading = Reading(parallel_bytes_min=0)
    both = threading.Barrier(2, timeout=30)
    plain = run.backend.read

    def meet(request: Read) -> Iterator[Rows]:
        if request.field.name == "routed_experts":
            both.wait()
        return plain(request)

    monkeypatch.setattr(run.backend, "read", meet)
    batch.fetch(["token_ids", "routed_experts"])
    ended: list[int] = []

    def fail() -> None:
        raise errors.ChunkLost("gone")

    with pytest.raises(errors.ChunkLost, match="gone"):
        run_all([fail, lambda: ended.append(1), lambda: ended.append(2)], 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("arrow-tq-part")]


def test_a_large_field_is_read_in_parts_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = store.run("r", fields=[fields.token_ids(), Field("x", "uint8", shape=(4,))])
    run.chunk_bytes = 64
    tokens = np.arange(200, dtype=np.int32)
    kept = np.random.default_rng(0).integers(0, 256, (200, 4), np.uint8)
    finalized(run, token_ids=(0, tokens), x=(0, kept))
    monkeypatch.setattr("arrow_tq.trainer.fetch.PART_BYTES_MIN", 256)
    monkeypatch.setattr(type(run.backend), "reads_at_once", 2)
    run.reading = Reading(parallel_bytes_min=0)
    both = threading.Barrier(2, timeout=30)
    plain = run.backend.read

    def meet(request: Read) -> Iterator[Rows]:
        both.wait()
        return plain(request)

    monkeypatch.setattr(run.backend, "read", meet)
    out = np.zeros((200, 4), np.int32)
    run.claim(1).fetch("x", out={"x": out})
    np.testing.assert_array_equal(out, kept)


def test_pending_rows_are_waited_for_and_named(store: Store) -> None:
    run = open_run(store)
    session = run.session("s")
    step = session.step()
    receipt = step.put("token_ids", [1, 2, 3], start=0)
    rows = handles.expand(to_spans(receipt.spans()))
    run.reading = Reading(wait_s=0.1)
    with pytest.raises(errors.ChunkPending) as caught:
        run.resolve(rows, "token_ids")
    assert caught.value.details["ids"] == [receipt.chunks[0].id]
    run.reading = Reading(wait_s=30)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.resolve, rows, "token_ids")
        step.commit()
        assert waiting.result(30).tolist() == [1, 2, 3]
    session.abort()
    with pytest.raises(errors.ChunkReleased) as gone:
        run.resolve(rows, "token_ids")
    assert gone.value.details["ids"] == [receipt.chunks[0].id]


def test_tokens_are_checked_against_batches_of_this_process(store: Store) -> None:
    run, stranger = open_run(store), open_run(store)
    kept = fill(run, 3)
    batch = run.claim(2)
    rows = np.concatenate(batch.handles("routed_experts"))
    tokens = np.concatenate([kept[name].tokens for name in batch.segment_ids])
    run.resolve(rows, "routed_experts", expect_tokens=torch.from_numpy(tokens))
    with pytest.raises(errors.InvalidInput, match="attach the batch's ref"):
        stranger.resolve(rows, "routed_experts", expect_tokens=tokens)
    with pytest.raises(errors.Misaligned, match="shape"):
        run.resolve(rows, "routed_experts", expect_tokens=tokens[1:])
    tokens[4] += 1
    with pytest.raises(errors.Misaligned, match=r"row 4.*position 4"):
        run.resolve(rows, "routed_experts", expect_tokens=tokens)
    tokens[4] -= 1
    # A segment that is gone, and a batch that was released, do not stand in the way of the others.
    run.claim(1).release()
    half = batch.handles("routed_experts")[1]
    fresh = open_run(store).attach(batch.ref, rank=0, world=1)
    run.discard(batch.segment_ids[0], reason="stale")
    wanted = tokens[len(rows) - len(half) :]
    for one in (run, fresh.run):
        np.testing.assert_array_equal(
            one.resolve(half, "routed_experts", expect_tokens=wanted)[:-1], kept[batch.segment_ids[1]].experts
        )


def test_a_prefetch_stays_within_its_bytes(store: Store) -> None:
    run = open_run(store)
    kept = fill(run, 6)
    batch = run.claim(6)
    plan = batch.plan(max_tokens=int(batch.num_tokens.max()), seed=2)
    sizes = [micro.fetch_bytes("routed_experts") for micro in plan]
    bound = 2 * max(sizes)
    seen: list[str] = []
    with plan.prefetch("routed_experts", ahead_bytes=bound) as ahead:
        for micro, data in ahead:
            assert data.nbytes == micro.fetch_bytes("routed_experts")
            assert ahead.ahead_bytes <= bound
            seen += data.origin.segment_ids
            micro.close()
            with pytest.raises(errors.Conflict, match="closed"):
                data["routed_experts"]
    assert sorted(seen) == sorted(kept)
    stopped = plan.prefetch("routed_experts", ahead_bytes=1)
    next(stopped)
    stopped.close()
    assert next(stopped, None) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "arrow-tq-prefetch"]
    with pytest.raises(errors.InvalidInput, match="ahead_bytes 0"):
        plan.prefetch("routed_experts", ahead_bytes=0)


def test_short_ranks_get_what_the_policy_says(store: Store) -> None:
    run = open_run(store)
    kept = fill(run, 1)
    ref = run.claim(1).ref
    ranks = [run.attach(ref, rank=rank, world=2) for rank in range(2)]
    full, empty = (batch.plan(max_tokens=1000) for batch in ranks)
    assert [len(micro) for micro in full] == [1]
    assert [(len(micro), micro.padding) for micro in empty] == [(0, False)]
    data = empty[0].fetch(["token_ids", "routed_experts"])
    assert data.packed("routed_experts").shape == (0, 6, 2)
    assert data.padded("token_ids").shape == (0, 0)
    (repeated,) = ranks[1].plan(max_tokens=1000, policy=PlanPolicy(short="repeat"))
    assert (repeated.padding, repeated.segment_ids) == (True, list(kept))
    with pytest.raises(errors.InvalidInput, match="do not give"):
        ranks[1].plan(max_tokens=1000, policy=PlanPolicy(short="refuse"))
    with pytest.raises(errors.InvalidInput, match="twice"):
        ranks[0].plan(max_tokens=1000, rows=[0, 0])
    assert len(ranks[0].plan(max_tokens=1000, rank=3, world=8)) == 1
