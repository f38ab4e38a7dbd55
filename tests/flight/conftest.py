"""Real server processes, one a module, or one a test where a test needs a store of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq.interface import Store
from tests.serving import Server


def stopped_cleanly(server: Server) -> None:
    """SIGTERM ends it with 0, and nothing in it went wrong that it did not foresee."""
    assert server.stop() == 0
    assert "handler failed" not in server.log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with Server(folder / "data", folder / "memory") as running:
        yield running
        stopped_cleanly(running)


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[Store]:
    with arrow_tq.connect(server.url) as store:
        yield store


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    """A client of one test alone."""
    with arrow_tq.connect(server.url) as store:
        yield store


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    with Server(tmp_path / "data", tmp_path / "memory") as running:
        yield running.url
        stopped_cleanly(running)


@pytest.fixture(scope="session")
def new_name() -> Callable[[], str]:
    """Run names that no other test uses."""
    numbers = itertools.count()
    return lambda: f"run-{next(numbers)}"
