"""Small chunks that wait for others: how long, and what ends it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

from arrow_tq.client.pending import Company, PendingPut
from arrow_tq.client.puts import Puts
from arrow_tq.client.samehost.adopter import Adopter, Written
from arrow_tq.client.samehost.host import Host

LONG_S = 30.0


def test_the_first_wakes_and_so_does_the_one_that_makes_it_enough() -> None:
    company = Company(chunks_min=3, bytes_min=1000, linger_s=LONG_S)
    assert [company.add(10) for _ in range(3)] == [True, False, True]
    assert company.wait_s == 0.0
    company.take(10)
    assert company.wait_s > 0


def test_bytes_are_enough_too() -> None:
    company = Company(chunks_min=100, bytes_min=1000, linger_s=LONG_S)
    company.add(10)
    assert 0 < company.wait_s <= LONG_S
    assert company.add(990)
    assert company.wait_s == 0.0


def test_who_waits_ends_it_until_all_have_left() -> None:
    company = Company(chunks_min=100, bytes_min=1000, linger_s=LONG_S)
    assert not company.hurry(), "there is nothing to hurry"
    company.add(1)
    company.add(1)
    assert company.hurry()
    company.take(1)
    assert company.wait_s == 0.0
    company.take(1)
    company.add(1)
    assert company.wait_s > 0


def test_nothing_waits_longer_than_the_linger() -> None:
    company = Company(chunks_min=100, bytes_min=1000, linger_s=0.01)
    company.add(1)
    time.sleep(0.02)
    assert company.wait_s == 0.0


def test_chunks_put_one_by_one_are_adopted_together_as_soon_as_somebody_waits() -> None:
    calls: list[int] = []
    told = threading.Event()

    class Grouped(Adopter):
        """Settles at once what a call would have adopted."""

        def _adopt(self, files: list[list[Written]]) -> None:  # type: ignore[override]
            calls.append(sum(map(len, files)))
            self._settle((one, None) for items in files for one in items)
            told.set()

    adopter = Grouped(
        cast(Host, None), cast(Puts, None), lambda commands: [], lambda item: None, lambda: False, LONG_S
    )
    # What follows tells hurrying apart from waiting long enough.
    adopter._company.linger_s = LONG_S
    granted = SimpleNamespace(unadopted=0, let_go=lambda: None)
    handles = [PendingPut(1, adopter.hurry) for _ in range(10)]
    for handle in handles:
        adopter.submit([cast(Written, SimpleNamespace(granted=granted, nbytes=1, handle=handle))])
    assert not told.wait(0.1), "nobody waits for them yet"
    for handle in handles:
        handle.wait(LONG_S / 2)
    assert calls == [10]
    assert granted.unadopted == 0
    adopter.close(1.0)
