"""The client against a good server, a missing one, and servers that misbehave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import Field, errors
from arrow_tq.backend import Read
from arrow_tq.client import ClientOptions, FlightBackend
from arrow_tq.interface import Store
from arrow_tq_schemas.commands import Claim, GetPressure, StepCommit
from arrow_tq_schemas.spans import Span, to_spans
from tests.flight import wire
from tests.serving import Server
from tests.warm import WarmProcess

X = Field("x", "int64")


@contextmanager
def odd(name: str) -> Iterator[str]:
    """URL of a misbehaving server in a process of its own."""
    with (
        open(os.devnull, "wb") as nowhere,
        WarmProcess("-m", "tests.flight.odd_servers", name, stderr=nowhere) as process,
    ):
        yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"


@contextmanager
def connected(url: str, **options: float) -> Iterator[FlightBackend]:
    backend = FlightBackend(url, options=ClientOptions(**options))
    try:
        yield backend
    finally:
        backend.close()


def read_of(rows: int) -> Read:
    return Read("r", X, 0, None, to_spans([Span(0, wire.IDS.next(0), 0, rows)]))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "head:8815",
            "http://head:8815",
            "grpc://",
            "grpc://head",
            "grpc://head:port",
            "grpc://head:99999",
        ),
        *(
            "grpc://user@head:1",
            "grpc://head:1/path",
            "grpc://head:1?x=1",
            "grpc+unix://",
            "grpc+unix://host",
        ),
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidInput, match="store URL"):
        arrow_tq.connect(url)


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match=url):
            arrow_tq.connect(url)
        assert time.monotonic() - began < 5


def test_somebody_who_does_not_answer() -> None:
    """A socket that accepts and says nothing, and a Flight server that never says hello."""
    with socket.socket() as mute, odd("Silent") as silent:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        for url in (f"grpc://127.0.0.1:{mute.getsockname()[1]}", silent):
            began = time.monotonic()
            with pytest.raises(errors.Unreachable, match=url):
                FlightBackend(url, options=ClientOptions(connect_s=0.5))
            assert time.monotonic() - began < 3


@pytest.mark.parametrize("option", ["action_s", "get_streams", "put_inflight_bytes_max"])
@pytest.mark.parametrize("value", [0, -1, "1", None, True])
def test_options_are_positive_numbers(option: str, value: object) -> None:
    with pytest.raises(errors.InvalidInput, match=f"client option {option}="):
        ClientOptions(**{option: value})  # type: ignore[arg-type]


def test_every_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first thing a client asks, with a deadline of its own that it goes on after.
    monkeypatch.setattr("arrow_tq.client.cluster.ASK_FIRST_S", 0.4)
    short = {"action_s": 0.4, "commit_s": 0.4, "put_room_s": 0.4, "stream_life_s": 0.5, "retry_pause_s": 0.01}
    step = StepCommit(run="r", epoch=0, session_id="s", step_id="1")
    chunk = wire.make_chunk(X, "r", np.arange(10))
    with odd("NeverAnswers") as url, connected(url, put_inflight_bytes_max=100, **short) as backend:
        began = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"pressure: .* did not answer within 0\.4 s"):
            backend.execute(GetPressure())
        with pytest.raises(errors.DeadlineExceeded, match=r"step commit '1': no answer"):
            backend.commit(step)
        handle = backend.put(X, [chunk])
        with pytest.raises(errors.DeadlineExceeded, match=r"1 chunks were not stored within 0\.2 s"):
            handle.wait(0.2)
        with pytest.raises(errors.DeadlineExceeded, match="put_inflight_bytes_max=100"):
            backend.put(X, [wire.make_chunk(X, "r", np.arange(10))])
        with pytest.raises(errors.DeadlineExceeded):
            handle.wait(10)  # the stream's own deadline, after one more try
        assert time.monotonic() - began < 8
        counters = backend.counters()
        assert (counters["put_waits"], counters["put_in_flight_bytes"]) == (1, 0)
        assert counters["put_waited_s"] > 0


def test_a_stream_that_ends_unacked_is_no_success() -> None:
    with odd("NeverAcks") as url, connected(url, stream_life_s=0.4, retry_pause_s=0.01) as backend:
        handle = backend.put(X, [wire.make_chunk(X, "r", np.arange(10))])
        with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
            handle.wait(10)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ShortAnswer", "gave 9 rows, 10 were asked"),
        ("LongAnswer", "gave 11 rows, 10 were asked"),
        ("OtherType", "expected int64"),
        ("Babbles", "RuntimeError|a fault of its own"),
    ],
)
def test_a_wrong_answer_is_an_error(name: str, words: str) -> None:
    with odd(name) as url, connected(url) as backend, pytest.raises(errors.InternalError, match=words):
        list(backend.read(read_of(10)))


def test_a_reply_that_is_none_is_an_error() -> None:
    words = "reply to pressure"
    with (
        odd("Babbles") as url,
        connected(url) as backend,
        pytest.raises(errors.MalformedMessage, match=words),
    ):
        backend.execute(GetPressure())


def test_the_token_travels() -> None:
    with odd("TellsHeaders") as url:
        backend = FlightBackend(url, token="secret")
        with pytest.raises(errors.Unsupported, match="Bearer secret"):
            backend.execute(GetPressure())
        backend.close()


def test_a_closed_store_says_so(server: Server) -> None:
    store = arrow_tq.connect(server.url)
    store.close()
    store.close()
    with pytest.raises(errors.Conflict, match="was closed"):
        store.pressure()


def test_one_bad_chunk_fails_its_own_put_alone(remote: Store, new_name: Callable[[], str]) -> None:
    run = remote.run(new_name(), fields=[X])
    good = [wire.make_chunk(X, run.name, np.arange(10), epoch=run.epoch) for _ in range(6)]
    bad = wire.make_chunk(X, run.name, np.arange(10), epoch=run.epoch)
    bad.values[3] = 7
    handles = [run.backend.put(X, [chunk]) for chunk in (*good[:3], bad, *good[3:])]
    for index, handle in enumerate(handles):
        if index == 3:
            with pytest.raises(errors.MalformedMessage, match=bad.header.id):
                handle.wait(10)
        else:
            handle.wait(10)


def test_a_chunk_sent_twice_is_stored_once(remote: Store, new_name: Callable[[], str]) -> None:
    run = remote.run(new_name(), fields=[X])
    chunk = wire.make_chunk(X, run.name, np.arange(10), epoch=run.epoch)
    before = remote.stats()["chunks"]
    for _ in range(3):
        run.backend.put(X, [chunk]).wait(10)
    assert remote.stats()["chunks"] == before + 1
    other = np.arange(10) + 1
    header = chunk.header.model_copy(
        update={"checksum": wire.checksum(chunk.header.chunk_id, run.name, run.epoch, "x", 0, other, None)}
    )
    with pytest.raises(errors.Conflict, match=chunk.header.id):
        run.backend.put(X, [wire.Chunk(header, other, None)]).wait(10)


def test_puts_of_many_threads_share_a_stream(server: Server, new_name: Callable[[], str]) -> None:
    """Every chunk is acked to its own caller, through a bound smaller than what is under way."""
    with connected(server.url, put_inflight_bytes_max=4096, ack_window_bytes=1024) as backend:
        store = Store(backend)
        run = store.run(new_name(), fields=[X])
        failures: list[BaseException] = []

        def write(seed: int) -> None:
            try:
                session = run.session(f"s-{seed}")
                for index in range(10):
                    with session.step() as step:
                        step.put("x", np.arange(20) + seed, start=20 * index)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        for seed in range(12):
            run.session(f"s-{seed}").finalize()
        batch = run.claim(100)
        data = batch.fetch(["x"])["x"]
        for index, name in enumerate(batch.table["session_id"].to_pylist()):
            assert np.array_equal(data[index], np.tile(np.arange(20) + int(name[2:]), 10))
        assert backend.counters()["put_in_flight_bytes"] == 0


def test_streams_grow_old_and_idle(server: Server, new_name: Callable[[], str]) -> None:
    """A stream replaced in the middle of a load loses nothing; one that is idle goes away."""
    others = set(threading.enumerate())
    with connected(server.url, stream_life_s=0.2, stream_idle_s=0.1) as backend:
        run = Store(backend).run(new_name(), fields=[X])
        session = run.session("s")
        until = time.monotonic() + 0.8
        steps = 0
        while time.monotonic() < until:
            with session.step() as step:
                step.put("x", np.arange(8) + steps, start=8 * steps)
            steps += 1
        time.sleep(0.5)
        left = {one.name for one in set(threading.enumerate()) - others}
        assert not [
            name for name in left if name.startswith(("arrow-tq-put", "arrow-tq-ack", "arrow-tq-com"))
        ]
        session.finalize()
        data = run.claim(1).fetch(["x"])["x"][0]
        assert np.array_equal(data, (np.arange(8) + np.arange(steps)[:, None]).reshape(-1))


def test_a_long_wait_for_a_claim_is_cut_into_calls(server: Server, new_name: Callable[[], str]) -> None:
    with connected(server.url, wait_piece_s=0.2) as backend:
        run = Store(backend).run(new_name(), fields=[X])
        began = time.monotonic()
        assert len(run.claim(1, wait_s=0.7).table) == 0
        assert 0.6 < time.monotonic() - began < 3
        maker = threading.Timer(0.6, make_segment, args=(run,))
        maker.start()
        reply = backend.execute(command := Claim(run=run.name, limit=1, wait_s=20))
        maker.join()
        assert reply.body.segments == 1
        # The same command again walks the same request ids, and gets the same claim.
        assert backend.execute(command).body.claim_id == reply.body.claim_id


def make_segment(run: arrow_tq.runs.Run) -> None:
    session = run.session("late")
    with session.step() as step:
        step.put("x", np.arange(5), start=0)
    session.finalize()


def test_a_server_that_comes_back_is_found_again(tmp_path: Path) -> None:
    """Killed and restarted on its port between two calls: actions, puts, commits and reads go on."""
    with Server(tmp_path / "data", tmp_path / "memory") as first:
        store = arrow_tq.connect(first.url)
        run = store.run("r", fields=[X])
        session = run.session("s")
        with session.step() as step:
            step.put("x", np.arange(5), start=0)
        port = first.url.rpartition(":")[2]
        first.kill()
        with pytest.raises(errors.Unreachable, match=first.url):
            store.pressure()
        with pytest.raises(errors.Unavailable), session.step() as step:
            step.put("x", np.arange(5), start=5)
    with Server(tmp_path / "data", tmp_path / "memory", "--port", port) as second:
        with session.step() as step:
            step.put("x", np.arange(5) + 5, start=5)
        session.finalize()
        assert np.array_equal(run.claim(1).fetch(["x"])["x"][0], np.arange(10))
        store.close()
        assert second.stop() == 0


def test_puts_under_way_survive_a_restart(tmp_path: Path) -> None:
    """What a killed server had not acked is sent again to the one that follows it in time."""
    with Server(tmp_path / "data", tmp_path / "memory") as first:
        port = first.url.rpartition(":")[2]
        backend = FlightBackend(first.url, options=ClientOptions(retry_pause_s=3.0))
        run = Store(backend).run("r", fields=[X])
        chunks = [wire.make_chunk(X, "r", np.arange(200_000) + i, epoch=run.epoch) for i in range(60)]
        first.kill()
        handle = backend.put(X, chunks)
    with Server(tmp_path / "data", tmp_path / "memory", "--port", port) as second:
        handle.wait(60)
        assert Store(backend).stats()["chunks"] == 60
        backend.close()
        assert second.stop() == 0


FORKING = """
import os, sys
import numpy as np
import arrow_tq

