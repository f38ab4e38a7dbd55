"""Which chunks of a client on the server's machine travel in one adopting call."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from hypothesis import given, strategies as st

from arrow_tq.client.commits import Commits
from arrow_tq.client.puts import Puts
from arrow_tq.client.samehost.adopter import CHUNKS_A_CALL_MAX, Adopter, Written
from arrow_tq.client.samehost.host import Host


@given(st.lists(st.integers(0, 3), min_size=1, max_size=2 * CHUNKS_A_CALL_MAX))
def test_a_call_takes_what_waits_of_one_file_in_order(files: Sequence[int]) -> None:
    adopter = Adopter(
        cast(Host, None), cast(Puts, None), cast(Commits, None), lambda item: None, lambda: False, 1.0
    )
    granted = [SimpleNamespace() for _ in range(4)]
    items = [
        cast(Written, SimpleNamespace(granted=granted[file], place=n, nbytes=1))
        for n, file in enumerate(files)
    ]
    adopter._queue.extend(items)
    taken: list[list[Written]] = []
    while adopter._queue:
        first = adopter._queue[0]
        taken.append(adopter._take())
        assert taken[-1][0] is first
        assert len(taken[-1]) <= CHUNKS_A_CALL_MAX
        assert all(item.granted is first.granted for item in taken[-1])
    for file in granted:
        mine = [item for item in items if item.granted is file]
        assert [item for call in taken for item in call if item.granted is file] == mine
    if len(items) <= CHUNKS_A_CALL_MAX:
        assert len(taken) == len(set(files))
