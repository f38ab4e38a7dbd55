"""Torch tensors over fetched arrays, and datasets for DataLoader workers.

The only module of the library that imports torch; nothing imports it before it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from arrow_tq_schemas.errors import InvalidField, InvalidInput, MalformedMessage
from arrow_tq_schemas.fields import Field

if TYPE_CHECKING:
    from arrow_tq.interface import Store
    from arrow_tq.trainer.packing import PlanPolicy

Array = npt.NDArray[np.generic]
URL_SCHEMES = ("grpc://", "grpc+tls://", "grpc+unix://")


def from_storage(values: Array, dtype: str, wanted: str | None = None) -> torch.Tensor:
    """A CPU tensor of ``values`` (any shape), whose logical dtype is ``dtype``.

    Args:
        values: storage array; shared with the tensor where no conversion is needed.
        dtype: logical dtype, such as ``bfloat16`` for uint16 bits.
        wanted: torch dtype by name; None keeps the logical dtype (uint16 and uint32, which torch hardly
            computes with, become int32 and int64).

    Raises:
        InvalidField: torch has no dtype called ``wanted``.
    """
    target = _dtype(wanted)
    if not values.flags.writeable:
        # torch would warn, and writes through the tensor would reach read-only memory.
        values = values.copy()
    if dtype == "bfloat16" and values.dtype == np.uint16:
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    elif dtype == "bool" and values.dtype == np.uint8:
        tensor = torch.from_numpy(values.view(np.bool_))
    elif values.dtype == np.uint16:
        tensor = torch.from_numpy(values.astype(np.int32))
    elif values.dtype in (np.uint32, np.uint64):
        tensor = torch.from_numpy(values.astype(np.int64))
    else:
        tensor = torch.from_numpy(values)
    return tensor if target is None else tensor.to(target)


def to_device(values: Array, dtype: str, wanted: str | None, device: object) -> torch.Tensor:
    """As ``from_storage``, on a device. To CUDA the stored bytes go from pinned memory, without blocking.

    They are widened there, so that a uint8 id crosses the bus as one byte. uint16 crosses as int16 bits and
    is made int32 by a mask: torch computes with no uint16. Work queued on the same stream sees the values;
    the pinned copy lives until the transfer has ended.
    """
    place = torch.device(device)
    if place.type != "cuda" or values.dtype in (np.uint32, np.uint64):
        return from_storage(values, dtype, wanted).to(place)
    target = _dtype(wanted)
    bits = values.view(np.int16) if values.dtype == np.uint16 else values
    staged = pinned(bits.shape, torch.from_numpy(np.empty(0, bits.dtype)).dtype)
    np.copyto(staged.numpy(), bits)
    there = staged.to(place, non_blocking=True)
    if dtype == "bfloat16" and values.dtype == np.uint16:
        there = there.view(torch.bfloat16)
    elif dtype == "bool" and values.dtype == np.uint8:
        there = there.view(torch.bool)
    elif values.dtype == np.uint16:
        there = there.to(torch.int32) & 0xFFFF
    return there if target is None else there.to(target)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, page-locked where there is a GPU: a good ``out=`` for a fetch."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())


def as_buffer(field: Field, tensor: Any) -> Array:
    """The numpy view of a CPU tensor that a fetch of ``field`` may fill; bfloat16 and bool as their bits.

    Raises:
        InvalidField: it is on another device, or not dense.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidField(
            f"out[{field.name!r}]: expected a contiguous CPU tensor (pinned if you like), got one on "
            f"{tensor.device} with strides {tensor.stride()}"
        )
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        if field.dtype != "bfloat16":
            raise InvalidField(f"out[{field.name!r}]: {field.dtype} does not fit bfloat16 without loss")
        return bits
    values: Array = tensor.numpy()
    return values.view(np.uint8) if values.dtype == np.bool_ and field.dtype == "bool" else values


@dataclass(frozen=True, slots=True)
class Source:
    """Where DataLoader workers find a batch: everything in it travels to a worker, under 1 KB.

    Args:
        url: ``grpc://host:port`` of the server. Workers are processes: they cannot share a store that was
            opened in one.
        run: the run's name.
        ref: the batch's ``ref``.
        rank, world: as which rank this process attached; its workers attach as the same one.
        token: bearer token, if the server wants one.
    """

    url: str
    run: str
    ref: str
    rank: int
    world: int
    token: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(URL_SCHEMES):
            raise InvalidInput(
                f"source {self.url!r}: DataLoader workers connect to a server, expected a URL of "
                f"{', '.join(URL_SCHEMES)}"
            )


