"""What one engine response holds, decoded, and how it gets onto a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq_schemas.chunks import to_array
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.receipts import Receipt

if TYPE_CHECKING:
    from arrow_tq.producer.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one field at consecutive absolute positions."""

    field: Field
    start: int
    """Position of row 0."""
    values: npt.NDArray[np.generic]
    """``[rows, *field.shape]`` in the field's storage dtype (log-probs: float32); null rows are zero."""
    valid: npt.NDArray[np.bool_] | None = None
    """``[rows]``; None: every row."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        return self.start + len(self.values)

    @property
    def array(self) -> npt.NDArray[np.generic] | pa.Array:
        """For ``step.put``: numpy, or pyarrow over the same memory where there are null rows."""
        if self.valid is None:
            return self.values
        kind = pa.from_numpy_dtype(self.values.dtype)
        if self.field.shape:
            kind = pa.fixed_shape_tensor(kind, list(self.field.shape))
        return to_array(self.values, self.valid, kind)

    def between(self, start: int, end: int) -> Rows:
        """The rows at positions ``[start, end)`` of these, views of them."""
        first, last = (min(max(edge - self.start, 0), len(self)) for edge in (start, end))
        valid = None if self.valid is None else self.valid[first:last]
        return Rows(self.field, self.start + first, self.values[first:last], valid)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Which weight version sampled the tokens at absolute positions ``[start, end)``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class EngineOutput:
    """One model call as its engine reported it. Fields that were not declared are None."""

    prompt_tokens: int
    """Length of the prompt: the position of the first completion token."""
    completion_tokens: int
    token_ids: Rows | None
    """``[completion]`` ids of the sampled tokens."""
    logprobs: Rows | None
    """``[completion]`` float32."""
    routed_experts: Rows | None
    """``[rows, layers, topk]``; None also where an abort came without."""
    indexer_topk: Rows | None
    """``[rows, layers, topk]`` positions within the request, -1 pads; None as above."""
    versions: tuple[VersionSpan, ...]
    """In order and without gaps over the completion; empty where the engine names none."""
    finish_reason: str | None
    """``stop``, ``length``, ``abort``, ...; None: unfinished."""

    @property
    def aborted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def sampled(self) -> tuple[int, int]:
        """Absolute range of the sampled tokens, for ``session.step(sampled=)``."""
        return self.prompt_tokens, self.prompt_tokens + self.completion_tokens

    @property
    def version(self) -> str | None:
        """The weight version, for ``session.step(version=)``; None where the engine names none.

        Raises:
            InvalidInput: several versions sampled this output; ``by_version`` gives each its part.
        """
        names = list(dict.fromkeys(span.version for span in self.versions))
        if len(names) > 1:
            raise InvalidInput(
                f"versions {names} sampled one output: a step has one version, so record each part of "
                "output.by_version() in a step of its own",
                versions=names,
            )
        return names[0] if names else None

    def by_version(self) -> list[EngineOutput]:
        """This output as one part a weight version, each the whole of one step; nothing is copied.

        A token's row of routing came with the sampling of the next token, so a part's last row belongs to
        the part after it.
        """
        parts: list[EngineOutput] = []
        for index, span in enumerate(self.versions):
            final = index + 1 == len(self.versions)
            first = 0 if index == 0 else span.start - 1
            last = self.sampled[1] if final else span.end - 1
            parts.append(
                replace(
                    self,
                    prompt_tokens=span.start,
                    completion_tokens=span.end - span.start,
                    token_ids=_between(self.token_ids, span.start, span.end),
                    logprobs=_between(self.logprobs, span.start, span.end),
                    routed_experts=_between(self.routed_experts, first, last),
                    indexer_topk=_between(self.indexer_topk, first, last),
                    versions=(span,),
                    finish_reason=self.finish_reason if final else None,
                )
            )
        return parts or [self]

    def rows(self) -> Iterator[Rows]:
        """Rows of every field that is there."""
        found = (self.token_ids, self.logprobs, self.routed_experts, self.indexer_topk)
        return (rows for rows in found if rows is not None)


def _between(rows: Rows | None, start: int, end: int) -> Rows | None:
    return None if rows is None else rows.between(start, end)


def record(step: Step, output: EngineOutput) -> list[Receipt]:
    """Put an output's rows on a step, each field under its declared name; empty ones are left out.

    The step is made by the caller, with ``version=output.version`` and ``sampled=output.sampled``; the
    prompt's token ids are the caller's too.

    Raises:
        InvalidInput: several weight versions sampled the output.
        InvalidField, ValueOutOfRange, StoreFull: as ``step.put``.
    """
    _ = output.version
    return [step.put(rows.field.name, rows.array, start=rows.start) for rows in output.rows() if len(rows)]
