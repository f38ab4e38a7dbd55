"""slime and Miles: samples get log-probs and references, routers get routing that is fetched when it is read.

Written against ``Sample`` (``tokens``, ``response_length``, ``loss_mask``, ``rollout_log_probs``,
``rollout_routed_experts``, ``weight_versions``), the train dict, slime's ``RoutingReplay.record`` with its
``materialize_for_routing_replay(stage)``, and Miles's ``Replay.top_indices_list``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay.layout import ContextSplit, RankLayout
from arrow_tq.adapters.replay.pointer import BatchPointer
from arrow_tq.adapters.replay.samples import LOGPROB_FIELD, sample_values
from arrow_tq.adapters.replay.source import CAPACITY_BYTES, FIELD, LayerRouting, RoutingSource
from arrow_tq.adapters.replay.switch import Switch
from arrow_tq.adapters.routers import LiveRouter, live_routers
from arrow_tq.trainer.batch import Batch
from arrow_tq_schemas.errors import InvalidInput, RowCountMismatch

ATTRIBUTE = "routing_replay"
PAD_MULTIPLIER = 128
"""slime's ``data_pad_size_multiplier`` when it is left alone."""


class Sample(Protocol):
    """What is used of slime's ``Sample``."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    rollout_routed_experts: Any
    weight_versions: list[str]


@dataclass(frozen=True, slots=True)
class RoutedExpertsRef:
    """In the place of a sample's ``[T-1, layers, top-k]`` array; pickles to a few hundred bytes."""

    batch: BatchPointer
    row: int
    shape: tuple[int, int, int]
    field: str = FIELD

    def __len__(self) -> int:
        return self.shape[0]


