"""Which weight version sampled each token of a fetch: codes a token, without Python a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field as slot

import numpy as np
import numpy.typing as npt

from arrow_tq_schemas.errors import MalformedMessage
from arrow_tq_schemas.manifests import Manifest

UNKNOWN = -1
"""Code of a token that was not sampled, or whose version nobody said."""


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """Weight versions of several segments. ``versions[i]`` is segment i's ``[T]`` int32 of codes.

    Attributes:
        names: the versions; a token's code is its version's place here, ``UNKNOWN`` (-1) for none.
        offsets: ``[segments + 1]`` int64, where each segment's T tokens begin in ``packed``.
        runs: ``[runs, 3]`` int64, packed start, end and code of neighbours of one version, ascending.
    """

    names: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    _packed: list[npt.NDArray[np.int32]] = slot(default_factory=list, repr=False)

    @classmethod
    def of(cls, manifests: Sequence[Manifest], offsets: npt.NDArray[np.int64]) -> Versions:
        """From what manifests say; raises ``MalformedMessage`` for ranges that do not fit their segment."""
        codes: dict[str, int] = {}
        runs: list[tuple[int, int, int]] = []
        for manifest, offset in zip(manifests, offsets.tolist(), strict=False):
            last = 0
            for start, end, name in manifest.versions:
                if not last <= start < end <= manifest.num_tokens:
                    raise MalformedMessage(
                        f"segment {manifest.segment_id!r}: versions of [{start}, {end}) after {last}, of "
                        f"{manifest.num_tokens} tokens"
                    )
                last = end
                runs.append((offset + start, offset + end, codes.setdefault(name, len(codes))))
        return cls(tuple(codes), offsets, np.array(runs, np.int64).reshape(-1, 3))

    @property
    def packed(self) -> npt.NDArray[np.int32]:
        """``[sum of T]`` codes, segment after segment. Made when it is first asked for."""
        if not self._packed:
            starts, ends, codes = self.runs.T
            # What lies between two runs is a run of its own, of no version.
            lengths = np.empty(2 * len(codes) + 1, np.int64)
            lengths[1::2] = ends - starts
            lengths[0::2] = np.append(starts, self.offsets[-1]) - np.concatenate([[0], ends])
            values = np.full(len(lengths), UNKNOWN, np.int32)
            values[1::2] = codes
            self._packed.append(np.repeat(values, lengths))
        return self._packed[0]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.int32]:
        """Segment ``index``'s codes, a view of ``packed``."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        index %= len(self)
        return self.packed[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        return (self[index] for index in range(len(self)))

    def ranges(self, index: int) -> list[tuple[int, int, str]]:
        """Segment ``index``'s versions run by run: start and end in the segment, and the version."""
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        first, end = self.offsets[index : index + 2]
        starts = self.runs[:, 0]
        own = self.runs[np.searchsorted(starts, first) : np.searchsorted(starts, end)]
        return [(start, stop, self.names[code]) for start, stop, code in (own - [first, first, 0]).tolist()]
