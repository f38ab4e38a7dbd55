"""Bundles and blobs of a cluster: on shards like other chunks, read from there, kept and freed there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.backend import Read, written
from arrow_tq.calls import ask
from arrow_tq.interface import Store
from arrow_tq.testing.bundles import same, train_dict
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas.bundles import BUNDLE_FIELD, BundleRef, chunk_id
from arrow_tq_schemas.commands import CommitBundle, Done, OpenBundleRun, RunInfo
from arrow_tq_schemas.ids import ChunkId, IdSeries
from arrow_tq_schemas.spans import Span, to_spans
from tests.bundling import everything
from tests.clusters import Cluster

ORPHAN_TTL_S = 1.0


def shard_of(ref: str) -> int:
    return ChunkId.from_hex(BundleRef.parse(ref).bundle_id).shard


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A catalog and two shards that soon reap what nobody attached."""
    with Cluster(tmp_path_factory.mktemp("pair"), 2, "--set", f"orphan_ttl_s={ORPHAN_TTL_S}") as running:
        yield running


@pytest.fixture
def store(pair: Cluster) -> Iterator[Store]:
    with arrow_tq.connect(pair.url) as opened:
        yield opened


def put_on_both(store: Store, value: dict[object, object], run: str) -> dict[int, str]:
    """A bundle of these values on each shard."""
    found: dict[int, str] = {}
    end = time.monotonic() + 60
    # For some seconds after it failed, a shard gets nothing new.
    while time.monotonic() < end:
        ref = store.put_bundle(value, run=run)
        found.setdefault(shard_of(ref), ref)
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError(f"all bundles are on shard {list(found)}")


def test_bundles_are_on_shards_and_outlive_orphans(store: Store) -> None:
    value = everything(7)
    refs = put_on_both(store, value, "kinds")
    assert set(refs) == {1, 2}, "none is in the catalog"
    # Longer than anything that no step and no bundle attached is kept.
    info = ask(store._backend, OpenBundleRun(run="kinds"), RunInfo)
    lost = store._backend.bundle_writer(info)
    lost.write(0, 1000, lambda out: written(out, np.full(1000, 7, np.uint8)))
    lost.finish()
    # Chunks of puts that began anew are reaped, too: it is this one that has to be gone.
    wait_until(lambda: is_gone(store, "kinds", lost.bundle_id), 60)
    assert store.stats()["orphans_reaped_total"] >= 1
    for ref in refs.values():
        same(value, store.get_bundle(ref))
        part = store.get_bundle(ref, fields=["ragged", "table"], rows=[6, 0])
        same(part["ragged"], [value["ragged"][6], value["ragged"][0]])
        same(part["table"], value["table"][[6, 0]])
        (row,) = store.sql(f"SELECT count(*) AS n FROM bundle('{ref}')").to_pylist()
        assert row["n"] == 7
    with pytest.raises(errors.ChunkLost, match="chunk 0 of 1 is not stored"):
        ask(store._backend, commit_of(info, lost.bundle_id, 1), Done)
    assert store.sql("SELECT count(*) FROM bundles WHERE state = 'ready'").column(0)[0].as_py() >= 2


def is_gone(store: Store, run: str, bundle_id: str) -> bool:
    """Whether a chunk of no bundle is lost, and not merely pending."""
    spans = to_spans([Span(0, ChunkId.from_hex(bundle_id), 0, 1)])
    with pytest.raises((errors.ChunkPending, errors.ChunkLost)) as caught:
        list(store._backend.read(Read(run, BUNDLE_FIELD, 0, None, spans)))
    return isinstance(caught.value, errors.ChunkLost)


def commit_of(info: RunInfo, bundle_id: str, chunks: int) -> CommitBundle:
    return CommitBundle(
        run=info.run, epoch=info.epoch, bundle_id=bundle_id, chunks=chunks, rows=0, bytes=0, fields=[]
    )


