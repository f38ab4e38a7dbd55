"""Servers that show each other tokens and certificates; and a catalog that is a shard as well."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.flight as flight
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import ClientOptions, Tls
from arrow_tq.tokens import check_rights, new_token, token_line
from arrow_tq_schemas import cluster as k
from arrow_tq_schemas.spans import Span
from tests.certificates import Authority
from tests.clusters import Cluster
from tests.flight import wire
from tests.flight.test_tls import round_trip

QUICK = ClientOptions(connect_s=5.0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_catalog_and_shards_know_each_other_by_token_and_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca", "ca")
    server, mine = authority.issue("server"), authority.issue("client")
    tokens = {name: new_token() for name in ("cluster", "r", "other")}
    lines = [
        token_line(tokens["cluster"], "cluster", [], check_rights("admin")),
        token_line(tokens["r"], "r", ["r"], check_rights("read,write")),
        token_line(tokens["other"], "other", ["other"], check_rights("read,write")),
    ]
    file = tmp_path / "tokens.toml"
    file.write_text("\n".join(["[tokens]", *lines]))
    monkeypatch.setenv("ARROW_TQ_CLUSTER_TOKEN", tokens["cluster"])
    tls = Tls(authority.cert, mine.cert, mine.key)
    arguments = [
        *("--tokens-file", file, "--tls-cert", server.cert, "--tls-key", server.key),
        *("--tls-client-ca", authority.cert, "--set", f"cluster_ca={authority.cert}"),
    ]
    with Cluster(tmp_path, 1, *map(str, arguments), token=tokens["r"], tls=tls) as cluster:
        with arrow_tq.connect(cluster.url, tokens["r"], QUICK, tls) as store:
            round_trip(store)
            run = store.run("r")
            (row,) = run.sql("SELECT shard, chunk_id FROM chunks").to_pylist()
            assert row["shard"] == 1
        url = cluster.shards[0].url
        # The shard's own door: the walls between runs stand there too, and what is the catalog's is nobody's.
        options = flight.FlightCallOptions(
            timeout=20, headers=[(b"authorization", f"Bearer {tokens['other']}".encode())]
        )
        spans = [Span(0, wire.IDS.next(1), 0, 5)]
        asked = k.ConfirmChunks(number=1, epoch=1, ids=[row["chunk_id"]], run="other")
        with flight.FlightClient(url, **tls.flight_arguments()) as client:
            ticket = wire.span_ticket(fields.token_ids(), "r", spans).model_dump_json().encode()
            for attempt in (
                lambda: client.do_get(flight.Ticket(ticket), options).read_all(),
                lambda: list(
                    client.do_action(flight.Action(asked.verb, asked.model_dump_json().encode()), options)
                ),
            ):
                with pytest.raises(flight.FlightError) as caught:
                    attempt()
                assert isinstance(wire.told(caught.value), errors.PermissionDenied)


def test_a_catalog_that_is_a_shard_too_reads_both(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1, role="all") as cluster, arrow_tq.connect(cluster.url) as store:
        assert [one.number for one in cluster.map().shards] == [0, 1]
        run = store.run("r", fields=[fields.token_ids()])
        session = run.session("s")
        tokens = np.arange(60, dtype=np.int32)
        for index in range(6):
            session.pin_shard(index % 2)
            with session.step(id=str(index), sampled=(index * 10, index * 10 + 10)) as step:
                step.put("token_ids", tokens[index * 10 : index * 10 + 10], start=index * 10)
        session.finalize()
        batch = run.claim(10)
        np.testing.assert_array_equal(batch.fetch(["token_ids"])["token_ids"][0], tokens)
        info = flight.connect(cluster.url).get_flight_info(flight.FlightDescriptor.for_path("r", "token_ids"))
        assert {_text(one.locations[0].uri) for one in info.endpoints} == {
            cluster.url,
            cluster.shards[0].url,
        }
        batch.release()
        cluster.shards[0].kill()
        # Both are one store: what the living shard holds goes on.
        session = run.session("again")
        session.pin_shard(0)
        with session.step(id="1") as step:
            step.put("token_ids", tokens, start=0)
        assert session.finalize()[0].num_tokens == 60


def _text(uri: bytes | str) -> str:
    return uri if isinstance(uri, str) else uri.decode()
