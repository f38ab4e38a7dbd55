"""Models of values that their maker vouches for."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def trusted(kind: type[Model], values: dict[str, object]) -> Model:
    """``model_construct`` of all fields, without its walk through them: 0.5 us instead of 3."""
    made = kind.__new__(kind)
    put = object.__setattr__
    put(made, "__dict__", values)
    put(made, "__pydantic_fields_set__", set(values))
    put(made, "__pydantic_extra__", None)
    put(made, "__pydantic_private__", None)
    return made
