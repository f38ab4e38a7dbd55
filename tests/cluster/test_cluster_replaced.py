"""A shard whose number goes to another process while it is stopped: it answers nothing when it goes on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import FlightBackend, cluster as client_cluster
from arrow_tq.interface import Store
from arrow_tq.runs import Run
from arrow_tq.testing.scenes import wait_until
from arrow_tq_schemas import cluster as k, tickets as t
from arrow_tq_schemas.chunks import ChunkHeader
from arrow_tq_schemas.commands import FindHost
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.spans import Span
from tests.cluster.test_cluster_faults import TURN, check_session, spread_session, tokens_of
from tests.clusters import Cluster
from tests.flight import wire
from tests.serving import Server

LEASE_S, FENCE_S, LONGER_S = 1.0, 4.0, 15.0
AGES_S = 600.0
"""Longer than a test: who joins has proved that it may."""
REFUSED_S = 30.0
BIG = arrow_tq.Field("big", "int32", shape=(1 << 18,))
"""A row of it is 1 MiB: a stream of some is longer than what is sent ahead of its reader."""
BIG_ROWS = 96


@dataclass
class Scene:
    """A cluster of two shards, the first of which is stopped, moved and resumed."""

    cluster: Cluster
    store: Store
    run: Run
    number: int
    folder: Path

    @property
    def old(self) -> Server:
        return self.cluster.shards[0]

    def spans(self) -> list[Span]:
        query = f"SELECT chunk_id FROM chunks WHERE shard = {self.number} AND field = 'token_ids'"
        (chunk,) = self.run.sql(query).column(0).to_pylist()
        return [Span(0, ChunkId.from_hex(chunk), 0, TURN)]

    def epoch(self) -> int:
        entry = self.cluster.map().shard(self.number)
        assert entry is not None
        return entry.epoch

    def copy(self) -> Server:
        """A server of a copy of its directory, which joins when it may."""
        shutil.copytree(
            self.old.data_dir, self.folder / "data", ignore=shutil.ignore_patterns("lock", "server.json")
        )
        return self.cluster.start_moved(self.folder)

    @contextmanager
    def replaced(self) -> Iterator[Server]:
        """While the old one is stopped another one is the shard; it goes on with it at the end."""
        self.stop()
        try:
            with self.copy() as new:
                wait_until(lambda: self.epoch() == 2, REFUSED_S)
                check_session(self.run, "moved", [0])
                yield new
        finally:
            self.resume()

    def stop(self) -> None:
        os.kill(self.old.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.old.pid, signal.SIGCONT)


@contextmanager
def scene_of(folder: Path, fence_s: float) -> Iterator[Scene]:
    with (
        Cluster(folder, 2, "--set", f"fence_s={fence_s}", lease_s=LEASE_S) as cluster,
        arrow_tq.connect(cluster.url) as store,
    ):
        run = store.run("load", fields=[fields.token_ids(), BIG], durability="disk")
        number = cluster.number(0)
        spread_session(run, "moved", [number])
        yield Scene(cluster, store, run, number, folder / "moved")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with scene_of(tmp_path, FENCE_S) as made:
        yield made


def refused(ask: Callable[[], object]) -> None:
    """Never an answer; in the end, and then always, because another process is the shard."""
    end = time.monotonic() + REFUSED_S
    while True:
        with pytest.raises((errors.Unavailable, errors.StaleEpoch)) as caught:
            ask()
        if "not the shard any more" in str(caught.value):
            return
        assert time.monotonic() < end, caught.value
        time.sleep(0.05)


# -- who may be a shard -------------------------------------------------------------------------------


def test_a_living_shard_is_not_replaced_and_a_stopped_server_leaves(tmp_path: Path) -> None:
    with scene_of(tmp_path, AGES_S) as scene, scene.copy() as new:
        wait_until(lambda: "may still answer as it" in new.log.read_text())
        check_session(scene.run, "moved", [0])
        assert scene.epoch() == 1
        assert scene.old.stop() == 0
        wait_until(lambda: scene.epoch() == 2, REFUSED_S)
        scene.cluster.wait()
        check_session(scene.run, "moved", [0])
        new.kill()


def test_a_killed_shard_is_back_at_once_on_its_own_directory(tmp_path: Path) -> None:
    with scene_of(tmp_path, AGES_S) as scene:
        scene.old.kill()
        scene.old.__exit__(None, None, None)
        scene.cluster.start_shard(0)
        wait_until(lambda: scene.epoch() == 2, REFUSED_S)
        scene.cluster.wait()
        check_session(scene.run, "moved", [0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shard_goes_on_without_its_catalog_until_another_may_be_it(tmp_path: Path) -> None:
    with scene_of(tmp_path, LONGER_S) as scene, flight.FlightClient(scene.old.url) as client:
        ticket = wire.span_ticket(fields.token_ids(), scene.run.name, scene.spans())
        before = wire.get(client, ticket)

        def answers() -> bool:
            try:
                return wire.get(client, ticket) == before
            except errors.Unavailable as error:
                assert "may not be shard" in error.message
                return False

        scene.cluster.catalog.kill()
        # Its lease runs out in this time, by far.
        time.sleep(3 * LEASE_S)
        assert answers()
        wait_until(lambda: not answers(), REFUSED_S)
        scene.cluster.start_catalog()
        wait_until(answers, REFUSED_S)
        assert scene.epoch() == 1


# -- what was stopped ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replaced_shard_answers_nothing_under_its_old_epoch(scene: Scene) -> None:
    """The process is stopped, its folder goes to another machine, and then the process comes back."""
    run, spans, url = scene.run, scene.spans(), scene.old.url
    confirm = k.ConfirmChunks(number=scene.number, epoch=1, ids=[spans[0].chunk_id.hex], run=run.name)
    with scene.replaced() as new:
        entry = scene.cluster.map().shard(scene.number)
        assert entry is not None and entry.servers[0].url == new.url
        scene.resume()
        with flight.FlightClient(url) as client, closing(FlightBackend(url)) as backend:
            refused(lambda: wire.get(client, wire.span_ticket(fields.token_ids(), run.name, spans)))
            refused(lambda: put(client, run, scene.number))
            refused(lambda: backend.execute(FindHost()))
            with pytest.raises(errors.StaleEpoch):
                backend.execute(confirm)
        check_session(run, "moved", [0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nor_while_nobody_tells_it(scene: Scene) -> None:
    """The catalog does not answer when the old process comes back: it cannot know, and so says nothing."""
    ticket = wire.span_ticket(fields.token_ids(), scene.run.name, scene.spans())
    with scene.replaced(), flight.FlightClient(scene.old.url) as client:
        os.kill(scene.cluster.catalog.pid, signal.SIGSTOP)
        try:
            scene.resume()
            for _ in range(3):
                with pytest.raises(errors.Unavailable):
                    wire.get(client, ticket)
        finally:
            os.kill(scene.cluster.catalog.pid, signal.SIGCONT)
        refused(lambda: wire.get(client, ticket))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nor_what_it_was_asked_before_it_was_stopped_and_while_it_was(scene: Scene) -> None:
    """A stream that was open, of which most was not sent; and a call that waited in its socket."""
    ids = write_big(scene)
    ticket = wire.span_ticket(BIG, scene.run.name, [Span(0, one, 0, 1) for one in ids])
    small = wire.span_ticket(fields.token_ids(), scene.run.name, scene.spans())
    outcomes: list[object] = []

    def ask() -> None:
        try:
            outcomes.append(wire.get(waiting, small))
        except errors.ArrowTQError as error:
            outcomes.append(error)

    with flight.FlightClient(scene.old.url) as client, flight.FlightClient(scene.old.url) as waiting:
        wire.get(waiting, small)
        stream = client.do_get(flight.Ticket(ticket.model_dump_json().encode()))
        first = stream.read_chunk()
        assert first.data.num_rows
        asking = threading.Thread(target=ask)
        with scene.replaced():
            asking.start()
            # It is in the socket of the stopped process by then; nothing tells when.
            time.sleep(1.0)
            scene.resume()
            rows = first.data.num_rows
            with pytest.raises((pa.ArrowException, flight.FlightError)) as caught:
                while True:
                    rows += stream.read_chunk().data.num_rows
            assert isinstance(wire.told(caught.value), errors.Unavailable)
            assert rows < BIG_ROWS
            asking.join(REFUSED_S)
    (outcome,) = outcomes
    assert isinstance(outcome, errors.Unavailable), outcome


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_that_did_not_hear_of_it_finds_the_new_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replaced process says to it is that it is elsewhere, and not that its run's epoch is over."""
    with arrow_tq.connect(scene.cluster.url) as store:
        run = store.run("load")
        check_session(run, "moved", [0])
        with scene.replaced():
            monkeypatch.setattr(client_cluster, "MAP_S", AGES_S)
            scene.resume()
            check_session(run, "moved", [0])
            spread(run, "later", scene.number)
            check_session(run, "later", [0])
    with arrow_tq.connect(scene.cluster.url) as store:
        run = store.run("load")
        assert run.sql("SELECT count(*) FROM segments").column(0).to_pylist() == [2]


