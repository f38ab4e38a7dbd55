"""The conformance suite through a real server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import arrow_tq
from arrow_tq.interface import Store
from arrow_tq.testing.conformance import StoreConformance


class TestRemoteStore(StoreConformance):
    @pytest.fixture
    def store(self, server_url: str) -> Iterator[Store]:
        with arrow_tq.connect(server_url) as store:
            yield store
