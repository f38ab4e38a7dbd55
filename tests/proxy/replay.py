"""Agents that replay recorded trajectories through a proxy, and keep their own account of it.

Each rollout keeps its own tree of calls with their tokens. ``expected`` says from that tree alone which
segments the store must have; ``check`` compares every fetched value with arrays made here.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from arrow_tq.runs import Run
from tests.proxy.agents import GROUP, PARENT, RECORDED, SESSION, STEP, events, without_reference
from tests.proxy.upstream_engine import Ids, Sizes, experts_of, logprobs_of, render, replayed

SHARED = Path(os.environ.get("ARROW_TQ_SHARED", Path(__file__).parents[3] / "shared"))
TAU_BENCH = SHARED / "data" / "tau_bench_airline.jsonl.gz"
needs_trajectories = pytest.mark.skipif(
    not TAU_BENCH.exists(), reason=f"{TAU_BENCH} is missing (ARROW_TQ_SHARED names its folder)"
)
TIMEOUT_S = 600.0
RETRY_S = 0.25
RETRY_FOR_S = 600.0


@dataclass(frozen=True, slots=True)
class Upset:
    """How often things happen that are not plain turns, each a probability a turn (aborts: a rollout)."""

    branch: float = 0.12
    compaction: float = 0.06
    repeat: float = 0.1
    """The answer came, the agent asks again all the same."""
    lost: float = 0.06
    """The agent gives up waiting, and asks again."""
    abort: float = 0.05


@dataclass(slots=True, eq=False)
class Call:
    """One model call as its agent knows it."""

    name: str
    parent: Call | None
    tokens: Ids
    """Prompt and completion."""
    sampled: int
    """Where the completion begins."""
    cut: bool
    """Whether its prompt departs from its parent's tokens."""


@dataclass(slots=True, eq=False)
class Tally:
    """What happened, all rollouts together."""

    counts: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0


