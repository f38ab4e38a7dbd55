"""A system with its two processes, and rounds in which all systems take turns."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from benchmarks.peers.outcome import Outcome
from benchmarks.peers.payloads import recipe
from benchmarks.peers.system import SYSTEMS

STOP_S = 20.0
ANSWER_S = 120.0
"""A system that takes longer has failed. A reply is one line, so none is left in a buffer."""
QUIET_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
"""Everything is on loopback here, and several processes join one cluster."""
MEMORY_SHARE = 0.85
"""Of the memory that is available."""
COPIES_AT_REST, COPIES_AT_WORK = 3, 4


class Process:
    """A worker process, asked one thing at a time."""

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.peers.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("PEERS_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **QUIET_RAY},
            start_new_session=True,
        )
        try:
            self.first = self._reply()
        except RuntimeError:
            self.stop()
            raise

    def ask(self, do: str, **arguments: object) -> dict[str, object]:
        """Its reply; raises ``RuntimeError`` with what went wrong there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, object]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        if not ready:
            raise RuntimeError(f"{self._name} gave no answer for {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with code {self._process.wait()}")
        reply: dict[str, object] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self._name}: {reply['error']}")
        return reply

    def stop(self) -> None:
        """Close its input, which ends it; kill what is left of its group."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Fit:
    """How a payload is measured in the memory that there is."""

    samples: int
    together: bool
    """Whether all systems hold it at a time and take turns; else one system after another."""


def fit(payload: str, systems: int, available_bytes: int) -> Fit:
    """All systems in turns, if they fit; else one by one; else fewer samples.

    At rest a system's two processes hold the payload each, and of their last turn as much stays in their
    heaps or its store. At its turn it also exists in the store, in the form that was put, and as what came
    back.
    """
    about = recipe(payload)
    room = int(available_bytes * MEMORY_SHARE)
    together = about.nbytes * (COPIES_AT_REST * systems + COPIES_AT_WORK) <= room
    samples = min(about.samples, room // (about.sample_bytes * (COPIES_AT_REST + COPIES_AT_WORK)))
    return Fit(max(samples, 1), together)


class Pair:
    """A system's producer and consumer."""

    def __init__(self, system: str, address: str) -> None:
        self.system = system
        self._producer = Process(f"{system} producer", "worker", system, "producer", address)
        self._consumer = Process(f"{system} consumer", "worker", system, "consumer", address)

    def prepare(self, payload: str, samples: int) -> Outcome:
        """Build the payload on both sides."""
        reply = self._producer.ask("prepare", payload=payload, samples=samples)
        self._consumer.ask("prepare", payload=payload, samples=samples)
        nbytes = int(str(reply["nbytes"]))
        return Outcome(self.system, payload, samples, recipe(payload).samples, nbytes)

    def turn(self, outcome: Outcome) -> None:
        """The first turn is counted cold; a later one after a round that is not counted.

        While the others had their turns, what was freed here has gone back to the system, or to its host.
        """
        if outcome.times:
            warming = replace(outcome, times={})
            self.round(warming)
            outcome.failed = warming.failed
        if outcome.failed is None:
            self.round(outcome)

    def round(self, outcome: Outcome) -> None:
        """Put, get, compare, remove; a failure ends this system's part in the payload."""
        try:
            put = self._producer.ask("put")
            outcome.add(put)
            got = self._consumer.ask("get", reference=put["reference"])
            outcome.add(got)
            if got["wrong"]:
                outcome.failed = f"came back wrong: {got['wrong']}"
            self._consumer.ask("remove", reference=put["reference"])
            self._producer.ask("remove", reference=put["reference"])
        except RuntimeError as error:
            outcome.failed = str(error)

    def stop(self) -> None:
        self._producer.stop()
        self._consumer.stop()


@contextlib.contextmanager
def running(system: str) -> Iterator[Pair]:
    """The system's servers and its two processes."""
    importlib.import_module(SYSTEMS[system].package)
    host = _host(system)
    try:
        pair = Pair(system, str(host.first["address"]))
        try:
            yield pair
        finally:
            pair.stop()
    finally:
        host.stop()


def _host(system: str) -> Process:
    """Its servers; a start that failed is tried once more, for a busy machine is slow to start Ray."""
    try:
        return Process(f"{system} servers", "host", system)
    except RuntimeError:
        return Process(f"{system} servers", "host", system)


class Lineup:
    """The systems that take part, started when they are first needed and kept from payload to payload."""

    def __init__(self, systems: Sequence[str]) -> None:
        self._systems = systems
        self._started: dict[str, tuple[contextlib.ExitStack, Pair]] = {}

    def __enter__(self) -> Lineup:
        return self

    def __exit__(self, *_: object) -> None:
        for system in self._systems:
            self._stop(system)

    def measure(self, payload: str, rounds: int) -> list[Outcome]:
        """Every system over the same payload, in turns; one that cannot run says why."""
        chosen = fit(payload, len(self._systems), psutil.virtual_memory().available)
        if chosen.together:
            return self._in_turns(self._systems, payload, chosen.samples, rounds)
        outcomes = []
        for system in self._systems:
            for other in self._systems:
                # What the others' stores keep is memory too.
                self._stop(other)
            outcomes.extend(self._in_turns([system], payload, chosen.samples, rounds))
        return outcomes

    def _in_turns(self, systems: Sequence[str], payload: str, samples: int, rounds: int) -> list[Outcome]:
        outcomes = {system: self._prepared(system, payload, samples) for system in systems}
        for number in range(rounds):
            # Each is the first in turn: what is free then rested longest, and costs most to touch again.
            first = number % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                outcome = outcomes[system]
                if outcome.failed is None:
                    self._started[system][1].turn(outcome)
        for system, outcome in outcomes.items():
            if outcome.failed is not None:
                # It starts afresh with the next payload.
                self._stop(system)
        return list(outcomes.values())

    def _prepared(self, system: str, payload: str, samples: int) -> Outcome:
        try:
            return self._pair(system).prepare(payload, samples)
        except (ImportError, RuntimeError, OSError) as error:
            reason = f"cannot run: {error} (needs {SYSTEMS[system].install})"
            return Outcome(system, payload, failed=reason)

    def _pair(self, system: str) -> Pair:
        if system not in self._started:
            with contextlib.ExitStack() as stack:
                pair = stack.enter_context(running(system))
                self._started[system] = stack.pop_all(), pair
        return self._started[system][1]

    def _stop(self, system: str) -> None:
        stack, _ = self._started.pop(system, (None, None))
        if stack is not None:
            stack.close()
