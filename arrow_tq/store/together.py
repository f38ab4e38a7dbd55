"""One message of a commit stream: commands of many sessions, each kind taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arrow_tq.store.admission import Admission
from arrow_tq.store.catalog import Catalog
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
        commit_many: Callable[[Sequence[StepCommit]], list[StepResult]],
    ) -> None:
        self._host_share = host_share
        self._admission = admission
        self._catalog = catalog
        self._commit_many = commit_many

    def answer(self, message: StreamMessage) -> StreamAnswers:
        """One answer a command, in their order."""
        outcomes: Outcomes = [self._adopt(command) for command in message.adopts]
        if not message.steps and _are_apart(message.opens, message.finalizes):
            return _answers([], outcomes + self._open_and_finalize(message.opens, message.finalizes))
        outcomes += self._open_and_finalize(message.opens, [])
        results = self._commit_many(message.steps) if message.steps else []
        return _answers(results, outcomes + self._open_and_finalize([], message.finalizes))

    def _adopt(self, command: AdoptChunks) -> Wire | ArrowTQError:
        try:
            return self._host_share.execute(command).body
        except ArrowTQError as error:
            return error

    def _open_and_finalize(self, opens: Sequence[OpenSession], ends: Sequence[FinalizeSession]) -> Outcomes:
        if not opens and not ends:
            return []
        refusals = self._admission.refusals(opens)
        admitted = [one for one, refusal in zip(opens, refusals, strict=True) if refusal is None]
        found = iter(self._catalog.execute_many([*admitted, *ends]))
        opened = [next(found) if refusal is None else refusal for refusal in refusals]
        return [*opened, *found]


def _are_apart(opens: Sequence[OpenSession], ends: Sequence[FinalizeSession]) -> bool:
    """Whether no session is both opened and finalized, so that one transaction will do for all."""
    return {(one.run, one.session_id) for one in opens}.isdisjoint((one.run, one.session_id) for one in ends)


def _answers(results: list[StepResult], outcomes: Outcomes) -> StreamAnswers:
    return StreamAnswers.model_construct(results=results, answers=[stream_answer(one) for one in outcomes])
