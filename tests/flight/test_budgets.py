"""Places are separate by verb, and running out of one kind is an error that names the setting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import Field, errors
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq_schemas.spans import Span, to_spans
from arrow_tq_schemas.tickets import PutStream
from tests.flight import wire
from tests.flight.test_gets import committed
from tests.serving import Server

EXPERTS = Field("experts", "uint8", shape=(40, 8))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One place of each kind, and hardly any patience."""
    folder = tmp_path_factory.mktemp("narrow")
    settings = (
        "gets_max=1",
        "actions_max=1",
        "put_streams_max=2",
        "waiting_claims_max=1",
        "handler_wait_s=0.2",
    )
    flags = [word for setting in settings for word in ("--set", setting)]
    with Server(folder / "data", folder / "memory", *flags) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def store(narrow: Server) -> Iterator[Store]:
    options = ClientOptions(stream_idle_s=0.1)
    with arrow_tq.connect(narrow.url, options=options) as store:
        yield store


def test_a_second_get_is_refused_and_actions_go_on(narrow: Server, store: Store) -> None:
    run = store.run("gets", fields=[EXPERTS])
    chunk = wire.make_chunk(EXPERTS, run.name, np.zeros((200_000, 40, 8), np.uint8), epoch=run.epoch)
    committed(run, EXPERTS, [chunk])
    raw = wire.span_ticket(EXPERTS, run.name, to_spans([Span(0, chunk.header.chunk_id, 0, 200_000)]))
    ticket = flight.Ticket(raw.model_dump_json().encode())
    with flight.connect(narrow.url) as client:
        hanging = client.do_get(ticket, wire.CALL)
        hanging.read_chunk()
        with pytest.raises(errors.Busy, match=r"gets_max: all 1 places were taken for 0\.2 s") as caught:
            wire.get(client, raw)
        assert caught.value.retryable and caught.value.details == {"setting": "gets_max", "limit": 1}
        store.pressure()
        hanging.cancel()
        until = time.monotonic() + 10
        while True:
            try:
                assert sum(batch.num_rows for batch in wire.get(client, raw)) == 200_000
                return
            except errors.Busy:
                assert time.monotonic() < until


def test_a_waiting_claim_holds_no_place_of_an_action(store: Store) -> None:
    run = store.run("claims", fields=[EXPERTS])
    waiting = threading.Thread(target=run.claim, args=(1,), kwargs={"wait_s": 1.5})
    waiting.start()
    time.sleep(0.3)
    store.pressure()
    with pytest.raises(errors.Busy, match="waiting_claims_max"):
        run.claim(1, wait_s=1)
    assert len(run.claim(1).table) == 0
    waiting.join(20)


def test_idle_put_streams_keep_nobody_else_out(narrow: Server, store: Store) -> None:
    run = store.run("puts", fields=[EXPERTS])
    stream = PutStream(run=run.name, field="experts")
    time.sleep(0.5)  # the store's own streams are idle by then
    with flight.connect(narrow.url) as client:
        idle = [wire.open_put(client, stream, EXPERTS.arrow_schema(0)) for _ in range(2)]
        time.sleep(0.3)
        store.pressure()
        with pytest.raises(errors.Busy, match="put_streams_max: all 2 places"):
            wire.put(client, stream, EXPERTS.arrow_schema(0), [])
        for writer, reader in idle:
            assert wire.end(writer, reader) == []
        chunk = wire.make_chunk(EXPERTS, run.name, np.zeros((4, 40, 8), np.uint8), epoch=run.epoch)
        message = (chunk.to_batch(EXPERTS), wire.message_of(chunk.header))
        (ack,) = wire.put(client, stream, EXPERTS.arrow_schema(0), [message])
        assert (ack.stored, ack.errors) == (1, {})
