"""The run that trajectories go into, and what it holds already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arrow_tq.importer.routing import StepRouting
from arrow_tq.importer.step_tokens import StepTokens
from arrow_tq.importer.trajectory import Trajectory
from arrow_tq_schemas.errors import ArrowTQError, Conflict, NotFound
from arrow_tq_schemas.fields import TOKEN_FIELD, Field

if TYPE_CHECKING:
    from arrow_tq.interface import Store
    from arrow_tq.producer.session import Session
    from arrow_tq.runs import Run

GIVEN = "given"
"""Value of the column ``tokenizer`` for sessions whose token ids came with the file."""


class Destination:
    """A run that an import writes into."""

    def __init__(self, store: Store, run: str, fields: Sequence[Field], tokenizer: str | None) -> None:
        """Open or create the run.

        Args:
            store: the store.
            run: the run's name.
            fields: what the import writes.
            tokenizer: fingerprint of the tokenizer, None where the input has the ids.

        Raises:
            Conflict: the run exists without one of the fields, or holds ids of another tokenizer.
        """
        self._run, created = _open(store, run, fields)
        self._tokenizer = tokenizer
        self._status: dict[str, str] = {}
        self._committed: dict[str, set[str]] = {}
        if not created:
            self._look_around()

    def _look_around(self) -> None:
        known = self._run.sql("SELECT session_id, status FROM sessions")
        self._status = dict(zip(known["session_id"].to_pylist(), known["status"].to_pylist(), strict=True))
        if "open" in self._status.values():
            steps = self._run.sql(
                "SELECT steps.session_id, step_id FROM steps JOIN sessions USING (session_id)"
                " WHERE sessions.status = 'open'"
            )
            for session, step in zip(*(column.to_pylist() for column in steps.columns), strict=True):
                self._committed.setdefault(session, set()).add(step)
        if self._tokenizer is not None:
            self._check_tokenizer(self._tokenizer)

    def _check_tokenizer(self, fingerprint: str) -> None:
        """Ids of two vocabularies in one run would look alike and mean different text."""
        if "tokenizer" not in self._run.sql("SELECT * FROM sessions LIMIT 0").column_names:
            return
        seen = self._run.sql("SELECT DISTINCT tokenizer FROM sessions WHERE tokenizer IS NOT NULL")
        others = set(seen["tokenizer"].to_pylist()) - {fingerprint, GIVEN}
        if others:
            raise Conflict(
                f"run {self._run.name!r} holds token ids of tokenizer {', '.join(sorted(others))} and this "
                f"import's is {fingerprint}: pass the same --tokenizer, or another --run",
                run=self._run.name,
            )

    def has(self, session_id: str) -> bool:
        """Whether the session is in the run already and needs nothing more.

        Raises:
            Conflict: it was aborted, and ids are never used twice.
        """
        status = self._status.get(session_id)
        if status == "aborted":
            raise Conflict(
                f"session {session_id!r} was aborted in run {self._run.name!r} and its id cannot be used "
                "again: import into another --run",
                session_id=session_id,
            )
        return status is not None and status != "open"

    def add(
        self,
        trajectory: Trajectory,
        steps: Sequence[StepTokens],
        routing: Sequence[StepRouting],
        columns: dict[str, object],
    ) -> tuple[int, int]:
        """Store one trajectory whole; says its segments and the payload bytes written.

        ``routing`` is empty, or has one element a step; ``columns`` are those that come with finalize. On
        an error that a later import cannot mend the session is aborted; on others it stays open, unseen by
        trainers, and the same import goes on with it.
        """
        source = GIVEN if trajectory.has_tokens else self._tokenizer
        names: dict[str, Any] = {**trajectory.columns, "tokenizer": source}
        session = self._run.session(trajectory.session_id, group=trajectory.group, **names)
        try:
            payload_bytes = self._write_steps(session, trajectory, steps, routing)
            segments = session.finalize(reward=trajectory.reward, **columns)  # type: ignore[arg-type]
        except ArrowTQError as error:
            if not error.retryable:
                _abort(session)
            raise
        return len(segments), payload_bytes

    def _write_steps(
        self,
        session: Session,
        trajectory: Trajectory,
        steps: Sequence[StepTokens],
        routing: Sequence[StepRouting],
    ) -> int:
        done = self._committed.get(trajectory.session_id, set())
        payload_bytes = 0
        for index, (turn, tokens) in enumerate(zip(trajectory.turns, steps, strict=False)):
            step_id = f"call-{index}"
            if step_id in done:
                continue
            logprobs = tokens.logprobs
            with session.step(id=step_id, messages=turn.messages, sampled=tokens.sampled) as step:
                step.put(TOKEN_FIELD, tokens.ids, start=tokens.start)
                payload_bytes += tokens.ids.nbytes
                if routing:
                    recorded = routing[index]
                    step.put("routed_experts", recorded.experts, start=recorded.start)
                    payload_bytes += recorded.experts.nbytes
                    logprobs = recorded.logprobs if logprobs is None else logprobs
                if logprobs is not None:
                    step.put("logprobs", logprobs, start=tokens.sampled[0])
                    payload_bytes += logprobs.nbytes
        return payload_bytes


def _open(store: Store, name: str, fields: Sequence[Field]) -> tuple[Run, bool]:
    """The run, and whether it is new."""
    try:
        run = store.run(name)
    except NotFound:
        return store.run(name, fields=fields), True
    for field in fields:
        declared = run.fields.get(field.name)
        if declared != field:
            what = "has no such field" if declared is None else "declares it differently"
            raise Conflict(
                f"field {field.name!r}: run {name!r} exists and {what}; import into another --run",
                run=name,
                field=field.name,
            )
    return run, False


def _abort(session: Session) -> None:
    """Free what a failed session wrote."""
    try:
        session.abort("import failed")
    except ArrowTQError:
        # The first error is the one to tell; an unfinished session is never given to a trainer.
        return
