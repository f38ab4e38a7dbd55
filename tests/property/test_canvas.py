"""Any chain of steps, read back, equals a plain array that the same puts were made to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field as slot
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from tests.drawing import drawn

TOKENS_MAX = 40
FIELDS = [
    fields.token_ids(),
    Field("last", "float32", domain="forwarded", fill=-1.0),
    Field("first", "int16", (3,), overlay="first", fill=9),
    fields.routed_experts(layer_ids=[0, 2, 5], topk=2, num_experts=300, layer_groups=[[0], [2, 5]]),
    Field("seen", "bool", domain="sampled", fill=True),
    Field("padded", "int32", (2,), domain="forwarded", pad=-1),
]
_names = count()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder, capacity_bytes=2 << 30) as store:
        yield _declare(store)


def _declare(store: Store) -> Run:
    return store.run("canvas", fields=FIELDS)


@dataclass
class Canvas:
    """The expected values of one field: ``written`` tells holes from values."""

    declared: Field
    values: npt.NDArray[np.generic]
    written: npt.NDArray[np.bool_]

    @classmethod
    def blank(cls, declared: Field) -> Canvas:
        shape = (TOKENS_MAX, *declared.shape)
        return cls(declared, np.zeros(shape, declared.type.numpy), np.zeros(TOKENS_MAX, bool))

    def put(self, start: int, rows: npt.NDArray[np.generic], valid: npt.NDArray[np.bool_]) -> None:
        for offset in range(len(rows)):
            place = start + offset
            if valid[offset] and not (self.declared.overlay == "first" and self.written[place]):
                self.values[place] = rows[offset]
                self.written[place] = True


@dataclass
class Puts:
    """One step's puts: (field, start, rows)."""

    sampled: tuple[int, int] | None
    tokens: tuple[int, int]
    others: list[tuple[int, int, int]] = slot(default_factory=list)


@st.composite
def chains(draw: st.DrawFn) -> list[Puts]:
    """Steps whose tokens only ever grow or repeat; other fields go anywhere below their end."""
    steps, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, end))
        end = max(end, draw(st.integers(start + 1, TOKENS_MAX)))
        sampled = draw(st.none() | st.tuples(st.integers(0, end), st.integers(0, end)).map(sorted).map(tuple))
        others = []
        for index in range(1, len(FIELDS)):
            if draw(st.booleans()):
                first = draw(st.integers(0, end))
                others.append((index, first, draw(st.integers(0, end - first))))
        # A step's fields of domain "all" end together.
        others = [(index, first, end - first if index == 2 else rows) for index, first, rows in others]
        steps.append(Puts(sampled, (start, end), others))
    return steps


@settings(max_examples=drawn(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chains(), st.integers(0, 2**32 - 1))
def test_fetch_equals_the_canvas(run: Run, steps: list[Puts], seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1000, TOKENS_MAX, dtype=np.int32)
    canvases = [Canvas.blank(declared) for declared in FIELDS]
    session = run.session(f"s-{next(_names)}")
    sampled = np.zeros(TOKENS_MAX, bool)
    for puts in steps:
        with session.step(sampled=puts.sampled) as step:
            start, end = puts.tokens
            step.put("token_ids", tokens[start:end], start=start)
            canvases[0].put(start, tokens[start:end], np.ones(end - start, bool))
            for index, first, count_ in puts.others:
                rows, shown, valid = _rows(FIELDS[index], count_, random)
                step.put(FIELDS[index].name, shown, start=first)
                canvases[index].put(first, rows, valid)
        if puts.sampled:
            sampled[slice(*puts.sampled)] = True
    (segment,) = session.finalize()
    total = max(puts.tokens[1] for puts in steps)
    total = max([total, *(first + rows for puts in steps for i, first, rows in puts.others if i == 4)])
    assert segment.num_tokens == total
    batch = run.claim(1, where=f"session_id = '{session.id}'")
    for canvas in canvases:
        _check(batch, canvas, total, sampled, segment.complete_fields)
    batch.release()


def _rows(
    declared: Field, count_: int, random: np.random.Generator
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """Values as stored, as the caller shows them, and which of them are not null."""
    shape = (count_, *declared.shape)
    valid = np.ones(count_, bool)
    if declared.num_experts:
        shown = random.integers(0, declared.num_experts, shape).astype(np.int64)
        valid = random.random(count_) < 0.8
        shown[~valid] = -1
        return shown.astype(np.uint16), shown, valid
    if declared.dtype == "float32":
        shown = random.standard_normal(shape).astype(np.float32)
    elif declared.dtype == "bool":
        shown = random.random(shape) < 0.5
        return shown.view(np.uint8), shown, valid
    else:
        shown = random.integers(-1, 100, shape).astype(declared.type.numpy)
    return shown, shown, valid


def _check(
    batch: arrow_tq.trainer.batch.Batch,
    canvas: Canvas,
    total: int,
    sampled: npt.NDArray[np.bool_],
    complete: list[str],
) -> None:
    declared = canvas.declared
    inside = np.arange(TOKENS_MAX) < (total - 1 if declared.domain == "forwarded" else total)
    if declared.domain == "sampled":
        inside &= sampled
    rows = total - 1 if declared.domain == "forwarded" else total
    holes = np.flatnonzero(inside & ~canvas.written)
    assert (declared.name in complete) == (len(holes) == 0)
    if len(holes):
        with pytest.raises(errors.Hole, match=f"{declared.name}.*{holes[0]}"):
            batch.fetch(declared.name)
        return
    expected = canvas.values.copy()
    expected[~inside] = declared.fill_value
    np.testing.assert_array_equal(batch.fetch(declared.name)[declared.name][0], expected[:rows])
