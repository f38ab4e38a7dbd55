"""SIGKILL of the server in the middle of bundles: those that were acked are there, bit by bit."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq import errors, fields
from arrow_tq.testing.bundles import same, train_dict
from tests.serving import Server

Acked = dict[str, int]
"""Reference to the seed of its dict."""


def produce(url: str, seed: int, acked: Acked, deleted: set[str], stop: threading.Event) -> None:
    """Put bundles, and delete every third, until the server goes away."""
    try:
        with arrow_tq.connect(url) as store:
            while not stop.is_set():
                seed += 1
                ref = store.put_bundle(train_dict(50, seed=seed), run="load")
                acked[ref] = seed
                if seed % 3 == 0:
                    del acked[ref]
                    store.delete_bundle(ref)
                    deleted.add(ref)
    except (errors.Unavailable, errors.DeadlineExceeded):
        return


def kill_rounds(folder: Path, rounds: int, durability: str) -> None:
    chance = random.Random(rounds)
    acked: Acked = {}
    deleted: set[str] = set()
    for number in range(rounds + 1):
        with Server(folder / "data", folder / "memory") as server:
            with arrow_tq.connect(server.url) as store:
                store.run("load", fields=[fields.token_ids()], durability=durability)  # type: ignore[arg-type]
                for ref, seed in acked.items():
                    same(train_dict(50, seed=seed), store.get_bundle(ref))
                for ref in deleted:
                    with pytest.raises(errors.NotFound):
                        store.get_bundle(ref)
                if number == rounds:
                    break
            stop = threading.Event()
            arguments = [
                (server.url, number * 1000 + writer * 300, acked, deleted, stop) for writer in range(2)
            ]
            writers = [threading.Thread(target=produce, args=one) for one in arguments]
            for writer in writers:
                writer.start()
            time.sleep(chance.uniform(0.2, 0.6))
            server.kill()
            stop.set()
            for writer in writers:
                writer.join(60)
                assert not writer.is_alive()
    assert len(acked) > rounds


@pytest.mark.timeout(300)
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_no_acked_bundle_is_lost(tmp_path: Path, durability: str) -> None:
    kill_rounds(tmp_path, 2, durability)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 50, "process")
