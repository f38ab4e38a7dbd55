"""TLS, mutual TLS and Unix sockets: real servers, certificates of all kinds."""

from __future__ import annotations

import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import ClientOptions, Tls
from arrow_tq.interface import Store
from tests.certificates import Authority
from tests.serving import Server

QUICK = ClientOptions(connect_s=5.0)
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ca")


def serve(folder: Path, authority: Authority, *more: object, days: int = 30) -> Server:
    pair = authority.issue(f"server{days}", days)
    arguments = ["--tls-cert", pair.cert, "--tls-key", pair.key, *more]
    return Server(folder / "data", folder / "memory", *map(str, arguments))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("tls"), authority) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("mutual"), authority, "--tls-client-ca", authority.cert) as running:
        yield running
        assert running.stop() == 0


def round_trip(store: Store) -> None:
    """Write a step and read it back, through every kind of call."""
    run = store.run("r", fields=[fields.token_ids()])
    tokens = np.arange(50, dtype=np.int32)
    session = run.session("s")
    with session.step(sampled=(0, 50)) as step:
        step.put("token_ids", tokens, start=0)
    session.finalize()
    batch = run.claim(10)
    np.testing.assert_array_equal(batch.fetch(["token_ids"])["token_ids"][0], tokens)
    assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 1}]


def test_a_client_that_knows_the_ca_works(server: Server, authority: Authority) -> None:
    assert server.url.startswith("grpc+tls://") and server.http_url.startswith("https://")
    with arrow_tq.connect(server.url, tls=Tls(ca=authority.cert), options=QUICK) as store:
        round_trip(store)


def test_a_client_may_choose_not_to_verify(server: Server) -> None:
    with arrow_tq.connect(server.url, tls=Tls(verify=False), options=QUICK) as store:
        assert store.pressure().fill >= 0


def test_another_ca_is_refused(server: Server, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    with pytest.raises(errors.Unreachable, match=r"grpc\+tls"):
        arrow_tq.connect(server.url, tls=Tls(ca=other.cert), options=QUICK)


def test_no_ca_at_all_is_refused(server: Server) -> None:
    with pytest.raises(errors.Unreachable):
        arrow_tq.connect(server.url, options=QUICK)


def test_a_client_without_tls_is_refused(server: Server) -> None:
    with pytest.raises(errors.Unreachable):
        arrow_tq.connect(server.url.replace("grpc+tls", "grpc"), options=QUICK)


def test_an_expired_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    with serve(tmp_path, authority, days=-1) as running:
        with pytest.raises(errors.Unreachable):
            arrow_tq.connect(running.url, tls=Tls(ca=authority.cert), options=QUICK)
        assert running.stop() == 0


def test_mutual_tls_takes_a_client_with_a_certificate(mutual: Server, authority: Authority) -> None:
    mine = authority.issue("client")
    with arrow_tq.connect(mutual.url, tls=Tls(authority.cert, mine.cert, mine.key), options=QUICK) as store:
        round_trip(store)


def test_mutual_tls_refuses_the_others(mutual: Server, authority: Authority, tmp_path: Path) -> None:
    stranger, late = Authority(tmp_path, "stranger").issue("client"), authority.issue("late", days=-1)
    with pytest.raises(errors.Unreachable):
        arrow_tq.connect(mutual.url, tls=Tls(ca=authority.cert), options=QUICK)
    for pair in (stranger, late):
        with pytest.raises(errors.Unreachable):
            arrow_tq.connect(mutual.url, tls=Tls(authority.cert, pair.cert, pair.key), options=QUICK)


def test_the_http_port_speaks_tls_as_well(server: Server, mutual: Server, authority: Authority) -> None:
    trusting = ssl.create_default_context(cafile=str(authority.cert))
    with urllib.request.urlopen(f"{server.http_url}/readyz", context=trusting, timeout=10) as answer:
        assert answer.read() == b"ok\n"
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        urllib.request.urlopen(f"{mutual.http_url}/readyz", context=trusting, timeout=10)
    mine = authority.issue("scraper")
    trusting.load_cert_chain(mine.cert, mine.key)
    with urllib.request.urlopen(f"{mutual.http_url}/readyz", context=trusting, timeout=10) as answer:
        assert answer.read() == b"ok\n"


def test_what_cannot_work_is_refused_before_it_is_tried(authority: Authority) -> None:
    mine = authority.issue("skipping")
    with pytest.raises(errors.InvalidInput, match="verify=False"):
        Tls(cert=mine.cert, key=mine.key, verify=False)
    with pytest.raises(errors.InvalidInput, match="verify=False"):
        Tls(ca=authority.cert, verify=False)
    with pytest.raises(errors.InvalidInput, match="together"):
        Tls(cert=mine.cert)
    with pytest.raises(errors.InvalidInput, match="grpc\\+tls"):
        arrow_tq.connect("grpc://127.0.0.1:1", tls=Tls(ca=authority.cert))
    with pytest.raises(errors.InvalidInput, match="No such file"):
        arrow_tq.connect("grpc+tls://127.0.0.1:1", tls=Tls(ca="nowhere.pem"))


def test_a_key_of_another_certificate_does_not_start(tmp_path: Path, authority: Authority) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(AssertionError, match="setting tls_cert"):
        Server(tmp_path / "d", tmp_path / "m", "--tls-cert", str(one.cert), "--tls-key", str(other.key))


def test_a_unix_socket_works_and_is_taken_over_from_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "tq.sock"
    arguments = (tmp_path / "data", tmp_path / "memory", "--unix-socket", str(path))
    with Server(*arguments) as running:
        assert running.url == f"grpc+unix://{path}"
        with arrow_tq.connect(running.url) as store:
            round_trip(store)
        running.kill()
    with Server(*arguments) as running, arrow_tq.connect(running.url) as store:
        assert store.run("r").sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 1}]
        with pytest.raises(AssertionError, match="another process serves it"):
            Server(tmp_path / "data2", tmp_path / "memory2", "--unix-socket", str(path))
        assert running.stop() == 0
