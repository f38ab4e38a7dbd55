"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arrow_tq_schemas.commands import TaskSpec
from tests.catalog_scenes import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A catalog with the run ``demo``: tasks ``actor`` and ``critic``, which reads token ids alone."""
    scene = Scene(tmp_path / "catalog.sqlite")
    scene.run(tasks=[TaskSpec(name="actor"), TaskSpec(name="critic", fields=["token_ids"])])
    yield scene
    scene.catalog.close()
