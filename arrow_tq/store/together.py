"""One message of a commit stream: commands of many sessions, each kind taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arrow_tq.store.admission import Admission
from arrow_tq.store.catalog import Catalog
from arrow_tq.store.catalog.writer import Beside
from arrow_tq.store.host_share import HostShare
from arrow_tq_schemas.commands import (
    AdoptChunks,
    FinalizeSession,
    OpenSession,
    StepCommit,
    StepResult,
    StreamAnswers,
    StreamMessage,
    Wire,
    stream_answer,
)
from arrow_tq_schemas.errors import ArrowTQError

Outcomes = list[Wire | ArrowTQError]


class Together:
    """Answers messages. Each command is atomic by itself; the kinds follow one another."""

    def __init__(
        self,
        host_share: HostShare,
        admission: Admission,
        catalog: Catalog,
        commit: Callable[[Sequence[StepCommit], Beside[Wire] | None], list[StepResult]],
    ) -> None:
        self._host_share = host_share
        self._admission = admission
        self._catalog = catalog
        self._commit = commit

    def answer(self, message: StreamMessage) -> StreamAnswers:
        """One answer a command, in their order."""
        adopted = [self._adopt(command) for command in message.adopts]
        if _are_apart(message):
            results, others = self._take(message.opens, message.steps, message.finalizes)
            return _answers(results, adopted + others)
        # One follows from the other.
        _, opened = self._take(message.opens, [], [])
        results, _ = self._take([], message.steps, [])
        _, ended = self._take([], [], message.finalizes)
        return _answers(results, [*adopted, *opened, *ended])

    def _adopt(self, command: AdoptChunks) -> Wire | ArrowTQError:
        try:
            return self._host_share.execute(command).body
        except ArrowTQError as error:
            return error

    def _take(
        self, opens: Sequence[OpenSession], steps: Sequence[StepCommit], ends: Sequence[FinalizeSession]
    ) -> tuple[list[StepResult], Outcomes]:
        """In one transaction: what it costs does not depend on how much is in it. Replies come as asked."""
        refusals = self._admission.refusals(opens)
        admitted = [one for one, refusal in zip(opens, refusals, strict=True) if refusal is None]
        begun = self._catalog.begin_many([*admitted, *ends]) if admitted or ends else None
        beside = begun.beside if begun is not None and begun.beside.applies else None
        results = self._commit(steps, beside) if steps else []
        found = iter([] if begun is None else self._catalog.finish_many(begun))
        opened = [next(found) if refusal is None else refusal for refusal in refusals]
        return results, [*opened, *found]


def _are_apart(message: StreamMessage) -> bool:
    """Whether each session is opened, written to or finalized, so that one transaction will do for all."""
    opens, steps, ends = (
        {(one.run, one.session_id) for one in commands}
        for commands in (message.opens, message.steps, message.finalizes)
    )
    return opens.isdisjoint(steps) and ends.isdisjoint(opens | steps)


def _answers(results: list[StepResult], outcomes: Outcomes) -> StreamAnswers:
    return StreamAnswers.model_construct(results=results, answers=[stream_answer(one) for one in outcomes])
