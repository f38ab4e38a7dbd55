"""The conformance suite through a real server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import arrow_tq
from arrow_tq.client import ClientOptions
from arrow_tq.interface import Store
from arrow_tq.testing.conformance import StoreConformance


class TestRemoteStore(StoreConformance):
    """Over the wire, as from another machine."""

    @pytest.fixture
    def store(self, server_url: str) -> Iterator[Store]:
        with arrow_tq.connect(server_url, options=ClientOptions(same_host=False)) as store:
            yield store


class TestSameHostStore(StoreConformance):
    """From the server's own machine: payload that is read never travels."""

    @pytest.fixture
    def store(self, server_url: str) -> Iterator[Store]:
        with arrow_tq.connect(server_url) as store:
            yield store
            assert store.stats()["client_wire_reads"] == 0
