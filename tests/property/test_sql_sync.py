"""Whatever was written before a query is in its answer, once, with its newest values and column types."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from arrow_tq.sql import SqlLimits, SqlService
from arrow_tq.testing.metadata import MemoryMetadata
from tests.drawing import drawn

Source = tuple[MemoryMetadata, SqlService]
RUNS = ("a", "b")
numbers = itertools.count()
values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=2),
    st.none(),
)
writes = st.lists(st.tuples(st.sampled_from(RUNS), st.integers(0, 4), values), max_size=4)


@pytest.fixture(scope="module")
def store() -> Iterator[Source]:
    source = MemoryMetadata()
    service = SqlService(source, SqlLimits(scopes_max=3, memory_bytes=256 << 20))
    yield source, service
    service.close()


def kind_of(seen: list[object]) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "text"}
    kinds = {names.get(type(value), "json") for value in seen if value is not None}
    if kinds == {"int", "float"}:
        return "float"
    return kinds.pop() if len(kinds) == 1 else "json" if kinds else "text"


def shown(value: object, kind: str) -> object:
    """The value as a column of that kind shows it; a JSON value by what its text says."""
    if value is None or kind != "json":
        return float(value) if kind == "float" and isinstance(value, int) else value
    return ("json", value)


@settings(max_examples=drawn(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(writes, min_size=1, max_size=4))
def test_answers_are_never_stale(store: Source, rounds: list[list[tuple[str, int, object]]]) -> None:
    source, service = store
    example = next(numbers)
    newest: dict[tuple[str, int], object] = {}
    seen: dict[str, list[object]] = {run: [] for run in RUNS}
    for writes in rounds:
        for run, row, value in writes:
            name, key = f"{run}{example}", (example * 2 + RUNS.index(run)) * 8 + row
            source.put("segments", key, run=name, segment_id=str(row), columns={"v": value})
            newest[run, row] = value
            seen[run].append(value)
            source.declare("segments", name, v=kind_of(seen[run]))
        for run in RUNS:
            expected = {str(row): value for (owner, row), value in newest.items() if owner == run}
            if not expected:
                continue
            answer = service.query("SELECT segment_id, v FROM segments", f"{run}{example}").to_pydict()
            kind = kind_of(seen[run])
            found = [
                ("json", json.loads(value)) if kind == "json" and value is not None else value
                for value in answer["v"]
            ]
            assert len(answer["segment_id"]) == len(expected)
            assert dict(zip(answer["segment_id"], found, strict=True)) == {
                row: shown(value, kind) for row, value in expected.items()
            }
