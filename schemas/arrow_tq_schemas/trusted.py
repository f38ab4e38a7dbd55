"""Models of values that their maker vouches for."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)
_NAMES: dict[type[BaseModel], set[str]] = {}
"""By model, its fields: one set for all that are made; only models that are frozen are."""


def trusted(kind: type[Model], values: dict[str, object]) -> Model:
    """``model_construct`` of *all* fields, without its walk through them: 0.5 us instead of 3 to 10.

    Args:
        kind: a model without private attributes.
        values: of every field, as validation would have left them; the dict is the model's from now on.
    """
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = set(kind.model_fields)
    made = kind.__new__(kind)
    put = object.__setattr__
    put(made, "__dict__", values)
    put(made, "__pydantic_fields_set__", names)
    put(made, "__pydantic_extra__", None)
    put(made, "__pydantic_private__", None)
    return made
