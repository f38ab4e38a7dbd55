"""Who was answered together asks together again: what the next message of a commit stream waits for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from arrow_tq.client import commits
from arrow_tq.client.commits import Commits
from arrow_tq.client.connection import Connection

LONG_S = 30.0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Commits:
    monkeypatch.setattr(commits, "GATHER_S", LONG_S)
    return Commits(cast(Connection, SimpleNamespace(options=None)))


def test_the_next_message_waits_for_all_that_were_answered(stream: Commits) -> None:
    asked = threading.Event()

    def ask() -> None:
        for _ in range(3):
            time.sleep(0.01)
            stream._queue.append(cast(commits.Waiting, None))
        asked.set()

    threading.Thread(target=ask).start()
    stream._gather(3, 2 * LONG_S)
    assert asked.wait(LONG_S)
    assert len(stream._queue) == 3


def test_nobody_waits_for_one_alone_nor_when_the_stream_ends(stream: Commits) -> None:
    began = time.monotonic()
    stream._gather(1, 2 * LONG_S)
    stream._finishing = True
    stream._gather(3, 2 * LONG_S)
    assert time.monotonic() - began < LONG_S


def test_the_wait_is_a_part_of_what_the_last_message_took(stream: Commits) -> None:
    began = time.monotonic()
    stream._gather(3, 0.01)
    assert time.monotonic() - began < LONG_S
