"""Errors keep what they are, over the wire and through pickle; the drawn tree is the real one."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from arrow_tq_schemas import errors
from arrow_tq_schemas.errors import ArrowTQError, InternalError, error_types, from_wire

ALL = sorted(error_types().values(), key=lambda kind: kind.__name__)


def drawn() -> dict[str, tuple[str | None, str | None, str | None, bool]]:
    """The docstring's tree: class to (parent, built-in base, code, retryable)."""
    found: dict[str, tuple[str | None, str | None, str | None, bool]] = {}
    above: list[str] = []
    line = re.compile(
        r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>\w+)(?: \((?P<base>\w+)\))?"
        r"(?: +(?P<code>[a-z-]+))?(?P<retry> +\(retryable\))?$"
    )
    for text in (errors.__doc__ or "").splitlines():
        match = line.match(text)
        if match is None:
            continue
        depth = len(match["branch"]) // 4
        del above[depth:]
        found[match["name"]] = (
            above[-1] if above else None,
            match["base"],
            match["code"],
            bool(match["retry"]),
        )
        above.append(match["name"])
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {}
    for kind in ALL:
        ours = [base.__name__ for base in kind.__bases__ if issubclass(base, ArrowTQError)]
        builtin = [base.__name__ for base in kind.__bases__ if not issubclass(base, ArrowTQError)]
        root = kind is ArrowTQError
        real[kind.__name__] = (
            ours[0] if ours else None,
            builtin[0] if builtin and not root else None,
            None if root else kind.code,
            kind.retryable,
        )
    assert drawn() == real


def test_codes_are_distinct_and_declared_by_each_class() -> None:
    for kind in ALL:
        assert "code" in vars(kind), kind
    assert len({kind.code for kind in ALL}) == len(ALL) == len(drawn())


@pytest.mark.parametrize("kind", ALL)
def test_type_code_and_details_survive_wire_and_pickle(kind: type[ArrowTQError]) -> None:
    error = kind("segment 's-17': ünreadable", position=3, ids=["a", "b"], message="shadowed", self=None)
    wire = json.loads(json.dumps(error.to_wire()))
    for copy in (from_wire(wire), pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert (copy.code, copy.retryable) == (error.code, error.retryable)
        assert (copy.message, copy.details) == (error.message, error.details)
        assert str(copy) == "segment 's-17': ünreadable"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.Misaligned, ValueError),
        (errors.ChunkLost, KeyError),
        (errors.ChunkPending, TimeoutError),
    ],
)
def test_errors_are_also_the_builtin_ones(kind: type[ArrowTQError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match=r"^one sentence$"):
        raise kind("one sentence")


def test_what_nobody_knows_is_internal() -> None:
    for wire in ({}, {"code": "from-the-future", "message": "m", "details": [1]}, {"code": ["busy"]}):
        error = from_wire(wire)
        assert type(error) is InternalError
        assert error.details == {}
