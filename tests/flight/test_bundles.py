"""Bundles through a real server."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import arrow_tq
from arrow_tq import errors
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.testing.bundles import same, train_dict
from tests.bundling import everything
from tests.property.test_bundles import SLACK, bundles
from tests.serving import Server
from tests.unit.test_bundle_store import added_bytes
from tests.warm import WarmProcess

MIB = 1 << 20


def test_every_kind_of_value_travels(remote: Store) -> None:
    value = everything(7)
    ref = remote.put_bundle(value)
    same(value, remote.get_bundle(ref))
    part = remote.get_bundle(ref, fields=["ragged", "multimodal", "table"], rows=[6, 0])
    same(part["ragged"], [value["ragged"][6], value["ragged"][0]])
    same(part["multimodal"], [value["multimodal"][6], value["multimodal"][0]])
    same(part["table"], value["table"][[6, 0]])
    remote.delete_bundle(ref, wait_s=10)


def test_generated_dicts_travel(remote: Store) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=SLACK)
    @given(bundles())
    def travels(value: dict[Any, Any]) -> None:
        ref = remote.put_bundle(value)
        same(value, remote.get_bundle(ref))
        remote.delete_bundle(ref)

    travels()


def test_on_the_servers_machine_a_bundle_is_gathered_where_it_stays(server: Server) -> None:
    value = train_dict(600) | {"media": [os.urandom(5 * MIB), None]}
    wire = ClientOptions(same_host=False)
    with arrow_tq.connect(server.url) as store, arrow_tq.connect(server.url, options=wire) as wired:
        ref = store.put_bundle(value)
        stats = store.stats()
        assert stats["client_host_puts"] >= 3
        assert stats["client_host_put_bytes"] > 6 * MIB
        same(value, wired.get_bundle(ref))
        same(value, store.get_bundle(ref))
        assert wired.stats()["client_host_puts"] == 0
        same(value, store.get_bundle(wired.put_bundle(value)))


@pytest.mark.parametrize("same_host", [True, False])
def test_a_put_that_fails_late_leaves_nothing(server: Server, same_host: bool) -> None:
    value = {
        "x": [np.full(MIB, index, np.uint8) for index in range(12)],
        "y": [[1.0] * 200_000, [1.0] * 200_000 + ["no number", object()]],
    }
    with arrow_tq.connect(server.url, options=ClientOptions(same_host=same_host)) as store:
        before = store.stats()["chunks"]
        with pytest.raises(errors.InvalidInput, match=r"y\[1\]"):
            store.put_bundle(value)
        assert store.stats()["chunks"] == before


def test_large_rows_and_many_messages(server: Server) -> None:
    options = ClientOptions(bundle_staging_bytes_max=8 * MIB, get_streams=2)
    value = {
        "long": [np.arange(index * MIB, dtype=np.int32) for index in range(7)],
        "short": [np.full(index, index, np.float32) for index in range(3000)],
        "cut": np.arange(7 * MIB),
        "media": [os.urandom(5 * MIB), b"", None],
    }
    with arrow_tq.connect(server.url, options=options) as store:
        ref = store.put_bundle(value)
        (row,) = store.sql(f"SELECT * FROM bundles WHERE ref = '{ref}'").to_pylist()
        assert row["chunks"] > 20
        got = store.get_bundle(ref)
        same(value, got)
        assert not got["short"][7].flags.writeable
        assert all(row.flags.aligned for row in got["short"])
        same(value["long"][2:], store.get_bundle(ref, ["long"], row_type="numpy")["long"][2:])
        store.delete_bundle(ref)


def test_what_was_put_elsewhere_is_read_here(tmp_path: Path) -> None:
    value = train_dict(500)
    with arrow_tq.open(tmp_path / "data") as store:
        ref = store.put_bundle(value)
    with (
        Server(tmp_path / "data", tmp_path / "data" / "memory") as server,
        arrow_tq.connect(server.url) as store,
    ):
        same(value, store.get_bundle(ref))
        there = store.put_bundle(value, run="r")
        assert server.stop() == 0
    with arrow_tq.open(tmp_path / "data") as store:
        same(value, store.get_bundle(there))


def test_a_producer_that_dies_leaves_nothing(tmp_path: Path) -> None:
    code = """
import os, sys, arrow_tq, numpy as np
from arrow_tq.backend import written
from arrow_tq.calls import ask
from arrow_tq_schemas.commands import OpenBundleRun, RunInfo
store = arrow_tq.connect(sys.argv[1])
writer = store._backend.bundle_writer(ask(store._backend, OpenBundleRun(run="default"), RunInfo))
for index in range(4):
    writer.write(index, 1 << 20, lambda out: written(out, np.full(1 << 20, index, np.uint8)))
writer.finish()
print(writer.bundle_id, flush=True)
sys.stdin.read()
"""
    with (
        Server(tmp_path / "data", tmp_path / "memory", "--set", "orphan_ttl_s=0.5") as server,
        arrow_tq.connect(server.url) as store,
    ):
        with WarmProcess("-c", code, server.url) as producer:
            bundle_id = producer.stdout.readline().strip()
            assert store.stats()["chunks"] >= 4
            producer.kill()
        with pytest.raises(errors.NotFound):
            store.get_bundle(f"atq-bundle:default:{bundle_id}")
        until = time.monotonic() + 20
        while store.stats()["chunks"] and time.monotonic() < until:
            time.sleep(0.1)
        assert store.stats()["orphans_reaped_total"] == 4
        assert store.sql("SELECT count(*) AS n FROM bundles").column("n").to_pylist() == [0]


def test_a_quota_is_told_over_the_wire(tmp_path: Path) -> None:
    flags = ("--set", f"run_quota_bytes={64 * MIB}", "--set", f'run_quotas={{"small": {16 * MIB}}}')
    with (
        Server(tmp_path / "data", tmp_path / "memory", *flags) as server,
        arrow_tq.connect(server.url) as store,
    ):
        value = {"x": np.zeros(20 * MIB, np.uint8)}
        with pytest.raises(errors.QuotaExceeded, match="'small'") as caught:
            store.put_bundle(value, run="small")
        assert caught.value.details["quota_bytes"] == 16 * MIB
        same(value, store.get_bundle(store.put_bundle(value, run="large")))
        assert store.sql("SELECT run FROM bundles").column("run").to_pylist() == ["large"]


def test_a_put_adds_little_to_a_remote_producer(server: Server) -> None:
    assert added_bytes(200, MIB, server.url) < 256 * MIB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_large_put_adds_little_to_a_remote_producer(server: Server) -> None:
    assert added_bytes(1024, MIB, server.url) < 256 * MIB
