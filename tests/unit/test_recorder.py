"""The recorder of an engine, against a store in this process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.interface import Store
from arrow_tq.recorder import Recorder, RecorderStats
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import chunks_stored, wait_until
from arrow_tq_schemas.receipts import Receipt

LAYERS, TOPK = 4, 2
FIELDS = [
    fields.token_ids(),
    fields.logprobs(),
    fields.routed_experts(LAYERS, TOPK, layer_groups=[[0], [1, 2, 3]]),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        yield store


@pytest.fixture
def run(store: Store) -> Run:
    return store.run("demo", fields=FIELDS)


def routing(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, LAYERS, TOPK), dtype=np.int32)


def fetched(run: Run, tokens: int, *receipts: Receipt) -> np.ndarray:
    """What a trainer gets of the routing once a step attached these receipts."""
    session = run.session(f"s-{time.monotonic_ns()}")
    with session.step(sampled=(0, tokens)) as step:
        step.put("token_ids", np.arange(tokens), start=0)
        for receipt in receipts:
            step.attach(receipt.to_json())
    session.finalize()
    batch = run.claim(1, where=f"session_id = '{session.id}'")
    return batch.fetch("routed_experts")["routed_experts"][0]


def with_holes(run: Run, rows: np.ndarray) -> Receipt:
    with Recorder(run, ["routed_experts"], chunk_rows=8) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, rows)
        receipts = request.finish()
        assert receipts is not None
        return receipts["routed_experts"]


def test_rows_come_back_bit_by_bit_with_rejected_tokens_replaced(run: Run) -> None:
    expected = routing(100)
    with Recorder(run, ["routed_experts"], chunk_rows=16, window_tokens=8) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, expected[:50])
        for start in range(50, 99):
            draft = routing(5, seed=start)
            draft[0] = expected[start]
            request.append("routed_experts", start, draft)
        request.append("routed_experts", 99, expected[99:])
        receipts = request.finish(kept=100)
        assert receipts is not None
        np.testing.assert_array_equal(fetched(run, 101, receipts["routed_experts"]), expected)


def test_a_batch_of_requests_in_one_call(run: Run, store: Store) -> None:
    expected = [routing(40, seed) for seed in range(8)]
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4) as recorder:
        requests = [recorder.begin(f"r-{index}") for index in range(8)]
        lengths = [index + 1 for index in range(8)]
        prompts = np.concatenate([rows[:length] for rows, length in zip(expected, lengths, strict=True)])
        recorder.append("routed_experts", requests, [0] * 8, prompts, lengths)
        for offset in range(30):
            starts = np.array(lengths) + offset
            step = np.stack([rows[start] for rows, start in zip(expected, starts, strict=True)])
            recorder.append("routed_experts", requests, starts, step)
        for index, request in enumerate(requests):
            receipts = request.finish()
            assert receipts is not None
            end = lengths[index] + 30
            np.testing.assert_array_equal(
                fetched(run, end + 1, receipts["routed_experts"]), expected[index][:end]
            )
        stats = recorder.stats()
    assert stats.chunks == chunks_stored(store) - 8, "two layer groups, and the tokens of eight steps"
    assert (stats.requests, stats.in_flight_bytes, stats.failed) == (0, 0, 0)
    assert stats.bytes == sum(length + 30 for length in lengths) * LAYERS * TOPK


def test_a_batch_with_a_mistake_is_not_taken_and_names_the_request(run: Run) -> None:
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=2) as recorder:
        one, two = recorder.begin("one"), recorder.begin("two")
        recorder.append("routed_experts", [one, two], [0, 5], routing(12), [6, 6])
        with pytest.raises(errors.InvalidInput, match=r"'two'.*start 8 is below the window's floor 9"):
            recorder.append("routed_experts", [one, two], [6, 8], routing(2))
        with pytest.raises(errors.InvalidInput, match=r"request 'one'.*start 7 is beyond the end 6"):
            recorder.append("routed_experts", [one, two], [7, 11], routing(2))
        wrong = routing(2)
        wrong[1, 3, 1] = 256
        with pytest.raises(errors.ValueOutOfRange, match=r"value 256 at position 11, index \[3, 1\]"):
            recorder.append("routed_experts", [one, two], [6, 11], wrong)
        with pytest.raises(errors.RowCountMismatch, match="2 rows for lengths that add up to 3"):
            recorder.append("routed_experts", [one, two], [6, 11], routing(2), [1, 2])
        with pytest.raises(errors.InvalidInput, match="named twice"):
            recorder.append("routed_experts", [one, one], [6, 6], routing(2))
        with pytest.raises(errors.NotFound, match="'logprobs' is not recorded; routed_experts are"):
            one.append("logprobs", 0, [0.5])
        receipts = one.finish()
        assert receipts is not None
        assert receipts["routed_experts"].end == 6


def test_finish_trims_anywhere(run: Run, store: Store) -> None:
    expected = routing(100)
    with Recorder(run, ["routed_experts"], chunk_rows=16, window_tokens=4) as recorder:
        for kept in (100, 97, 96, 50, 48, 1, 0):
            request = recorder.begin(f"r-{kept}")
            request.append("routed_experts", 0, expected)
            with pytest.raises(errors.RowCountMismatch, match="rows end at 100, kept is 101"):
                request.finish(kept=101)
            receipts = request.finish(kept=kept)
            assert receipts is not None
            assert (receipts["routed_experts"].start, receipts["routed_experts"].rows) == (0, kept)
            np.testing.assert_array_equal(
                fetched(run, kept + 1, Receipt.from_json(receipts["routed_experts"].to_json())),
                expected[:kept],
            )
        recorder.flush()
    stored = run.sql("SELECT count(*) AS n FROM chunks").column("n").to_pylist()[0]
    wait_until(lambda: chunks_stored(store) == stored)


def test_kept_may_differ_by_field(run: Run) -> None:
    with Recorder(run, ["token_ids", "logprobs", "routed_experts"]) as recorder:
        request = recorder.begin("r")
        request.append("token_ids", 0, np.arange(12))
        request.append("logprobs", 4, np.arange(8, dtype=np.float32))
        request.append("routed_experts", 0, routing(11))
        with pytest.raises(errors.InvalidInput, match="kept names"):
            request.finish({"nope": 3})
        receipts = request.finish({"token_ids": 10, "logprobs": 10, "routed_experts": 9})
        assert receipts is not None
        ranges = {name: (one.start, one.end) for name, one in receipts.items()}
        assert ranges == {"token_ids": (0, 10), "logprobs": (4, 10), "routed_experts": (0, 9)}
        session = run.session("s")
        with session.step(sampled=(4, 10)) as step:
            for receipt in receipts.values():
                step.attach(receipt)
        (segment,) = session.finalize()
        assert segment.num_tokens == 10
        assert segment.complete_fields == ["token_ids", "logprobs", "routed_experts"]
        data = run.claim(1).fetch(["token_ids", "logprobs"])
        assert data["token_ids"][0].tolist() == list(range(10))
        assert data["logprobs"][0].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]


def test_a_receipt_of_256k_tokens_is_under_4_kb(tmp_path: Path) -> None:
    tokens = 1 << 18
    declared = [
        fields.token_ids(),
        fields.routed_experts(16, 8, layer_groups=[list(range(8)), list(range(8, 16))]),
    ]
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        run = store.run("long", fields=declared)
        rows = np.random.default_rng(0).integers(0, 256, (4096, 16, 8), dtype=np.uint8)
        with Recorder(run, ["routed_experts"], chunk_bytes=1 << 17) as recorder:
            request = recorder.begin("r")
            for start in range(0, tokens, len(rows)):
                request.append("routed_experts", start, rows)
            receipts = request.finish(kept=tokens - 1)
            assert receipts is not None
            receipt = receipts["routed_experts"]
            text = receipt.to_json()
            assert len(receipt.chunks) == 128
            assert len(text) < 4096, len(text)
            assert Receipt.from_json(text) == receipt
            assert Receipt.from_json(text.encode()) == receipt


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"count": 1 << 40}, "more than"),
        ({"count": -5}, "count -5"),
        ({"count": "9"}, "TypeError"),
        ({"count": 2, "valid": [[0, 1]]}, "without nulls"),
        ({"count": 2, "id": "zz"}, "chunk id 'zz'"),
        ({"count": 3}, "chunks end at 6"),
    ],
)
def test_a_receipt_with_a_wrong_count_is_refused(entry: dict[str, object], message: str) -> None:
    chunk = {"id": "0197a0b1c2d382a5955555555555555f", "start": 0, "rows": 2, "bytes": 2, **entry}
    text = json.dumps({"run": "r", "epoch": 0, "field": "f", "start": 0, "rows": 4, "chunks": [chunk]})
    with pytest.raises(errors.MalformedMessage, match=message):
        Receipt.from_json(text)


def test_null_rows_are_holes(run: Run) -> None:
    rows = routing(60)
    rows[[3, 17, 18, 40]] = -1
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, rows[:30])
        for start in range(30, 60):
            request.append("routed_experts", start, rows[start : start + 1])
        request.append("routed_experts", 59, routing(1))
        receipts = request.finish(kept=59)
        assert receipts is not None
    session = run.session("s")
    with session.step() as step:
        step.put("token_ids", np.arange(60), start=0)
        step.attach(json.loads(receipts["routed_experts"].to_json()))
    (segment,) = session.finalize()
    assert "routed_experts" not in segment.complete_fields
    with pytest.raises(errors.Hole, match=r"routed_experts.*3"):
        run.claim(1).fetch("routed_experts")
    session = run.session("t")
    with session.step() as step:
        step.put("token_ids", np.arange(60), start=0)
        step.put("routed_experts", routing(60), start=0)
        step.attach(with_holes(run, rows), overlay=True)
    assert "routed_experts" in session.finalize()[0].complete_fields


def test_abort_frees_what_was_written(run: Run, store: Store) -> None:
    with Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(100))
        recorder.flush()
        assert chunks_stored(store) == 2 * 12
        request.abort()
        request.abort()
        recorder.flush()
        assert chunks_stored(store) == 0
        with pytest.raises(errors.Conflict, match="append on request 'r': it is aborted"):
            request.append("routed_experts", 100, routing(1))
        with pytest.raises(errors.Conflict, match="finish on request 'r': it is aborted"):
            request.finish()


def test_closing_aborts_what_is_open(run: Run, store: Store) -> None:
    recorder = Recorder(run, ["routed_experts"], chunk_rows=8, window_tokens=4)
    request = recorder.begin("r")
    request.append("routed_experts", 0, routing(100))
    recorder.close()
    recorder.close()
    assert chunks_stored(store) == 0
    with pytest.raises(errors.Conflict, match="closed"):
        recorder.begin("s")


def test_prefill_and_decode_apart_serve_one_step(run: Run) -> None:
    expected = routing(40)
    with (
        Recorder(run, ["routed_experts"], chunk_rows=8) as prefill,
        Recorder(run, ["routed_experts"], chunk_rows=8) as decode,
    ):
        first, second, third = prefill.begin("r"), decode.begin("r"), decode.begin("r again")
        first.append("routed_experts", 0, expected[:25])
        second.append("routed_experts", 25, expected[25:])
        third.append("routed_experts", 24, expected[24:])
        receipts = [request.finish() for request in (first, second, third)]
        assert receipts[0] and receipts[1] and receipts[2]
        one, two, three = (part["routed_experts"] for part in receipts if part)
        np.testing.assert_array_equal(fetched(run, 41, one, two), expected)
        session = run.session("s")
        with (
            pytest.raises(errors.Conflict, match=r"routed_experts.*\[24, 40\) overlaps \[0, 25\)"),
            session.step() as step,
        ):
            step.attach(one)
            step.attach(three)
        assert run.sql("SELECT count(*) AS n FROM steps WHERE session_id = 's'").column(0).to_pylist() == [0]


def test_ranks_that_do_not_own_the_recording_do_nothing(run: Run, store: Store) -> None:
    with Recorder(None, ["routed_experts"], owner=False) as recorder:
        request = recorder.begin("r")
        request.append("routed_experts", 0, routing(20))
        recorder.append("routed_experts", [request], [20], routing(1))
        assert request.finish(kept=20) is None
        recorder.begin("s").abort()
        recorder.flush()
        assert recorder.stats() == RecorderStats()
        assert recorder.buffer_bytes == 0
    assert chunks_stored(store) == 0
    with pytest.raises(errors.InvalidInput, match="the owner rank needs a run"):
        Recorder(None, ["routed_experts"])


def test_requests_are_bounded(run: Run) -> None:
    with Recorder(run, ["routed_experts"], requests_max=2) as recorder:
        recorder.begin("a")
        b = recorder.begin("b")
        with pytest.raises(errors.Busy, match="requests_max=2 are open"):
            recorder.begin("c")
        b.abort()
        recorder.begin("c")
    with pytest.raises(errors.InvalidInput, match="chunk_rows=0"):
        Recorder(run, ["routed_experts"], chunk_rows=0)
    with pytest.raises(errors.NotFound, match="has no field 'nope'"):
        Recorder(run, ["nope"])


def test_importing_it_loads_no_framework() -> None:
    heavy = ("torch", "duckdb", "apsw", "sqlglot", "structlog", "pyarrow.flight", "starlette", "pandas")
    code = f"import sys, arrow_tq.recorder; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
