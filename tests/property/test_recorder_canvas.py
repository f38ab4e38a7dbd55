"""Whatever an engine appends, overwrites, trims and aborts: what is fetched is what a plain array says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import arrow_tq
from arrow_tq import Field, errors, fields
from arrow_tq.recorder import Recorder, Request
from arrow_tq.runs import Run
from arrow_tq_schemas.receipts import Receipt
from tests.drawing import drawn

ROUTED = fields.routed_experts(layer_ids=[0, 2, 5], topk=2, num_experts=300, layer_groups=[[0], [2, 5]])
FIELDS = [
    fields.token_ids(),
    ROUTED,
    Field("half", "bfloat16", (2,), domain="forwarded"),
    Field("seen", "bool", domain="forwarded"),
    Field("padded", "int32", (2,), domain="forwarded", pad=-1),
]
RECORDED = [field.name for field in FIELDS[1:]]
REQUESTS = 3
_names = count()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder, capacity_bytes=2 << 30) as store:
        yield store.run("recorded", fields=FIELDS)


class Canvas:
    """One field of one request, as a plain array; ``written`` is its end."""

    def __init__(self, field: Field, first: int) -> None:
        self.field, self.first, self.end = field, first, first
        self.values = np.zeros((4000, *field.shape), field.type.numpy)
        self.nulls = np.zeros(4000, bool)

    def put(self, start: int, rows: np.ndarray, nulls: np.ndarray) -> None:
        self.values[start : start + len(rows)] = rows
        self.nulls[start : start + len(rows)] = nulls
        self.end = max(self.end, start + len(rows))


def make(field: Field, rows: int, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As the engine shows them, as stored, and which are null."""
    shape, nulls = (rows, *field.shape), np.zeros(rows, bool)
    if field is ROUTED:
        shown = chance.integers(0, 300, shape, dtype=np.int32)
        nulls = chance.random(rows) < 0.05
        shown[nulls] = -1
        stored = shown.astype(np.uint16)
        stored[nulls] = 0
        return shown, stored, nulls
    if field.name == "half":
        bits = chance.integers(0, 1 << 16, shape, dtype=np.uint16)
        return bits, bits, nulls
    if field.name == "seen":
        shown = chance.random(shape) < 0.5
        return shown, shown.view(np.uint8), nulls
    shown = chance.integers(-1, 100, shape, dtype=np.int32)
    return shown, shown, nulls


@settings(max_examples=drawn(60), deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_recorded_rows_equal_the_canvas(run: Run, data: st.DataObject, seed: int) -> None:
    chance = np.random.default_rng(seed)
    window, chunk_rows = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 40))
    before = run.sql("SELECT count(*) AS n FROM chunks").column("n").to_pylist()[0]
    with Recorder(
        run, RECORDED, chunk_rows=chunk_rows, window_tokens=window, requests_max=REQUESTS
    ) as recorder:
        for _ in range(data.draw(st.integers(1, 2))):
            requests = [recorder.begin(f"r-{index}") for index in range(REQUESTS)]
            canvases: list[dict[str, Canvas]] = [{} for _ in requests]
            for _ in range(data.draw(st.integers(1, 12))):
                field = data.draw(st.sampled_from(FIELDS[1:]))
                append(data, recorder, requests, canvases, field, window, chance)
            for request, canvas in zip(requests, canvases, strict=True):
                end_request(data, run, request, canvas)
        recorder.flush()
        stats = recorder.stats()
    assert (stats.failed, stats.in_flight_bytes, stats.requests) == (0, 0, 0)
    after = run.sql("SELECT count(*) AS n FROM chunks").column("n").to_pylist()[0]
    assert after - before <= stats.chunks + 100


def append(
    data: st.DataObject,
    recorder: Recorder,
    requests: list[Request],
    canvases: list[dict[str, Canvas]],
    field: Field,
    window: int,
    chance: np.random.Generator,
) -> None:
    """One call for some of the requests; sometimes one that must be refused and change nothing."""
    chosen = data.draw(st.lists(st.integers(0, REQUESTS - 1), unique=True, min_size=1))
    starts, lengths = [], []
    for index in chosen:
        canvas = canvases[index].get(field.name)
        if canvas is None:
            start = data.draw(st.integers(0, 50))
            canvases[index][field.name] = Canvas(field, start)
        else:
            floor = max(canvas.first, canvas.end - window)
            start = data.draw(st.integers(floor, canvas.end))
        starts.append(start)
        lengths.append(data.draw(st.integers(0, 100)))
    shown, stored, nulls = make(field, sum(lengths), chance)
    known = canvases[chosen[-1]][field.name]
    if known.end > known.first and data.draw(st.booleans()):
        wrong = [*starts[:-1], known.end + 1]
        with pytest.raises(errors.InvalidInput, match="beyond the end"):
            recorder.append(field.name, [requests[index] for index in chosen], wrong, shown, lengths)
    recorder.append(field.name, [requests[index] for index in chosen], starts, shown, lengths)
    row = 0
    for index, start, length in zip(chosen, starts, lengths, strict=True):
        part = slice(row, row + length)
        canvases[index][field.name].put(start, stored[part], nulls[part])
        row += length
    # The caller's memory is its own again.
    shown[...] = 0


def end_request(data: st.DataObject, run: Run, request: Request, canvases: dict[str, Canvas]) -> None:
    if data.draw(st.integers(0, 3)) == 0:
        request.abort()
        return
    kept = {name: data.draw(st.integers(0, canvas.end)) for name, canvas in canvases.items()}
    receipts = request.finish(kept)
    assert receipts is not None
    assert set(receipts) == set(canvases)
    length = max([canvas.end for canvas in canvases.values()], default=0) + 2
    session = run.session(f"s-{next(_names)}")
    with session.step() as step:
        step.put("token_ids", np.arange(length), start=0)
        for name, receipt in receipts.items():
            canvas = canvases[name]
            text = receipt.to_json()
            assert Receipt.from_json(text) == receipt
            assert (receipt.start, receipt.end) == (canvas.first, max(canvas.first, kept[name]))
            step.attach(text)
            whole_field(step, canvas, max(canvas.first, kept[name]), length - 1)
    (segment,) = session.finalize()
    batch = run.claim(1, where=f"session_id = '{session.id}'")
    for name, canvas in canvases.items():
        first, end = canvas.first, max(canvas.first, kept[name])
        holes = first + np.flatnonzero(canvas.nulls[first:end]) if canvas.field.pad is None else []
        assert (name in segment.complete_fields) == (len(holes) == 0)
        if len(holes):
            with pytest.raises(errors.Hole, match=rf"{name}.*{holes[0]}"):
                batch.fetch(name)
        else:
            np.testing.assert_array_equal(batch.fetch(name)[name][0][first:end], canvas.values[first:end])
    batch.release()


def whole_field(step: arrow_tq.producer.step.Step, canvas: Canvas, end: int, length: int) -> None:
    """What lies around the recorded rows, so that the only holes are null rows."""
    for start, stop in ((0, canvas.first), (end, length)):
        if stop > start:
            step.put(
                canvas.field.name, np.zeros((stop - start, *canvas.field.shape), canvas.values.dtype), start
            )
