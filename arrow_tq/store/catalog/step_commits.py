"""Commits of steps: planned by their callers, applied by the writer, many in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from arrow_tq.store.catalog import sessions, tree
from arrow_tq.store.catalog.config import CatalogConfig, ChunkPins
from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.paths import TokenPath, TokenPaths
from arrow_tq.store.catalog.runs import CommittedRuns, WriterRuns
from arrow_tq.store.catalog.step_plans import StepPlan, plan_step
from arrow_tq.store.catalog.steps import CommitStep, find_receipts
from arrow_tq.store.catalog.writer import Again, Apply, Beside, Outcome, Writer
from arrow_tq_schemas.commands import StepCommit, StepResult, Wire
from arrow_tq_schemas.errors import ArrowTQError, InvalidInput
from arrow_tq_schemas.ids import ChunkId
from arrow_tq_schemas.receipts import Receipt
from arrow_tq_schemas.trusted import trusted


class StepCommits:
    """Commits steps, and tells what a step that is to be committed follows."""

    def __init__(
        self,
        config: CatalogConfig,
        readers: Readers,
        writer: Writer,
        runs: CommittedRuns,
        writer_runs: WriterRuns,
        pins: ChunkPins,
        on_released: Callable[[list[ChunkId]], None],
    ) -> None:
        self._config = config
        self._readers = readers
        self._writer = writer
        self._runs = runs
        self._writer_runs = writer_runs
        self._pins = pins
        self._on_released = on_released
        self._paths = TokenPaths(config.paths_cached_max, config.path_spans_cached_max)
        self.committed = 0
        """Steps since this process opened the store."""

    def commit_steps(
        self,
        commits: Sequence[StepCommit],
        rewrites: Mapping[tuple[str, str, str], int],
        beside: Beside[Wire] | None = None,
    ) -> list[StepResult]:
        """Commit each step atomically by itself, in order; errors are in the results.

        Args:
            commits: whole steps; those of one session in their order.
            rewrites: by run, session and step id, the first position whose token ids differ from those
                on the step's path.
            beside: run in the same transaction, before the steps; where no step can be run, not at all.
        """
        results: list[StepResult | None] = [None] * len(commits)
        planned: list[int] = []
        applies: list[Apply[int | Wire]] = []
        for index, commit in enumerate(commits):
            try:
                plan = self._plan(commit, rewrites)
            except ArrowTQError as error:
                results[index] = _failed(commit, error)
                continue
            planned.append(index)
            applies.append(CommitStep(plan, self._writer_runs, self._pins))
        outcomes = self._run(applies, beside) if applies else []
        released = [chunk_id for outcome in outcomes for chunk_id in outcome.released]
        if released:
            self._on_released(released)
        for index, outcome in zip(planned, outcomes, strict=True):
            results[index] = self._step_result(commits[index], outcome)
        return [result for result in results if result is not None]

    def token_path(self, commit: StepCommit) -> tuple[TokenPath, int]:
        """The token ids before a step that is to be committed, on its own path; and the session's steps.

        Raises:
            NotFound: no such run, session or parent.
            Conflict: nothing can follow its parent.
        """
        run = self._runs.get(commit.run)
        with self._readers.snapshot() as connection:
            session = sessions.get_session(connection, run, commit.session_id)
            parent = tree.find_parent(connection, session, commit.step_id, commit.parent, commit.retry_of)
            return self._paths.read(connection, session.id, parent), session.steps

    def step_receipts(self, run: str, session_id: str, step_id: str) -> list[Receipt]:
        """What a committed step attached; nothing where there is no such step."""
        record = self._runs.get(run)
        with self._readers.snapshot() as connection:
            session = sessions.get_session(connection, record, session_id)
            return find_receipts(connection, session.id, step_id, run)

    def _run(
        self, applies: Sequence[Apply[int | Wire]], beside: Beside[Wire] | None
    ) -> list[Outcome[int | Wire]]:
        if beside is None:
            return self._writer.run(applies)
        outcomes = self._writer.run([*beside.applies, *applies])
        others = len(beside.applies)
        beside.outcomes = cast(list[Outcome[Wire]], outcomes[:others])
        return outcomes[others:]

    def _plan(self, commit: StepCommit, rewrites: Mapping[tuple[str, str, str], int]) -> StepPlan:
        try:
            run = self._runs.get(commit.run)
            rewrite_at = rewrites.get((commit.run, commit.session_id, commit.step_id))
            return plan_step(run, commit, rewrite_at, self._pins, self._config.blob_bytes_max)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"step: text with a lone surrogate at {error.start}") from None

    def _step_result(self, commit: StepCommit, outcome: Outcome[int | Wire]) -> StepResult:
        if outcome.error is not None:
            return _failed(commit, outcome.error)
        self.committed += 1
        assert isinstance(outcome.value, int)
        return trusted(StepResult, {"step_id": commit.step_id, "step_index": outcome.value, "error": None})


def _failed(commit: StepCommit, error: ArrowTQError | Again) -> StepResult:
    assert isinstance(error, ArrowTQError)
    return StepResult(step_id=commit.step_id, error=error.to_wire())