class PlannedMicros(IterableDataset[dict[str, object]]):  # type: ignore[misc]
    """A rank's planned micro-batches as a torch dataset: ``DataLoader(dataset, batch_size=None, ...)``.

    Each worker process (forked or spawned) connects and attaches by itself, computes the same plan, and
    takes every n-th micro-batch; the loader puts them together in the plan's order. An item is a dict:
    each field as a packed tensor ``[tokens, *item]``, ``cu_seqlens`` ``[segments + 1]`` int64,
    ``segment_ids``, ``index`` (in the plan) and ``padding``. The dataset does not release the batch.

    Args:
        source: where the batch is.
        fields: names of the run's fields.
        max_tokens, seed, policy: as for ``batch.plan``.
        plan_rank, plan_world: of the data-parallel group; the source's when left out.
        layers: global layer ids, in the order wanted; None for all.
        dtypes: torch dtype by field, such as ``{"routed_experts": "int32"}``; the stored one when left out.
    """

    def __init__(
        self,
        source: Source,
        fields: Sequence[str],
        max_tokens: int,
        seed: int | None = None,
        policy: PlanPolicy | None = None,
        plan_rank: int | None = None,
        plan_world: int | None = None,
        layers: Sequence[int] | None = None,
        dtypes: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._source = source
        self._fields = list(fields)
        self._plan = (max_tokens, seed, None, plan_rank, plan_world, policy)
        self._layers = None if layers is None else list(layers)
        self._dtypes = dict(dtypes or {})

    def __iter__(self) -> Iterator[dict[str, object]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with self._connect() as store:
            source = self._source
            batch = store.run(source.run).attach(source.ref, source.rank, source.world)
            for micro in batch.plan(*self._plan)[number::count]:
                data = micro.fetch(self._fields, self._layers)
                item: dict[str, object] = {
                    name: data.tensor(name, self._dtypes.get(name)) for name in self._fields
                }
                item["cu_seqlens"] = torch.from_numpy(data.offsets)
                item["segment_ids"] = list(data.origin.segment_ids)
                item["index"], item["padding"] = micro.index, micro.padding
                micro.close()
                yield item

    def _connect(self) -> Store:
        import arrow_tq

        return arrow_tq.connect(self._source.url, self._source.token)


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        raise InvalidField(f"dtype {name!r}: torch has none of that name")
    return found


def check_plain(value: object) -> torch.Tensor:
    """A tensor that is its values and nothing more.

    Raises:
        InvalidInput: it is on another device, sparse, quantized, needs a gradient, or is a lazy view
            (conjugated or negated).
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidInput(f"a {type(value).__name__}: expected a tensor")
    if value.device.type != "cpu":
        raise InvalidInput(f"a tensor on {value.device}: move it to the CPU first")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise InvalidInput(f"a tensor of layout {value.layout}: expected a plain strided one")
    if value.requires_grad:
        raise InvalidInput("a tensor that requires a gradient: detach it first")
    return value.resolve_conj().resolve_neg()


def to_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A plain tensor's values in C order, any dtype: a view where it is contiguous."""
    if not tensor.numel():
        # numpy's empty arrays have strides that torch cannot view as bytes.
        return np.empty(0, np.uint8)
    flat: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def from_bytes(memory: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over ``memory`` (writable, kept alive by it).

    Raises:
        MalformedMessage: torch has no dtype called that, or the bytes do not fit the shape.
    """
    kind = _named(dtype)
    try:
        if not memory.size:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(memory, dtype=kind).reshape(shape)
    except (RuntimeError, ValueError) as error:
        raise MalformedMessage(f"tensor of {dtype} {list(shape)}: {error}") from None


def item_bytes(dtype: str) -> int:
    """Bytes of one value of a torch dtype."""
    return int(_named(dtype).itemsize)


def _named(name: str) -> torch.dtype:
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise MalformedMessage(f"tensor dtype {name!r}: torch has none of that name")
    return kind