def put(client: flight.FlightClient, run: Run, number: int) -> None:
    """A chunk of this shard, by hand; raises what was said of it."""
    field = run.field("token_ids")
    values = np.arange(3, dtype=np.int32)
    made = wire.make_chunk(field, run.name, values, epoch=run.epoch, shard=number)
    message = (made.to_batch(field), wire.message_of(ChunkHeader.model_validate(made.header.model_dump())))
    stream = t.PutStream(run=run.name, field=field.name)
    acks = wire.put(client, stream, field.arrow_schema(0), [message])
    for error in wire.refusals(acks).values():
        raise error


def write_big(scene: Scene) -> Sequence[ChunkId]:
    session = scene.run.session("big")
    session.pin_shard(scene.number)
    for index in range(BIG_ROWS):
        with session.step(id=str(index), sampled=(index, index + 1)) as step:
            step.put("big", np.full((1, *BIG.shape), index, np.int32), start=index)
    query = "SELECT chunk_id FROM chunks WHERE field = 'big'"
    return [ChunkId.from_hex(one) for one in scene.run.sql(query).column(0).to_pylist()]


def spread(run: Run, name: str, number: int) -> None:
    """A session on this shard; a write that is told to try again is tried again."""
    session = run.session(name)
    session.pin_shard(number)

    def is_written() -> bool:
        try:
            with session.step(id="0", sampled=(0, TURN)) as step:
                step.put("token_ids", tokens_of(name, 0), start=0)
        except errors.Unavailable:
            return False
        return True

    wait_until(is_written, REFUSED_S)
    session.finalize()
