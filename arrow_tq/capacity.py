"""How large a batch of trajectories is: the formula of routing replay, in parts.

Routing bytes = context x layers x topk x bytes of an id x batch x samples x segments a trajectory. Beside
it a token carries its log-prob, its id, its part of the messages, masks and versions; indexer top-k, where
it is recorded, is another ``layers x topk x 4`` bytes.

Two accounts are kept apart. *As objects* is what the samples take as Python objects on their way through a
proxy, a rollout manager and an object store, once each time they are held: the published analysis of such a
path (75 MoE layers, top-8, int32) gives routing 92.4 %, log-probs 2.3 %, token ids 2.1 %, messages 2.3 % and
the rest 0.9 %, from which the bytes a token below follow. *Stored here* is what this store writes for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from arrow_tq_schemas import dtypes
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.handles import WORDS

HANDLE_BYTES = WORDS * 4
OBJECT_BYTES = {"logprobs": 60, "token_ids": 54, "messages": 60, "others": 24}
"""Bytes a token of what is not routing, as Python objects: the published shares of 2,400 bytes of routing."""
STORED_BYTES = {"logprobs": 4, "token_ids": 4, "messages": 4, "others": 0}
"""The same in this store: float32, int32, about four characters of text a token; masks and versions are
derived from the steps' ranges."""
INDEXER_ID_BYTES = 4
ID_DTYPES = ("uint8", "uint16", "int32")


@dataclass(frozen=True, slots=True)
class Indexer:
    """A sparse-attention indexer whose choices are recorded: layers that have one, positions each chooses."""

    layers: int
    topk: int

    @property
    def token_bytes(self) -> int:
        return self.layers * self.topk * INDEXER_ID_BYTES


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch of full-length trajectories.

    Args:
        layers: MoE layers whose routing is recorded.
        topk: experts a token and layer.
        context: tokens of one segment.
        batch: prompts.
        samples: trajectories a prompt.
        dtype: of one expert id.
        segments_per_trajectory: near-full segments that one trajectory leaves, on average.
        shards: servers over which the payload is spread evenly.
        indexer: recorded beside the routing, if it is.

    Raises:
        InvalidInput: a value that is not above zero, or a dtype that ids do not have.
    """

    layers: int
    topk: int
    context: int
    batch: int
    samples: int
    dtype: str = "int32"
    segments_per_trajectory: float = 1.0
    shards: int = 1
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "topk", "context", "batch", "samples", "segments_per_trajectory", "shards"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} {getattr(self, name)}: expected more than 0")
        if self.dtype not in ID_DTYPES:
            raise InvalidInput(f"dtype {self.dtype!r}: expected one of {', '.join(ID_DTYPES)}")

    @property
    def trajectories(self) -> int:
        return self.batch * self.samples

    @property
    def tokens(self) -> float:
        """Of the whole batch."""
        return self.context * self.trajectories * self.segments_per_trajectory

    @property
    def routing_token_bytes(self) -> int:
        """Routing of one token."""
        return self.layers * self.topk * dtypes.dtype(self.dtype).numpy.itemsize

    @property
    def routing_bytes(self) -> float:
        """Routing of the whole batch."""
        return self.tokens * self.routing_token_bytes

    @property
    def local_routing_bytes(self) -> float:
        """Routing that one of the shards holds."""
        return self.routing_bytes / self.shards

    def parts(self) -> list[Part]:
        """What a token carries, the largest first."""
        routing = self.routing_token_bytes
        sizes = {"routed_experts": (routing, routing)}
        if self.indexer is not None:
            sizes["indexer_topk"] = (self.indexer.token_bytes, self.indexer.token_bytes)
        sizes |= {name: (size, STORED_BYTES[name]) for name, size in OBJECT_BYTES.items()}
        whole = sum(objects for objects, _ in sizes.values())
        parts = [
            Part(name, objects, stored, objects / whole, objects * self.tokens, stored * self.tokens)
            for name, (objects, stored) in sizes.items()
        ]
        return sorted(parts, key=lambda part: -part.object_token_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of data. ``share`` is its part of a token as objects, 0 to 1; ``*_bytes`` are of the batch."""

    name: str
    object_token_bytes: int
    stored_token_bytes: int
    share: float
    object_bytes: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How one workload's routing relates to another's."""

    total: float
    """Of all shards together."""
    local: float
    """Of one shard."""

    @classmethod
    def between(cls, before: Workload, after: Workload) -> Growth:
        return cls(
            after.routing_bytes / before.routing_bytes,
            after.local_routing_bytes / before.local_routing_bytes,
        )


def parse_count(text: str) -> int:
    """``256K``, ``1M`` or ``512``: binary multiples, as context lengths are counted.

    Raises:
        InvalidInput: anything else.
    """
    units = {"K": 1 << 10, "M": 1 << 20}
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    if not digits.isascii() or not digits.isdigit() or not int(digits):
        raise InvalidInput(f"{text!r}: expected a count such as 512, 256K or 1M")
    return int(digits) * units.get(unit, 1)