url, name = sys.argv[1:]


def make_step(run, session):
    with run.session(session).step() as step:
        step.put("x", np.arange(5), start=0)


with arrow_tq.connect(url) as store:
    run = store.run(name, fields=[arrow_tq.Field("x", "int64")])
    for number in range(3):
        make_step(run, f"parent-{number}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                make_step(run, f"child-{number}")
                store.close()
                code = 0
            finally:
                os._exit(code)
        make_step(run, f"parent-{number}-too")
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"child {number}: {status}"
    names = run.sql("SELECT session_id FROM sessions").column(0).to_pylist()
    assert len(names) == 9, names
"""


def test_a_forked_child_connects_anew(server: Server, new_name: Callable[[], str]) -> None:
    """Puts, commits and calls before, in and after the fork, in parent and child.

    In a process of its own: what other tests left open of gRPC would not live through a fork.
    """
    arguments = [sys.executable, "-c", FORKING, server.url, new_name()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_store_that_nobody_closes_does_not_keep_the_process(server: Server) -> None:
    code = (
        "import arrow_tq, numpy as np\n"
        f"store = arrow_tq.connect({server.url!r})\n"
        "run = store.run('left-open', fields=[arrow_tq.Field('x', 'int64')])\n"
        "with run.session('s').step() as step: step.put('x', np.arange(5), start=0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
