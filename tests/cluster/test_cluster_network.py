"""A shard whose network is cut under load: of the others nothing is touched, its own is pending meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.testing.bundles import same
from tests.cluster.living import Living
from tests.cluster.namespaces import Net, why_not
from tests.cluster.test_cluster_bundles import shard_of
from tests.cluster.test_cluster_faults import (
    TURN,
    Load,
    check_acked,
    check_dead,
    check_session,
    readable_again,
    spread_session,
    tokens_of,
)
from tests.clusters import numbers_by_url, wait_up
from tests.serving import Server, quiet_ports

LEASE_S = 2.0
SHARDS = 3


class Site:
    """A catalog on this machine, and shards each in a network of its own, all in processes of their own."""

    def __init__(self, folder: Path, net: Net, stack: ExitStack) -> None:
        more = ["--insecure", "--set", "drain_s=3"]
        role = ["--role", "catalog", "--set", f"lease_s={LEASE_S}", "--port", str(quiet_ports(1)[0])]
        self.catalog = stack.enter_context(
            Server(*folders(folder, "catalog"), "--host", net.host, *more, *role)
        )
        self.shards = [
            stack.enter_context(
                Server(
                    *(*folders(folder, f"shard{index}"), "--host", net.address(index), *more),
                    *("--role", "shard", "--join", self.catalog.url, "--set", f"host_id=net-{index}"),
                    prefix=net.command(index),
                )
            )
            for index in range(SHARDS)
        ]
        wait_up(self.catalog.url, SHARDS)
        self.numbers = numbers_by_url(self.catalog.url, [server.url for server in self.shards])


def folders(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / name / "data", folder / name / "memory"


@pytest.fixture
def net() -> Iterator[Net]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Net(SHARDS) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shard_is_cut_off_and_comes_back(tmp_path: Path, net: Net) -> None:
    options = ClientOptions(connect_s=3.0)
    with ExitStack() as stack:
        site = Site(tmp_path, net, stack)
        store = stack.enter_context(arrow_tq.connect(site.catalog.url, options=options))
        run = store.run("load", fields=[fields.token_ids()])
        for number in site.numbers:
            spread_session(run, f"on-{number}", [number])
        spread_session(run, "on-both", site.numbers)
        bundles = bundles_by_shard(store)
        load = Load(site.catalog.url)
        threads = load.start()
        try:
            load.goes_on()
            for index, number in enumerate(site.numbers[:2]):
                living = [one for one in site.shards if one is not site.shards[index]]
                with Living([site.catalog, *living]):
                    cut(store, site, net, index, bundles)
                    load.goes_on()
                net.plug(index)
                readable_again(run, f"on-{number}")
                for other in site.numbers:
                    check_session(run, f"on-{other}", [0])
                check_session(run, "on-both", [0, 1, 2])
                same({"x": [1, 2]}, store.get_bundle(bundles[number]))
                wait_up(site.catalog.url, SHARDS)
                load.goes_on()
        finally:
            load.stop.set()
            for thread in threads:
                thread.join(120)
        assert not load.wrong
        check_acked(run, load)


def bundles_by_shard(store: Store) -> dict[int, str]:
    """One on each shard."""
    found: dict[int, str] = {}
    end = time.monotonic() + 30
    while len(found) < SHARDS:
        assert time.monotonic() < end, f"all bundles are on shards {list(found)}"
        ref = store.put_bundle({"x": [1, 2]})
        found.setdefault(shard_of(ref), ref)
    return found


def cut(store: Store, site: Site, net: Net, index: int, bundles: dict[int, str]) -> None:
    """Pull one cable, and look at everything while it is off."""
    run, number = store.run("load"), site.numbers[index]
    net.pull(index)
    others = [one for one in site.numbers if one != number]
    for other in others:
        check_session(run, f"on-{other}", [0])
        same({"x": [1, 2]}, store.get_bundle(bundles[other]))
    check_dead(run, number)
    with pytest.raises(errors.ChunkPending, match=f"shard {number} at "):
        store.get_bundle(bundles[number])
    # Its process lives, and goes on as before once the catalog hears of it again.
    assert site.shards[index].process.poll() is None
    wait_up(site.catalog.url, SHARDS - 1)
    session = run.session(f"while-{number}-is-away")
    for step in range(4):
        with session.step(id=str(step), sampled=(step * TURN, (step + 1) * TURN)) as one:
            one.put("token_ids", tokens_of(session.id, step), start=step * TURN)
    session.finalize()
    found = run.sql(f"SELECT DISTINCT shard FROM chunks WHERE session_id = '{session.id}'").column(0)
    assert set(found.to_pylist()) <= set(others)
    column = run.table([session.id], fields=["token_ids"])["token_ids"]
    wanted = np.concatenate([tokens_of(session.id, step) for step in range(4)])
    np.testing.assert_array_equal(np.asarray(column[0].as_py(), np.int32), wanted)
