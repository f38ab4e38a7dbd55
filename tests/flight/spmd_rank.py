"""One rank of ``test_spmd``: ``spmd_rank URL FOLDER RANK WORLD``. Asserts; prints what it planned."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist

import arrow_tq
from arrow_tq.testing import layouts
from arrow_tq.testing.rollouts import LAYER_IDS, make_rollout

RUN, SEGMENTS, CP = "spmd", 12, 2


def main(url: str, folder: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    with arrow_tq.connect(url) as store:
        run = store.run(RUN)
        ref: list[str | None] = [run.claim(SEGMENTS).ref if rank == 0 else None]
        dist.broadcast_object_list(ref)
        assert ref[0] is not None
        assert len(ref[0]) < 1024
        batch = run.attach(ref[0], rank=rank, world=world)
        tables: list[object] = [None] * world
        dist.all_gather_object(tables, batch.table.to_pydict())
        assert all(table == tables[0] for table in tables)
        # Two context-parallel ranks share one data-parallel part of the plan.
        plan = batch.plan(max_tokens=150, seed=5, rank=rank // CP, world=world // CP)
        for micro in plan:
            check_micro(run, micro, rank % CP, rank, world)
        old = sum(micro.put("old", old_logprobs(micro)) for micro in plan if rank % CP == 0)
        dist.barrier()
        for micro in plan:
            stored = micro.fetch("old").packed("old")
            np.testing.assert_array_equal(stored, np.concatenate([np.zeros(0), *old_logprobs(micro)]))
        dist.barrier()
        batch.release()
        print(json.dumps({"rows": [micro.rows for micro in plan], "old": old}))
    dist.destroy_process_group()


def check_micro(run, micro, cp_rank: int, rank: int, world: int) -> None:  # type: ignore[no-untyped-def]
    """Handles go through packing, padding, a zig-zag split and an all_reduce that one rank feeds."""
    rollouts = [make_rollout(int(name.split("-")[1].split("~")[0])) for name in micro.segment_ids]
    each = [layouts.pad_multiple(one, 2 * CP) for one in micro.handles("routed_experts")]
    local = layouts.pad_multiple(layouts.pack([layouts.zigzag(one, cp_rank, CP) for one in each]), 4)
    # Ranks have micro-batches of their own lengths: all go into one buffer of int64 zeros, each at its place.
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(local)]))
    starts = np.cumsum([0, *(int(size) for size in sizes)])
    everyone = torch.zeros((int(starts[-1]), 6), dtype=torch.int64)
    everyone[starts[rank] : starts[rank + 1]] = torch.from_numpy(local.astype(np.int64))
    dist.all_reduce(everyone)
    longest = int(max(sizes))
    padded = torch.zeros((longest, 6), dtype=torch.int64)
    padded[: len(local)] = everyone[starts[rank] : starts[rank + 1]]
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    mine = gathered[rank][: len(local)]

    def moved(rows: list[np.ndarray]) -> np.ndarray:
        parts = [layouts.zigzag(layouts.pad_multiple(one, 2 * CP), cp_rank, CP) for one in rows]
        return layouts.pad_multiple(layouts.pack(parts), 4)

    layers = LAYER_IDS[3 * cp_rank : 3 * cp_rank + 3]
    last = np.zeros((1, 6, 2), np.uint8)
    payload = moved([np.concatenate([one.experts, last]) for one in rollouts])
    wanted = payload[:, [LAYER_IDS.index(layer) for layer in layers]]
    mask = moved([np.ones(len(one.tokens), np.bool_) for one in rollouts])
    tokens = moved([one.tokens for one in rollouts])
    got = run.resolve(mine, "routed_experts", layers, expect_tokens=tokens, valid=torch.from_numpy(mask))
    np.testing.assert_array_equal(got, wanted)


def old_logprobs(micro) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    rollouts = [make_rollout(int(name.split("-")[1].split("~")[0])) for name in micro.segment_ids]
    return [one.logprobs * np.float32(2) for one in rollouts]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