def test_nothing_is_published_of_chunks_that_are_nowhere(store: Store) -> None:
    info = ask(store._backend, OpenBundleRun(run="nowhere"), RunInfo)
    writer = store._backend.bundle_writer(info)
    writer.write(0, 10, lambda out: written(out, np.ones(10, np.uint8)))
    writer.finish()
    with pytest.raises(errors.ChunkLost, match="chunk 1 of 2"):
        ask(store._backend, commit_of(info, writer.bundle_id, 2), Done)
    no_shard = IdSeries().next(77)
    with pytest.raises(errors.ChunkLost, match="chunk 0 of 1"):
        ask(store._backend, commit_of(info, no_shard.hex, 1), Done)
    assert chunk_id(writer.bundle_id, 1).shard == shard_of(BundleRef.make("nowhere", writer.bundle_id))
    assert not store.sql("SELECT * FROM bundles WHERE run = 'nowhere'").num_rows


def test_deleted_bundles_leave_their_shards(store: Store) -> None:
    value = {"noise": [np.random.default_rng(n).bytes(200_000) for n in range(20)]}
    before = store.stats()["chunks"]
    refs = put_on_both(store, value, "freed")
    assert store.stats()["chunks"] >= before + 4
    with store.open_bundle(refs[1]) as opened:
        same(value, opened.get())
        for ref in store.sql("SELECT ref FROM bundles WHERE run = 'freed'").column(0).to_pylist():
            store.delete_bundle(ref)
        # A reader keeps its bundle until it lets go, on a shard as in one process.
        same(value, opened.get())
        with pytest.raises(errors.NotFound, match="was deleted"):
            store.get_bundle(refs[1])
    store.delete_bundle(refs[1])
    wait_until(lambda: store.stats()["chunks"] <= before, 60)


def test_a_blob_is_on_a_shard_and_goes_with_its_step(store: Store) -> None:
    run = store.run("blobs", fields=[fields.token_ids()])
    content = os.urandom(5 << 20)
    session = run.session("s")
    with session.step(id="a", sampled=(0, 4)) as step:
        step.put("token_ids", np.arange(4, dtype=np.int32), start=0)
        blob = step.attach_blob(content, "image/png")
    session.finalize()
    time.sleep(2 * ORPHAN_TTL_S)
    assert run.blob(blob) == content
    run.claim(10).release()
    with pytest.raises(errors.ChunkReleased):
        run.blob(blob)


@pytest.mark.timeout(300)
def test_a_shard_that_is_away_makes_its_bundles_pending(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as cluster, arrow_tq.connect(cluster.url) as store:
        value = train_dict(100)
        refs = put_on_both(store, value, "away")
        number = cluster.number(0)
        other = 3 - number
        with store.open_bundle(refs[number]) as opened:
            os.kill(cluster.shards[0].pid, signal.SIGKILL)
            same(value, store.get_bundle(refs[other]))
            with pytest.raises(errors.ChunkPending, match=f"shard {number} at ") as caught:
                opened.get()
            assert caught.value.details["shard"] == number
        with pytest.raises(errors.ChunkPending, match=f"shard {number} at ") as caught:
            store.get_bundle(refs[number])
        assert caught.value.details["ids"] == [BundleRef.parse(refs[number]).bundle_id]
        # New ones go elsewhere.
        wait_until(lambda: sum(one.up for one in cluster.map().shards) == 1, 30)
        assert {shard_of(store.put_bundle(value, run="away")) for _ in range(5)} == {other}
        # Deleted while its shard is away: freed once that is back.
        store.delete_bundle(refs[number])
        kept = put_while_away(store, cluster, value, number)
        same(value, store.get_bundle(kept))
        with pytest.raises(errors.NotFound):
            store.get_bundle(refs[number])
        # The catalog restarts: its shards reconcile, and what is published stays.
        cluster.catalog.kill()
        cluster.start_catalog()
        same(value, store.get_bundle(kept))
        same(value, store.get_bundle(refs[other]))


def put_while_away(store: Store, cluster: Cluster, value: dict[object, object], number: int) -> str:
    """Start the first shard again; a new bundle on it."""
    cluster.shards[0].process.wait(30)
    cluster.shards[0].__exit__(None, None, None)
    cluster.start_shard(0)
    cluster.wait()
    return put_on_both(store, value, "back")[number]
