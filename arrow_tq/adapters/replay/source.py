"""Routing that is fetched when a layer first asks for it, kept under a bound, and fetched again later.

A trainer reads a micro-batch's routing up to three times (old log-probs, training forward, recomputation
in backward), layer by layer. A ``RoutingSource`` fetches a micro-batch once for all its layers, keeps the
rank's rows in the stored dtype, and hands each layer a tensor of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as declared
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.replay import rows as expert_rows
from arrow_tq.adapters.replay.layout import RankLayout
from arrow_tq.adapters.replay.pointer import AttachedBatch, BatchPointer
from arrow_tq.adapters.replay.rows import Experts
from arrow_tq_schemas.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    import torch

    from arrow_tq.trainer.batch import Batch

FIELD = "routed_experts"
CAPACITY_BYTES = 4 << 30
"""Rows that a source keeps at most, in the stored dtype."""
REPLAY_DTYPE = "int32"

Stage = Literal["forward", "backward"]


class RoutingSource:
    """The routing of one claimed batch, for one rank. Thread-safe: backward runs in threads of torch's.

    Pickled, it is a ``BatchPointer`` and its settings; the copy connects when it is first asked.

    Attributes:
        pointer: names the batch.
        fetches: how many micro-batches were fetched.
        fetched_bytes: payload bytes of those, before this rank's rows were taken.
    """

    def __init__(
        self,
        batch: Batch | BatchPointer,
        field: str = FIELD,
        capacity_bytes: int = CAPACITY_BYTES,
        device: str | None = None,
    ) -> None:
        """
        Args:
            batch: a batch of this process, or a pointer with its rank.
            field: the run's field of expert ids.
            capacity_bytes: rows kept at most; what was used longest ago goes first.
            device: where tensors are made; None: the current accelerator where there is one, else the CPU.
        """
        if capacity_bytes < 1:
            raise InvalidInput(f"capacity_bytes {capacity_bytes}: expected 1 or more")
        self.pointer = batch if isinstance(batch, BatchPointer) else BatchPointer.of(batch)
        self.field_name = field
        self.capacity_bytes = capacity_bytes
        self.device = device
        self.fetches = 0
        self.fetched_bytes = 0
        self._batch = None if isinstance(batch, BatchPointer) else batch
        self._attached: AttachedBatch | None = None
        self._kept: OrderedDict[MicroBatchRouting, Experts] = OrderedDict()
        self._seen: dict[tuple[MicroBatchRouting, Stage], set[int]] = {}
        self._release_stage: Stage | None = None
        self._lock = threading.RLock()
        self._closed = False

    @property
    def batch(self) -> Batch:
        """The batch, attached on first use."""
        with self._lock:
            if self._closed:
                raise Conflict("this routing source was closed")
            if self._batch is None:
                self._attached = self.pointer.open()
                self._batch = self._attached.batch
            return self._batch

    @property
    def kept_bytes(self) -> int:
        """Bytes of the rows kept now."""
        with self._lock:
            return sum(rows.nbytes for rows in self._kept.values())

    def micro_batch(
        self,
        rows: Sequence[int] | npt.NDArray[np.integer],
        layout: RankLayout | None = None,
        layers: Sequence[int] | None = None,
    ) -> MicroBatchRouting:
        """Routing of some of the batch's rows, packed in the order given. Fetches nothing yet.

        Args:
            rows: rows of ``batch.table``.
            layout: this rank's place; the whole micro-batch when left out.
            layers: global ids of this rank's MoE layers; all of the field's when left out.
        """
        chosen = None if layers is None else tuple(int(layer) for layer in layers)
        return MicroBatchRouting(self, tuple(int(row) for row in rows), layout or RankLayout(), chosen)

    def begin_pass(self, release_stage: Stage) -> None:
        """A pass begins: a micro-batch whose layers were all read in ``release_stage`` is the first to go.

        It goes when room is needed, not before: the next pass finds what the bound leaves.

        Args:
            release_stage: ``forward`` for passes without a backward, ``backward`` for training with
                recomputation.
        """
        with self._lock:
            self._release_stage = release_stage
            self._seen.clear()

    def experts(self, micro: MicroBatchRouting) -> Experts:
        """``[local rows, layers, top-k]`` in the stored dtype; fetched where it is not kept.

        Raises:
            ValueOutOfRange: an id that is no expert, or -1.
            InvalidInput: the rows alone are more than ``capacity_bytes``.
        """
        with self._lock:
            kept = self._kept.get(micro)
            if kept is None:
                kept = self._fetch(micro)
                self._keep(micro, kept)
            self._kept.move_to_end(micro)
            return kept

    def read_layer(self, micro: MicroBatchRouting, layer: int, stage: Stage, dtype: str) -> torch.Tensor:
        """One layer's ``[local rows, top-k]`` on the device."""
        with self._lock:
            experts = self.experts(micro)
            made = expert_rows.tensor(experts[:, micro.place(layer)], dtype, self._device())
            self._count(micro, layer, stage)
            return made

    def release(self, micro: MicroBatchRouting) -> None:
        """Let go of a micro-batch's rows; they are fetched again when asked for."""
        with self._lock:
            self._kept.pop(micro, None)

    def close(self) -> None:
        """Let go of all rows, and of a connection that this source opened. Idempotent."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            self._seen.clear()
            if self._attached is not None:
                self._attached.close()
            self._batch = self._attached = None

    def __reduce__(self) -> tuple[object, ...]:
        return RoutingSource, (self.pointer, self.field_name, self.capacity_bytes, self.device)

    def _fetch(self, micro: MicroBatchRouting) -> Experts:
        batch = self.batch
        field = batch.run.field(self.field_name)
        num_experts = expert_rows.replayable(field)
        data = batch.fetch([self.field_name], micro.layer_ids, micro.rows)
        column = data[self.field_name]
        self.fetches += 1
        self.fetched_bytes += column.nbytes
        expert_rows.check(column.packed, num_experts, micro.layer_ids, f"field {field.name!r}")
        index = micro.layout.index(np.diff(column.offsets))
        return expert_rows.place(column.packed, index, num_experts)

    def _keep(self, micro: MicroBatchRouting, experts: Experts) -> None:
        if experts.nbytes > self.capacity_bytes:
            raise InvalidInput(
                f"a micro-batch of {experts.nbytes} bytes of routing: capacity_bytes is {self.capacity_bytes}"
            )
        while self.kept_bytes + experts.nbytes > self.capacity_bytes:
            self._kept.popitem(last=False)
        self._kept[micro] = experts

    def _count(self, micro: MicroBatchRouting, layer: int, stage: Stage) -> None:
        if stage != self._release_stage:
            return
        seen = self._seen.setdefault((micro, stage), set())
        seen.add(layer)
        if len(seen) == len(micro.layer_ids):
            del self._seen[micro, stage]
            if micro in self._kept:
                self._kept.move_to_end(micro, last=False)

    def _device(self) -> str | None:
        if self.device is None:
            import torch

            if torch.cuda.is_available():
                self.device = f"cuda:{torch.cuda.current_device()}"
        return self.device


@dataclass(frozen=True, slots=True)
class MicroBatchRouting:
    """The routing of some rows of a batch as one rank's routers see it. Made by ``RoutingSource``."""

    source: RoutingSource = declared(compare=False)
    rows: tuple[int, ...]
    layout: RankLayout
    layers: tuple[int, ...] | None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers."""
        if self.layers is not None:
            return self.layers
        return self.source.batch.run.field(self.source.field_name).layer_ids or ()

    @property
    def local_rows(self) -> int:
        """Rows that this rank's routers see, padding included; from metadata alone."""
        lengths = self.source.batch.table.column("num_tokens").to_numpy()
        return self.layout.rows(lengths[list(self.rows)])

    def place(self, layer: int) -> int:
        """Index of a global layer id; raises ``InvalidInput`` naming those there are."""
        if layer not in self.layer_ids:
            raise InvalidInput(f"layer {layer}: this micro-batch has layers {list(self.layer_ids)}")
        return self.layer_ids.index(layer)

    def experts(self) -> Experts:
        """``[local rows, layers, top-k]`` in the stored dtype."""
        return self.source.experts(self)

    def layer(self, layer: int) -> LayerRouting:
        """One layer's routing, fetched when it is materialised. Raises where there is no such layer."""
        self.place(layer)
        return LayerRouting(self, layer)

    def by_layer(self) -> Mapping[int, LayerRouting]:
        """All layers' routings by global id."""
        return {layer: LayerRouting(self, layer) for layer in self.layer_ids}

    def tensors(self, dtype: str = "int64") -> Mapping[int, torch.Tensor]:
        """All layers as tensors ``[local rows, top-k]`` by global id, made now."""
        return {layer: self.source.read_layer(self, layer, "forward", dtype) for layer in self.layer_ids}


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """One layer of a micro-batch, in place of its tensor; pickles to a reference.

    It answers both calls by which replay hooks turn what they kept into a tensor.
    """

    micro: MicroBatchRouting
    layer_id: int

    @property
    def shape(self) -> tuple[int, int]:
        """(local rows, top-k)."""
        topk = self.micro.source.batch.run.field(self.micro.source.field_name).shape[1]
        return self.micro.local_rows, topk

    def materialize_for_routing_replay(self, stage: Stage) -> torch.Tensor:
        """int32 ``[local rows, top-k]`` on the source's device, for a pass's forward or recomputation."""
        return self.micro.source.read_layer(self.micro, self.layer_id, stage, REPLAY_DTYPE)

    def to(self, device: object = None, dtype: object = None, non_blocking: bool = False) -> torch.Tensor:
        """As ``torch.Tensor.to``: int64, the dtype that a gather takes, unless another is asked for."""
        import torch

        made = self.micro.source.read_layer(self.micro, self.layer_id, "forward", "int64")
        target = device if isinstance(device, str | int | torch.device) else None
        wanted = dtype if isinstance(dtype, torch.dtype) else None
        return made.to(device=target, dtype=wanted, non_blocking=non_blocking)