class Rollout:
    """One trajectory's agent."""

    def __init__(self, number: int, line: dict[str, Any], upset: Upset, turns_max: int, tally: Tally) -> None:
        self.session = f"task-{line['task_id']}/trial-{line['trial']}"
        self.group = f"task-{line['task_id']}"
        self.reward = float(line["reward"])
        self.messages: list[dict[str, Any]] = line["messages"]
        self.calls: list[Call] = []
        self.aborted = False
        self._upset = upset
        self._turns_max = turns_max
        self._tally = tally
        self._rng = np.random.default_rng([11, number])
        self._chats = number % 2 == 1
        # Half of the agents say where each call goes, and only those branch.
        self._tells = number % 4 < 2
        self._aborts = self._rng.random() < upset.abort

    async def run(self, client: httpx.AsyncClient) -> None:
        """Play the trajectory and finalize, or abort on the way."""
        history: list[dict[str, Any]] = []
        last: Call | None = None
        turns = 0
        for message in self.messages:
            if message["role"] != "assistant":
                history = [*history, message]
                continue
            if turns == self._turns_max or (self._aborts and turns == 2):
                break
            shortened = self._happens(self._upset.compaction) and turns > 1
            if shortened:
                history = self._compacted(history)
            parent = last
            branch = None
            if self._tells and parent is not None and not shortened and self._happens(self._upset.branch):
                branch = self._call(client, history, None, parent, False, f"turn-{turns}/other")
            main = self._call(client, history, message, parent, shortened, f"turn-{turns}")
            if branch is not None:
                self._tally.counts["branches"] += 1
                last, _ = await asyncio.gather(main, branch)
            else:
                last = await main
            self._tally.counts["compactions"] += shortened
            history = [*history, message]
            turns += 1
        await self._end(client)

    def expected(self) -> list[bytes]:
        """Tokens of every segment: of each call that none continues."""
        continued = {call.parent for call in self.calls if not call.cut}
        return sorted(call.tokens.tobytes() for call in self.calls if call not in continued)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(call.tokens) - call.sampled for call in self.calls)

    async def _call(
        self,
        client: httpx.AsyncClient,
        history: list[dict[str, Any]],
        answer: dict[str, Any] | None,
        parent: Call | None,
        cut: bool,
        name: str,
    ) -> Call:
        if answer is None:
            answer = {"role": "assistant", "content": f"Something else. {self._rng.integers(1 << 30)}"}
        prompt, completion = render(history), replayed(answer)
        stream = self._happens(0.3)
        if self._chats:
            path = "/v1/chat/completions"
            body = {"model": "m", "messages": history, "stream": stream}
            body["replay"] = {key: answer.get(key) for key in ("content", "tool_calls")}
        else:
            path = "/generate"
            body = {"input_ids": prompt.tolist(), "replay": completion.tolist(), "stream": stream}
        headers = {SESSION: self.session, GROUP: self.group, STEP: name}
        if self._tells:
            headers[PARENT] = "" if parent is None else parent.name
        content = json.dumps(body).encode()
        if self._happens(self._upset.lost):
            await self._lose(client, path, content, headers)
        raw = await self._post(client, path, content, headers)
        if self._happens(self._upset.repeat):
            self._tally.counts["repeated calls"] += 1
            again = await self._post(client, path, content, headers)
            # A proxy that was killed meanwhile made the call anew, as another attempt.
            assert without_reference(again)[0] == without_reference(raw)[0]
        self._check_answer(raw, stream, answer, completion)
        call = Call(name, parent, np.concatenate([prompt, completion]), len(prompt), cut)
        self.calls.append(call)
        self._tally.counts["calls"] += 1
        self._tally.received_bytes += len(raw)
        return call

    async def _post(
        self, client: httpx.AsyncClient, path: str, content: bytes, headers: dict[str, str]
    ) -> bytes:
        """Ask until there is an answer, as agents do while something restarts."""
        until = asyncio.get_running_loop().time() + RETRY_FOR_S
        while True:
            try:
                response = await client.post(path, content=content, headers=headers)
            except httpx.TransportError as error:
                failed = repr(error)
            else:
                whole = response.status_code == 200 and (
                    b"text/event-stream" not in response.headers["content-type"].encode()
                    or response.content.endswith(b"data: [DONE]\n\n")
                )
                if whole:
                    assert response.headers.get(RECORDED) != "no"
                    return response.content
                failed = f"{response.status_code} {response.text[-300:]}"
                assert response.status_code in (200, 502, 503, 504), failed
            assert asyncio.get_running_loop().time() < until, failed
            self._tally.counts["tried again"] += 1
            await asyncio.sleep(RETRY_S)

    async def _lose(
        self, client: httpx.AsyncClient, path: str, content: bytes, headers: dict[str, str]
    ) -> None:
        self._tally.counts["lost answers"] += 1
        try:
            async with asyncio.timeout(float(self._rng.random()) * 0.1):
                await client.post(path, content=content, headers=headers)
        except (TimeoutError, httpx.TransportError):
            return

    def _check_answer(self, raw: bytes, stream: bool, answer: dict[str, Any], completion: Ids) -> None:
        """The agent gets its answer, a reference, and nothing of the payload."""
        assert b"routed_experts" not in raw.replace(b'"routed_experts":{"start"', b"")
        if not self._chats:
            told = events(raw) if stream else [json.loads(raw)]
            last = told[-1]
            # Each event has all so far, or (an engine started so) what is new.
            joined = [token for event in told for token in event["output_ids"]]
            assert completion.tolist() in (last["output_ids"], joined)
            assert "output_token_logprobs" not in last["meta_info"]
        elif stream:
            told = events(raw)
            assert told[0]["choices"][0]["delta"].get("content") == answer.get("content")
            last = told[-1]
        else:
            last = json.loads(raw)
            assert last["choices"][0]["message"]["content"] == answer.get("content")
        assert last["arrow_tq"]["recorded"] is True

    async def _end(self, client: httpx.AsyncClient) -> None:
        verb, body = ("abort", {"reason": "test"}) if self._aborts else ("finalize", {"reward": self.reward})
        path = f"/arrow-tq/sessions/{self.session}/{verb}"
        until = asyncio.get_running_loop().time() + RETRY_FOR_S
        while True:
            try:
                response = await client.post(path, json=body)
            except httpx.TransportError:
                status = 0
            else:
                status = response.status_code
                if status == 200:
                    break
                assert status in (409, 503), response.text
                if status == 409 and verb == "abort":
                    # Aborted already, by a request whose answer was lost.
                    assert "aborted" in response.text
                    break
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(RETRY_S)
        self.aborted = self._aborts
        self._tally.counts["aborted" if self._aborts else "finalized"] += 1

    def _compacted(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        summary = f"Summary of {len(history)} messages, {self._rng.integers(1 << 30)}."
        return [history[0], {"role": "user", "content": summary}]

    def _happens(self, chance: float) -> bool:
        return bool(self._rng.random() < chance)


def trajectories(count: int) -> list[dict[str, Any]]:
    """The first recorded trajectories."""
    with gzip.open(TAU_BENCH, "rt") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


async def play(url: str, rollouts: Sequence[Rollout], at_once: int) -> None:
    """Run all rollouts, so many at a time."""
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=4 * at_once, max_keepalive_connections=at_once, keepalive_expiry=2)

    async def one(rollout: Rollout) -> None:
        async with places:
            await rollout.run(client)

    async with (
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for rollout in rollouts:
            group.create_task(one(rollout))


def check(run: Run, rollouts: Sequence[Rollout], sizes: Sizes) -> dict[str, int]:
    """Claim everything; segments and every value of them are as the agents know them. Counts what it saw."""
    seen = {"segments": 0, "tokens": 0, "values": 0}
    found: dict[str, list[bytes]] = {rollout.session: [] for rollout in rollouts}
    losses: Counter[str] = Counter()
    while len(batch := run.claim(32)):
        sessions = batch.table["session_id"].to_pylist()
        for name, loss in zip(sessions, batch.table["loss_tokens"].to_pylist(), strict=True):
            losses[name] += loss
        for row, name in enumerate(sessions):
            data = batch.fetch(["token_ids", "logprobs", "routed_experts"], rows=[row])
            tokens = np.asarray(data["token_ids"][0], np.int32)
            found[name].append(tokens.tobytes())
            experts, chances = data["routed_experts"][0], np.asarray(data["logprobs"][0])
            np.testing.assert_array_equal(experts, experts_of(tokens, sizes))
            sampled = chances != 0
            np.testing.assert_array_equal(chances[sampled], logprobs_of(tokens)[sampled].astype(np.float32))
            seen["segments"] += 1
            seen["tokens"] += len(tokens)
            seen["values"] += experts.size + len(tokens) + len(chances)
            data.close()
        batch.release()
    for rollout in rollouts:
        expected = [] if rollout.aborted else rollout.expected()
        assert sorted(found[rollout.session]) == expected, rollout.session
        # Each sampled token carries loss once, however many segments show it.
        assert losses[rollout.session] == (0 if rollout.aborted else rollout.sampled_tokens), rollout.session
    return seen
