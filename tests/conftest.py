"""What holds for every test."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one more than there are cores, since many tests wait for processes most of the time."""
    return (os.cpu_count() or 1) + 1
