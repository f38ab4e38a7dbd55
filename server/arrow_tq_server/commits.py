"""DoPut: streams of step commits, and of what comes before and after them."""

from __future__ import annotations

import time

import pyarrow.flight as flight

from arrow_tq_schemas.access import Grant, Need, need, need_of
from arrow_tq_schemas.commands import StepResult, StepResults, StreamAnswer, StreamAnswers, StreamMessage
from arrow_tq_schemas.errors import MalformedMessage, NotFound, PermissionDenied
from arrow_tq_server.budgets import Activity
from arrow_tq_server.errors import bounded_wire
from arrow_tq_server.guard import permit
from arrow_tq_server.metrics import Metrics
from arrow_tq_server.puts import answer, next_message, parse
from arrow_tq_server.served import ServedEngine

WRITE = need(["write"])
Refusal = dict[str, object] | None


def take_commits(
    engine: ServedEngine,
    metrics: Metrics,
    activity: Activity,
    grant: Grant,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.FlightMetadataWriter,
) -> None:
    """Answer every ``StreamMessage`` of a commit stream with its ``StreamAnswers``."""
    while (message := next_message(reader)) is not None:
        with activity.work():
            began = time.perf_counter()
            if message.data is not None or message.app_metadata is None:
                raise MalformedMessage("commit stream: expected messages of metadata alone")
            asked = parse(StreamMessage, message.app_metadata.to_pybytes(), "commit message")
            answers = _answer(engine, asked, grant)
            # Who sends steps alone may know of nothing else.
            answer(writer, answers if answers.answers else StepResults(results=answers.results))
            _count(metrics, asked, answers, time.perf_counter() - began)


def _count(metrics: Metrics, asked: StreamMessage, answers: StreamAnswers, elapsed_s: float) -> None:
    """A command took as long as its message."""
    if asked.steps:
        metrics.commit_s.observe(elapsed_s)
    for commands in (asked.adopts, asked.opens, asked.finalizes):
        if commands:
            taken = metrics.action_s.labels(commands[0].verb)
            for _ in commands:
                taken.observe(elapsed_s)
    errors = [one.error for one in answers.results] + [one.error for one in answers.answers]
    for error in errors:
        if error is not None:
            metrics.errors.labels(str(error.get("code"))).inc()


def _answer(engine: ServedEngine, asked: StreamMessage, grant: Grant) -> StreamAnswers:
    """What each command gets; one in a run that the token does not cover is refused, the others go on."""
    if grant.runs is None and grant.allows(WRITE):
        return engine.answer(asked)

    def refusal(wanted: Need, what: str) -> Refusal:
        try:
            permit(engine, grant, wanted, what)
        except (PermissionDenied, NotFound) as error:
            return bounded_wire(error)
        return None

    adopts, opens, finalizes = (
        [refusal(need_of(one), one.verb) for one in commands]
        for commands in (asked.adopts, asked.opens, asked.finalizes)
    )
    steps = [refusal(need(["write"], one.run), f"step {one.step_id!r}") for one in asked.steps]
    told = engine.answer(
        StreamMessage.model_construct(
            adopts=[one for one, error in zip(asked.adopts, adopts, strict=True) if error is None],
            opens=[one for one, error in zip(asked.opens, opens, strict=True) if error is None],
            steps=[one for one, error in zip(asked.steps, steps, strict=True) if error is None],
            finalizes=[one for one, error in zip(asked.finalizes, finalizes, strict=True) if error is None],
        )
    )
    answers, results = iter(told.answers), iter(told.results)
    return StreamAnswers.model_construct(
        results=[
            next(results) if error is None else StepResult(step_id=one.step_id, error=error)
            for one, error in zip(asked.steps, steps, strict=True)
        ],
        answers=[
            next(answers) if error is None else StreamAnswer(error=error)
            for error in (*adopts, *opens, *finalizes)
        ],
    )
