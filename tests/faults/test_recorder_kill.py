"""SIGKILL of an engine in the middle of its requests: nothing half visible, nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.recorder import Recorder
from arrow_tq.testing.scenes import chunks_stored, wait_until
from tests.serving import Server
from tests.warm import WarmProcess

LAYERS, TOPK = 4, 2
FIELDS = [fields.token_ids(), fields.routed_experts(LAYERS, TOPK)]
ENGINE = """
import json, sys, time
import numpy as np
import arrow_tq
from arrow_tq.recorder import Recorder

run = arrow_tq.connect(sys.argv[1]).run("demo")
recorder = Recorder(run, ["routed_experts"], chunk_rows=64, window_tokens=8)
rows = np.full((1000, 4, 2), 7, np.int32)
done = recorder.begin("done")
done.append("routed_experts", 0, rows)
receipt = done.finish(kept=500)["routed_experts"]
requests = [recorder.begin(f"r-{index}") for index in range(8)]
for request in requests:
    request.append("routed_experts", 0, rows)
recorder.flush()
print(receipt.to_json(), flush=True)
position = 1000
while True:
    recorder.append("routed_experts", requests, [position] * 8, rows[:8])
    position += 1
"""


@pytest.mark.timeout(120)
def test_a_killed_engine_leaves_no_orphan_after_the_ttl(tmp_path: Path) -> None:
    settings = ("--set", "orphan_ttl_s=2")
    with (
        Server(tmp_path / "data", tmp_path / "memory", *settings) as server,
        arrow_tq.connect(server.url) as store,
    ):
        run = store.run("demo", fields=FIELDS)
        with WarmProcess("-c", ENGINE, server.url, imports=["arrow_tq.recorder"]) as engine:
            receipt = json.loads(engine.stdout.readline())
            with run.session("s").step() as step:
                step.put("token_ids", np.arange(501), start=0)
                step.attach(receipt)
            time.sleep(0.3)
        attached = len(arrow_tq.Receipt.from_json(json.dumps(receipt)).chunks) + 1
        assert chunks_stored(store) > attached, "some of the open requests had been written"
        wait_until(lambda: chunks_stored(store) == attached, timeout_s=30)
        assert store.stats()["orphans_reaped_total"] > 0
        assert run.sql("SELECT count(*) AS n FROM chunks").column("n").to_pylist() == [attached]
        run.session("s").finalize()
        rows = run.claim(1).fetch("routed_experts")["routed_experts"][0]
        np.testing.assert_array_equal(rows, np.full((500, LAYERS, TOPK), 7, np.uint8))


@pytest.mark.timeout(120)
def test_chunks_of_an_open_request_outlive_the_ttl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_tq.recorder.keeper.KEEP_S", 0.25)
    with (
        Server(tmp_path / "data", tmp_path / "memory", "--set", "orphan_ttl_s=1") as server,
        arrow_tq.connect(server.url) as store,
    ):
        run = store.run("demo", fields=FIELDS)
        with Recorder(run, ["routed_experts"], chunk_rows=64, window_tokens=8) as recorder:
            request = recorder.begin("slow")
            request.append("routed_experts", 0, np.full((1000, LAYERS, TOPK), 7, np.int32))
            recorder.flush()
            time.sleep(3)
            receipts = request.finish()
            assert receipts is not None
            with run.session("s").step() as step:
                step.put("token_ids", np.arange(1001), start=0)
                step.attach(receipts["routed_experts"])
        run.session("s").finalize()
        rows = run.claim(1).fetch("routed_experts")["routed_experts"][0]
        np.testing.assert_array_equal(rows, np.full((1000, LAYERS, TOPK), 7, np.uint8))


@pytest.mark.timeout(120)
def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    """Writes are tried again with the same ids; what was acked before the kill is still there."""
    expected = np.random.default_rng(0).integers(0, 256, (4000, LAYERS, TOPK), dtype=np.int32)
    folders = tmp_path / "data", tmp_path / "memory"
    with Server(*folders) as first:
        port = first.url.rpartition(":")[2]
        store = arrow_tq.connect(first.url)
        run = store.run("demo", fields=FIELDS)
        recorder = Recorder(run, ["routed_experts"], chunk_rows=64, window_tokens=8)
        request = recorder.begin("r")
        request.append("routed_experts", 0, expected[:2000])
        recorder.flush()
        first.kill()
        request.append("routed_experts", 2000, expected[2000:])
        wait_until(lambda: recorder.stats().retries > 0, timeout_s=60)
    with Server(*folders, "--port", port), store, recorder:
        receipts = request.finish()
        assert receipts is not None
        with run.session("s").step() as step:
            step.put("token_ids", np.arange(4001), start=0)
            step.attach(receipts["routed_experts"])
        run.session("s").finalize()
        rows = run.claim(1).fetch("routed_experts")["routed_experts"][0]
        np.testing.assert_array_equal(rows, expected)
