"""Tokens and TLS of a store on Ray: each door is tried, from the driver and from workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import ClientOptions, Tls
from arrow_tq.tokens import check_rights, new_token, token_line
from tests.certificates import Authority
from tests.cluster.rays import ray_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]
SETTINGS = {"lease_s": 2.0, "drain_s": 3.0}
QUICK = ClientOptions(connect_s=3.0)
TOKENS = np.arange(8, dtype=np.int32)


@dataclass(frozen=True)
class Keys:
    """Files and tokens that operators would hand out."""

    tokens_file: Path
    tokens: dict[str, str]
    authority: Authority
    cert: Path
    key: Path
    mine: Tls


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def keys(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    import ray

    folder = tmp_path_factory.mktemp("keys")
    authority = Authority(folder / "ca", "ca")
    server = authority.issue("server", addresses=("127.0.0.1", ray.util.get_node_ip_address()))
    client = authority.issue("client")
    tokens = {name: new_token() for name in ("cluster", "r", "other", "stranger")}
    lines = [
        token_line(tokens["cluster"], "cluster", [], check_rights("admin")),
        token_line(tokens["r"], "r", ["r"], check_rights("read,write")),
        token_line(tokens["other"], "other", ["other"], check_rights("read,write")),
    ]
    file = folder / "tokens.toml"
    file.write_text("\n".join(["[tokens]", *lines]))
    mine = Tls(authority.cert, client.cert, client.key)
    return Keys(file, tokens, authority, server.cert, server.key, mine)


def test_doors_are_chosen_and_fit(nodes: Any, keys: Keys, tmp_path: Path) -> None:
    from arrow_tq.adapters import ray as on_ray

    with pytest.raises(TypeError, match="doors"):
        on_ray.start(tmp_path)  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidInput, match="admin over every run"):
        on_ray.start(tmp_path, doors=on_ray.Doors(keys.tokens_file))
    with pytest.raises(errors.InvalidInput, match="setting insecure: it is given as doors"):
        on_ray.start(tmp_path, doors=on_ray.Doors(keys.tokens_file), token="t", settings={"insecure": True})
    with pytest.raises(errors.InvalidInput, match="given together"):
        on_ray.Doors(tls_cert=keys.cert)
    with pytest.raises(errors.InvalidInput, match="a CA without tls_cert"):
        on_ray.Doors(cluster_ca=keys.cert)
    # What only the server can see is said to whoever starts it, and nothing is left.
    with pytest.raises(errors.Unavailable, match=r"setting tls_cert: .*missing\.pem"):
        on_ray.start(tmp_path, doors=on_ray.Doors(tls_cert=tmp_path / "missing.pem", tls_key=keys.key))
    with pytest.raises(errors.Unavailable, match="no_such_setting"):
        on_ray.start(tmp_path, doors=on_ray.OPEN, settings={"no_such_setting": 1})
    with pytest.raises(errors.Unauthenticated):
        on_ray.start(tmp_path, doors=on_ray.Doors(keys.tokens_file), token=keys.tokens["stranger"])
    with pytest.raises(errors.NotFound):
        on_ray.connect()


def test_tokens(nodes: Any, keys: Keys, tmp_path: Path) -> None:
    from arrow_tq.adapters import ray as on_ray

    tokens = keys.tokens
    on_ray.start(
        tmp_path / "data",
        doors=on_ray.Doors(keys.tokens_file),
        name="tokens",
        memory_root=tmp_path / "memory",
        settings=SETTINGS,
        token=tokens["cluster"],
    )
    try:
        write_and_read("tokens", tokens["r"], None)
        for token in (None, tokens["stranger"]):
            with pytest.raises(errors.Unauthenticated):
                on_ray.connect("tokens", token)
            with pytest.raises(errors.Unauthenticated):
                on_ray.read_segments("r", "token_ids", name="tokens", token=token)
        with on_ray.connect("tokens", tokens["other"]) as store, pytest.raises(errors.PermissionDenied):
            store.run("r")
        with pytest.raises(errors.PermissionDenied):
            on_ray.read_segments("r", "token_ids", name="tokens", token=tokens["other"])
    finally:
        on_ray.stop("tokens")


@pytest.mark.parametrize("mutual", ["server", "both"])
def test_tls(nodes: Any, keys: Keys, tmp_path: Path, mutual: str) -> None:
    from arrow_tq.adapters import ray as on_ray

    doors = on_ray.Doors(
        keys.tokens_file,
        keys.cert,
        keys.key,
        keys.authority.cert if mutual == "both" else None,
        keys.authority.cert,
    )
    token = keys.tokens["r"]
    url = on_ray.start(
        tmp_path / "data",
        doors=doors,
        name="tls",
        memory_root=tmp_path / "memory",
        settings=SETTINGS,
        token=keys.tokens["cluster"],
    )
    try:
        assert url.startswith("grpc+tls://")
        right = keys.mine if mutual == "both" else Tls(keys.authority.cert)
        write_and_read("tls", token, right)
        wrong = [None] if mutual == "server" else [None, Tls(keys.authority.cert)]
        for tls in wrong:
            with pytest.raises(errors.Unreachable):
                on_ray.connect("tls", token, QUICK, tls)
        with pytest.raises(errors.Unreachable):
            arrow_tq.connect(url.replace("grpc+tls", "grpc"), token, QUICK)
        with pytest.raises(errors.Unauthenticated):
            on_ray.connect("tls", None, QUICK, right)
    finally:
        on_ray.stop("tls")


def write_and_read(name: str, token: str, tls: Tls | None) -> None:
    """A worker writes with its token; its rows are read here, by a worker, and as a dataset."""
    import ray

    from arrow_tq.adapters import ray as on_ray

    @ray.remote(num_cpus=0)
    def write() -> None:
        with on_ray.connect(name, token, tls=tls) as store:
            session = store.run("r", fields=[fields.token_ids()]).session("s")
            with session.step(id="0", sampled=(0, 8)) as step:
                step.put("token_ids", TOKENS, start=0)
            session.finalize()

    ray.get(write.remote(), timeout=60)
    with on_ray.connect(name, token, tls=tls) as store:
        table = store.run("r").table(["s"], fields=["token_ids"])
        np.testing.assert_array_equal(table["token_ids"][0].as_py(), TOKENS)
    rows = on_ray.read_segments("r", "token_ids", name=name, token=token, tls=tls).take_all()
    got = [row["token_ids"] for row in sorted(rows, key=lambda row: int(row["position"]))]
    np.testing.assert_array_equal(got, TOKENS)
