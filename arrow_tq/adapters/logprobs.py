"""Token ids and log-probs of a completion, from the lists that engines send them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_tq.adapters.message import Message, kind
from arrow_tq_schemas.errors import MalformedMessage, ValueOutOfRange
from arrow_tq_schemas.fields import Field

Column = Sequence[object]
_ID_MAX = (1 << 31) - 1


def columns(entries: Sequence[Any], place: str) -> tuple[Column, Column]:
    """SGLang's list of (logprob, token id, text or None), as two columns: log-probs and ids."""
    if not entries:
        return (), ()
    try:
        logprobs, ids, *_ = zip(*entries, strict=True)
    except (TypeError, ValueError):
        odd = (n for n, entry in enumerate(entries) if not isinstance(entry, list | tuple) or len(entry) != 3)
        number = next(odd, 0)
        raise MalformedMessage(
            f"{place}[{number}]: expected (logprob, token id, text), got {kind(entries[number])}"
        ) from None
    return logprobs, ids


def openai_column(choice: Message) -> Column | None:
    """Log-probs of an OpenAI-like choice: chat's ``content``, or the older ``token_logprobs``."""
    logprobs = choice.child("logprobs")
    if logprobs is None:
        return None
    content = logprobs.items("content")
    if content is None:
        return logprobs.items("token_logprobs")
    if not all(isinstance(entry, Mapping) and "logprob" in entry for entry in content):
        raise MalformedMessage(f"{logprobs.where('content')}: expected objects with a logprob")
    return list(map(itemgetter("logprob"), content))  # type: ignore[arg-type]


def float32(column: Column, place: str, start: int) -> npt.NDArray[np.float32]:
    """``[completion]`` log-probs.

    Args:
        column: numbers.
        place: where they were, for messages.
        start: position of the first token, for messages.

    Raises:
        MalformedMessage: no numbers.
        ValueOutOfRange: not finite, or above 0; names the position.
    """
    values = _array(column, place, "fi", "log-probs")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    # Rounding may leave a certain token's a little above zero.
    bad = ~np.isfinite(single) | (single > 1e-3)
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueOutOfRange(
            f"{place}: log-prob {values[index].item()!r} at position {start + index}: expected a finite "
            "number up to 0",
            value=repr(values[index].item()),
            position=start + index,
        )
    return single


def token_ids(column: Column, field: Field | None, place: str, start: int) -> npt.NDArray[np.generic]:
    """``[completion]`` token ids in the field's dtype (int32 without one).

    Raises:
        MalformedMessage: no integers.
        ValueOutOfRange: negative, or past the dtype; names the position.
    """
    values = _array(column, place, "iu", "token ids")
    high = _ID_MAX
    dtype: np.dtype[np.generic] = np.dtype(np.int32)
    if field is not None:
        dtype = field.type.numpy
        high = min(high, (field.type.integer_range or (0, high))[1])
    bad = (values < 0) | (values > high)
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueOutOfRange(
            f"{place}: token id {values[index].item()!r} at position {start + index}: expected 0 to {high}",
            value=repr(values[index].item()),
            position=start + index,
        )
    return values.astype(dtype)


def _array(column: Column, place: str, kinds: str, what: str) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = np.asarray(column)
    except (ValueError, TypeError, OverflowError) as error:
        raise MalformedMessage(f"{place}: {what} that are no list of numbers: {error}") from None
    if not values.size and values.ndim == 1:
        return values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in kinds:
        missing = next((index for index, value in enumerate(column) if value is None), None)
        found = f"None at number {missing}" if missing is not None else f"{values.dtype}"
        raise MalformedMessage(f"{place}: expected a list of {what}, got {found}")
    return values
