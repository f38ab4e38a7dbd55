"""The conformance suite on a store opened in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import arrow_tq
from arrow_tq.interface import Store
from arrow_tq.testing.conformance import StoreConformance


class TestEmbeddedStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with arrow_tq.open(tmp_path / "store", capacity_bytes=2 << 30) as store:
            yield store