def fill_samples(
    samples: Sequence[Sample],
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> None:
    """Give samples what the store holds for them. ``Switch.OFF`` touches none of them.

    Sets ``rollout_log_probs`` (a list, response only, 0.0 at tool tokens), ``loss_mask`` and
    ``weight_versions`` where a sample has none, and ``rollout_routed_experts``, a reference.

    Args:
        samples: one a row.
        batch: the claimed batch.
        rows: the row of the batch of each sample; None: row i is sample i's.
        logprobs, routing: names of the run's fields.

    Raises:
        Misaligned: a sample's tokens are not those of its segment.
        RowCountMismatch: a sample's response begins elsewhere than the segment's first sampled token.
    """
    if switch is Switch.OFF or not samples:
        return
    chosen = list(range(len(samples))) if rows is None else [int(row) for row in rows]
    if len(chosen) != len(samples):
        raise InvalidInput(f"{len(samples)} samples, {len(chosen)} rows")
    tokens = [np.asarray(one.tokens) for one in samples]
    filled = sample_values(batch, chosen, logprobs, expect_tokens=tokens)
    shape = batch.run.field(routing).shape if switch.has_routing else (0, 0)
    pointer = BatchPointer.of(batch)
    for sample, row, values in zip(samples, chosen, filled, strict=True):
        if values.response_length != sample.response_length:
            raise RowCountMismatch(
                f"segment {batch.segment_ids[row]!r}: its response has {values.response_length} tokens, the "
                f"sample's {sample.response_length}",
                segment_id=batch.segment_ids[row],
            )
        sample.rollout_log_probs = cast("npt.NDArray[np.float32]", values.logprobs).tolist()
        if sample.loss_mask is None:
            sample.loss_mask = values.loss_mask.tolist()
        if not sample.weight_versions:
            sample.weight_versions = list(values.versions)
        if switch.has_routing:
            rows_shape = (len(values.tokens) - 1, shape[0], shape[1])
            sample.rollout_routed_experts = RoutedExpertsRef(pointer, row, rows_shape, routing)


def train_fields(
    batch: Batch,
    switch: Switch,
    rows: Sequence[int] | None = None,
    logprobs: str = LOGPROB_FIELD,
    routing: str = FIELD,
) -> dict[str, list[Any]]:
    """Columns of the train dict that the store holds, one row a sample. ``Switch.OFF`` gives none.

    ``tokens``, ``response_lengths``, ``total_lengths``, ``loss_masks``, ``rollout_log_probs`` and, with
    routing, ``rollout_routed_experts`` (references).
    """
    if switch is Switch.OFF:
        return {}
    chosen = list(range(len(batch))) if rows is None else [int(row) for row in rows]
    values = sample_values(batch, chosen, logprobs)
    columns: dict[str, list[Any]] = {
        "tokens": [one.tokens.tolist() for one in values],
        "response_lengths": [one.response_length for one in values],
        "total_lengths": [len(one.tokens) for one in values],
        "loss_masks": [one.loss_mask.tolist() for one in values],
        "rollout_log_probs": [cast("npt.NDArray[np.float32]", one.logprobs).tolist() for one in values],
    }
    if switch.has_routing:
        shape, pointer = batch.run.field(routing).shape, BatchPointer.of(batch)
        columns["rollout_routed_experts"] = [
            RoutedExpertsRef(pointer, row, (len(one.tokens) - 1, shape[0], shape[1]), routing)
            for row, one in zip(chosen, values, strict=True)
        ]
    return columns


def routed_experts(
    batch: Batch, rows: Sequence[int] | None = None, routing: str = FIELD
) -> list[npt.NDArray[np.int32]]:
    """The arrays themselves, int32 ``[T-1, layers, top-k]`` a sample, for code that wants them at once."""
    return [np.ascontiguousarray(one, dtype=np.int32) for one in batch.fetch([routing], rows=rows)[routing]]


def source_of(
    refs: Sequence[RoutedExpertsRef], rank: int, world: int, capacity_bytes: int = CAPACITY_BYTES
) -> RoutingSource:
    """The source of these references' batch, on a training worker.

    Args:
        refs: of one batch.
        rank, world: rank and number of the workers that read it; each of them must release the batch.
        capacity_bytes: rows kept at most.
    """
    if len({(ref.batch, ref.field) for ref in refs}) != 1:
        raise InvalidInput(f"{len(refs)} references: expected some of one batch and field")
    return RoutingSource(refs[0].batch.at(rank, world), refs[0].field, capacity_bytes)


def rank_layout(
    cp_rank: int = 0,
    cp_size: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
    *,
    sequence_parallel: bool = False,
    context: ContextSplit = ContextSplit.ZIGZAG,
    pad_multiplier: int = PAD_MULTIPLIER,
) -> RankLayout:
    """The rows of one rank as slime lays tokens out: zig-zag (or packed) cut, padded to tp x multiplier."""
    sp = (tp_rank, tp_size) if sequence_parallel else (0, 1)
    return RankLayout(context, cp_rank, cp_size, sp[0], sp[1], row_multiple=tp_size * pad_multiplier)


def record_routing(
    chunks: Sequence[Any],
    source: RoutingSource,
    micro_batches: Sequence[Sequence[int]],
    layout: RankLayout,
    switch: Switch,
) -> list[LiveRouter]:
    """Queue each micro-batch's routing at each router of the live model; nothing is fetched yet.

    The place of slime's ``fill_routing_replay``. slime's replays take objects that materialise late; those
    of Miles are given the same object, which answers to ``.to(device)``. Where the replay's class has
    ``register_lazy_resource``, the source goes by slime's passes and is closed by its ``clear_all``.

    Args:
        chunks: this rank's model chunks.
        source: the batch's routing.
        micro_batches: rows of the batch, in the order in which the passes take them.
        layout: this rank's place.

    Returns:
        the routers that were given routing; none with ``OFF`` or ``LOGPROBS``.
    """
    if not switch.has_routing:
        return []
    routers = live_routers(chunks, ATTRIBUTE)
    layers = sorted({router.layer_id for router in routers})
    for rows in micro_batches:
        micro = source.micro_batch(rows, layout, layers)
        for router in routers:
            _record(router.replay, micro.layer(router.layer_id))
    register = getattr(type(routers[0].replay), "register_lazy_resource", None)
    if register is not None:
        register(source)
    return routers


def _record(replay: Any, routing: LayerRouting) -> None:
    if hasattr(type(replay), "register_lazy_resource"):
        replay.record(routing)
    else:
        # ``record`` of Miles copies into pinned memory at once; its queue takes what has ``.to``.
        replay.top_indices_list.append(routing)
