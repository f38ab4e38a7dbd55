"""The parts that keep a proxy's memory bounded, and its events whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from arrow_tq.proxy.budget import FREE_BYTES, Budget
from arrow_tq.proxy.config import ProxyConfig, load
from arrow_tq.proxy.headers import call_names, forwarded
from arrow_tq.proxy.replies import Replies, Reply
from arrow_tq.proxy.sse import Events, data_of
from arrow_tq.proxy.tree import Known, base_of_messages, base_of_tokens, digest_of, messages_digest
from arrow_tq_schemas.errors import InvalidInput


@given(
    st.lists(st.sampled_from([b"data: {}\n\n", b": c\n\n", b"data: a\r\n\r\n", b"event: x\ndata: b\n\n"])),
    st.data(),
)
def test_events_come_whole_however_the_stream_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    events = Events()
    found: list[bytes] = []
    for first, last in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += events.feed(raw[first:last])
    assert found == parts
    assert events.rest() == b""


def test_the_data_of_an_event() -> None:
    for event, expected in [(b"data: {}\n\n", b"{}"), (b"data:x\r\n\r\n", b"x"), (b": ping\n\n", None),
                            (b"data: a\ndata: b\n\n", None), (b"event: e\ndata: a\n\n", None)]:  # fmt: skip
        place = data_of(event)
        assert (None if place is None else event[place[0] : place[1]]) == expected


def test_bodies_share_a_budget_and_all_get_through() -> None:
    async def scene() -> tuple[int, int]:
        budget = Budget(8 * FREE_BYTES)
        most, done = 0, 0

        async def known(size: int) -> None:
            nonlocal most, done
            with budget.hold() as hold:
                await hold.expect(size)
                await hold.cover(size)
                most = max(most, budget.used_bytes)
                await asyncio.sleep(0)
            done += 1

        async def unknown(size: int) -> None:
            nonlocal most, done
            with budget.hold() as hold:
                for held in range(FREE_BYTES // 2, size + 1, FREE_BYTES // 2):
                    await hold.cover(held)
                    most = max(most, budget.used_bytes)
                    await asyncio.sleep(0)
                hold.grown()
                await asyncio.sleep(0)
            done += 1

        sizes = [FREE_BYTES * (1 + index % 7) for index in range(60)]
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task((known if index % 2 else unknown)(size)) for index, size in enumerate(sizes)
            ]
            await asyncio.sleep(0)
            for task in tasks[::9]:
                # A body whose agent is gone gives its part back, waiting or not.
                task.cancel()
        assert budget.used_bytes == 0 and not budget.growing.locked()
        return most, done

    most, done = asyncio.run(scene())
    assert most <= 8 * FREE_BYTES
    assert done >= 60 - 7


def test_one_body_larger_than_the_budget_waits_until_it_is_alone() -> None:
    async def scene() -> None:
        budget = Budget(10)
        await budget.take(4)
        large = asyncio.create_task(budget.take(100))
        await asyncio.sleep(0)
        assert not large.done()
        budget.give(4)
        await large
        assert budget.used_bytes == 100

    asyncio.run(scene())


def test_answers_are_kept_within_their_bound() -> None:
    replies = Replies(100)
    for number in range(10):
        replies.keep("s", f"c{number}", Reply([], b"x" * 30))
    assert replies.nbytes == 90
    assert replies.get("s", "c6") is None
    assert replies.get("s", "c9") is not None
    replies.keep("s", "large", Reply([], b"x" * 101))
    assert replies.get("s", "large") is None and replies.nbytes == 90
    replies.forget_session("s", [f"c{number}" for number in range(10)])
    assert replies.nbytes == 0


def test_a_prompt_is_placed_after_the_longest_path_that_it_begins_with() -> None:
    tokens = np.arange(100, dtype=np.int32)
    one = Known("1", None, 40, digest_of(tokens[:40]), 39, 1, messages_digest(["a"]))
    two = Known("2", one, 70, digest_of(tokens[:70]), 60, 3, messages_digest(["a", "b", "c"]))
    base = base_of_tokens(two, tokens)
    assert (base.step, base.tokens, base.covered) == (two, 70, 60)
    changed = tokens.copy()
    changed[50] = 7
    assert base_of_tokens(two, changed).step is one
    changed[3] = 7
    assert base_of_tokens(two, changed).step is None
    assert base_of_tokens(two, tokens[:69]).step is one
    assert base_of_messages(two, ["a", "b", "c", "d"]).step is two
    assert base_of_messages(two, ["a", "x", "c", "d"]).step is one
    assert base_of_messages(None, ["a"]).step is None
    # Of a step that another process committed nothing is known: everything is asked for.
    assert base_of_tokens(Known("3", None), tokens).covered == 0


def test_names_in_headers() -> None:
    names = call_names([(b"x-arrow-tq-session", b"s/1"), (b"x-arrow-tq-parent", b""), (b"accept", b"*/*")])
    assert names is not None and (names.session, names.parent, names.step) == ("s/1", "", None)
    assert call_names([(b"x-arrow-tq-step", b"c")]) is None
    for pairs in (
        [(b"x-arrow-tq-session", b"s~0")],
        [(b"x-arrow-tq-session", b"\xff")],
        [(b"x-arrow-tq-session", b"s"), (b"x-arrow-tq-session", b"t")],
        [(b"x-arrow-tq-session", b"s"), (b"x-arrow-tq-step", b"call~2")],
        [(b"x-arrow-tq-session", b"s"), (b"x-arrow-tq-group", b"g" * 300)],
    ):
        with pytest.raises(InvalidInput):
            call_names(pairs)


def test_headers_of_one_hop_stay_there() -> None:
    headers = [
        (b"connection", b"x-a, close"),
        (b"x-a", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"b", b"2"),
        (b"b", b"3"),
    ]
    assert forwarded(headers) == [(b"b", b"2"), (b"b", b"3")]


def test_settings_come_from_flags_then_the_environment_then_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text('upstream = "http://file"\nstore = "grpc://file:1"\nport = 1\ncalls_max = 5\n')
    monkeypatch.setenv("ARROW_TQ_PROXY_PORT", "2")
    monkeypatch.setenv("ARROW_TQ_PROXY_UPSTREAM", "http://env")
    config = load({"port": 3, "host": None}, file)
    assert (config.port, config.upstream, config.store, config.calls_max) == (
        3,
        "http://env",
        "grpc://file:1",
        5,
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "setting upstream"),
        ({"upstream": "u", "store": "s", "engine": "x"}, "setting engine"),
        ({"upstream": "u", "store": "s", "unknown": 1}, "setting unknown"),
        ({"upstream": "u", "store": "s", "inflight_bytes_max": 1 << 21}, "response_bytes_max"),
    ],
)
def test_settings_that_do_not_fit_are_named(flags: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        load(flags)


def test_every_setting_is_documented() -> None:
    for name, info in ProxyConfig.model_fields.items():
        assert info.description, name
