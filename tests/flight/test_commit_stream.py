"""A commit stream: commands of many sessions in one message, each answered by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from arrow_tq import fields
from arrow_tq.interface import Store
from arrow_tq_schemas import commands as c, errors, tickets as t
from tests.flight import wire
from tests.serving import Server

COMMIT_STREAM = flight.FlightDescriptor.for_command(t.CommitStream().model_dump_json().encode())


def exchange(url: str, *messages: bytes) -> list[bytes]:
    """The answers to some messages on a stream of their own."""
    with flight.connect(url) as client:
        writer, reader = client.do_put(COMMIT_STREAM, pa.schema([]), wire.CALL)
        for message in messages:
            writer.write_metadata(pa.py_buffer(message))
        return wire.end(writer, reader)


def ask(url: str, message: c.StreamMessage) -> c.StreamAnswers:
    (raw,) = exchange(url, message.model_dump_json().encode())
    return c.StreamAnswers.model_validate_json(raw)


def codes(answers: Sequence[c.StreamAnswer]) -> list[str | None]:
    return [None if one.error is None else str(one.error["code"]) for one in answers]


@pytest.fixture
def run(remote: Store, new_name: Callable[[], str]) -> str:
    return remote.run(new_name(), fields=[fields.token_ids()]).name


def test_a_whole_session_in_one_message(server: Server, run: str) -> None:
    key: dict[str, str | int] = {"run": run, "epoch": 0, "session_id": "s"}
    message = c.StreamMessage(
        opens=[c.OpenSession.model_validate(key)],
        steps=[c.StepCommit.model_validate({**key, "step_id": "a"})],
        finalizes=[c.FinalizeSession.model_validate(key)],
    )
    told = ask(server.url, message)
    assert [result.step_index for result in told.results] == [0]
    opened, ended = told.answers
    assert opened.session is not None and opened.session.status == "open"
    assert ended.segments is not None
    assert [one.segment_id for one in ended.segments.segments] == ["s~0"]
    # The same requests again get the same answers.
    assert ask(server.url, message) == told


def test_a_session_without_steps_in_one_message(server: Server, run: str) -> None:
    key: dict[str, str | int] = {"run": run, "epoch": 0, "session_id": "s"}
    opened, ended = c.OpenSession.model_validate(key), c.FinalizeSession.model_validate(key)
    told = ask(server.url, c.StreamMessage(opens=[opened], finalizes=[ended, ended]))
    assert codes(told.answers) == [None, None, None]
    assert told.answers[1] == told.answers[2]


def test_one_fault_is_one_commands(server: Server, run: str) -> None:
    def opened(name: str) -> c.OpenSession:
        return c.OpenSession(run=run, epoch=0, session_id=name)

    def ended(name: str) -> c.FinalizeSession:
        return c.FinalizeSession(run=run, epoch=0, session_id=name)

    elsewhere = c.FinalizeSession(run="?", epoch=0, session_id="a")
    adopt = c.AdoptChunks(run=run, field="token_ids", proof="0" * 32, grant="0" * 32, chunks=[])
    told = ask(
        server.url,
        c.StreamMessage(
            adopts=[adopt],
            opens=[opened("a"), opened("b~0"), opened("c")],
            steps=[
                c.StepCommit(run=run, epoch=0, session_id="no such session", step_id="1"),
                c.StepCommit(run=run, epoch=0, session_id="a", step_id="1"),
            ],
            finalizes=[ended("no such session"), ended("c"), elsewhere],
        ),
    )
    assert codes(told.answers) == ["not-found", None, "invalid-input", None, "not-found", None, "not-found"]
    assert [result.error is None for result in told.results] == [False, True]


def test_steps_alone_are_answered_as_they_always_were(server: Server, run: str) -> None:
    ask(server.url, c.StreamMessage(opens=[c.OpenSession(run=run, epoch=0, session_id="s")]))
    steps = [c.StepCommit(run=run, epoch=0, session_id="s", step_id="1")]
    (raw,) = exchange(server.url, c.CommitSteps(steps=steps).model_dump_json().encode())
    assert c.StepResults.model_validate_json(raw).results[0].step_index == 0


def test_a_message_that_cannot_be_read_does_nothing(server: Server, run: str) -> None:
    opened = c.OpenSession(run=run, epoch=0, session_id="s").model_dump_json().encode()
    with pytest.raises(errors.MalformedMessage, match=r"commit message: finalizes\.0\.run"):
        exchange(server.url, b'{"opens":[%s],"finalizes":[{"run":3}]}' % opened)
    told = ask(server.url, c.StreamMessage(finalizes=[c.FinalizeSession(run=run, epoch=0, session_id="s")]))
    assert codes(told.answers) == ["not-found"]


def test_many_threads_with_whole_trajectories(remote: Store, run: str) -> None:
    """Each thread gets the answers to its own commands, whoever else is in the message."""
    opened = remote.run(run)

    def write(index: int) -> None:
        with opened.session(f"s-{index}").step() as step:
            step.put("token_ids", np.full(index % 7 + 1, index), start=0)
        (segment,) = opened.session(f"s-{index}").finalize()
        assert (segment.segment_id, segment.num_tokens) == (f"s-{index}~0", index % 7 + 1)
        with pytest.raises(errors.SessionClosed):
            opened.session(f"s-{index}", group="other")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(160)))
    batch = opened.claim(1000)
    data = batch.fetch(["token_ids"])
    for name, tokens in zip(batch.table["session_id"].to_pylist(), data["token_ids"], strict=True):
        assert set(tokens.tolist()) == {int(name[2:])}
    batch.release()


def test_different_sessions_in_one_message_are_one_transaction(server: Server, run: str) -> None:
    """And still each command fails or succeeds by itself, also one that fails after it wrote."""

    def opened(name: str, **more: object) -> c.OpenSession:
        return c.OpenSession.model_validate({"run": run, "epoch": 0, "session_id": name, **more})

    def step(name: str) -> c.StepCommit:
        return c.StepCommit(run=run, epoch=0, session_id=name, step_id="1")

    def ended(name: str) -> c.FinalizeSession:
        return c.FinalizeSession(run=run, epoch=0, session_id=name)

    ask(server.url, c.StreamMessage(opens=[opened("a"), opened("b"), opened("c")]))
    told = ask(
        server.url,
        c.StreamMessage(
            opens=[opened("new"), opened("b~0"), opened("newer")],
            steps=[step("a"), step("no such session")],
            finalizes=[ended("b"), ended("nor this one"), ended("c")],
        ),
    )
    assert codes(told.answers) == [None, "invalid-input", None, None, "not-found", None]
    assert [result.error is None for result in told.results] == [True, False]
    # What a step that cannot be planned leaves alone in its message is done all the same.
    told = ask(
        server.url, c.StreamMessage(opens=[opened("d")], steps=[step("a").model_copy(update={"run": "?"})])
    )
    assert codes(told.answers) == [None]
    assert told.results[0].error is not None
    told = ask(server.url, c.StreamMessage(steps=[step("d")], finalizes=[ended("new"), ended("newer")]))
    assert codes(told.answers) == [None, None]
    assert told.results[0].error is None
