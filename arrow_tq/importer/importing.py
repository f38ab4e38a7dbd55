"""Trajectories into a run of a store: one session each, one step a model call."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from arrow_tq.importer.chat_tokenizer import ChatTokenizer
from arrow_tq.importer.destination import Destination
from arrow_tq.importer.records import Record, check_files
from arrow_tq.importer.routing import StepRouting, step_routing
from arrow_tq.importer.source import Source, Survey, take_survey
from arrow_tq.importer.step_tokens import StepTokens, step_tokens
from arrow_tq.importer.trajectory import Trajectory
from arrow_tq_schemas import presets
from arrow_tq_schemas.errors import Conflict, InvalidInput, MalformedMessage, StaleEpoch

if TYPE_CHECKING:
    from arrow_tq.demo.model import RecordedModel
    from arrow_tq.interface import Store

MODEL_TOKENS_MAX = 32_768
"""Longest session that ``model=True`` runs over where nothing else is said."""
NOTES_MAX = 20
"""Different notes that are told; the rest is counted."""


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What to do with the trajectories of a source."""

    run: str = "default"
    on_error: Literal["skip", "fail"] = "skip"
    """A bad record is told and skipped, or ends the import before anything is stored."""
    tokenizer: Path | None = None
    """A ``tokenizers`` file; None trains one on the input."""
    save_tokenizer: Path | None = None
    """Where to write the tokenizer that was used."""
    max_tokens: int | None = None
    """Longer trajectories are cut before the model call that passes this, and marked ``truncated``."""
    model: bool = False
    """Run a mixture-of-experts model over the tokens; store its routing and log-probs."""
    seed: int = 0
    """Seed of the model's random weights."""


@dataclass(slots=True)
class ImportSummary:
    """What an import did."""

    sessions: int = 0
    steps: int = 0
    segments: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    existing: int = 0
    """Sessions that were there already and were left as they are."""
    bad: int = 0
    """Records that were skipped."""
    cut: int = 0
    """Trajectories cut at ``max_tokens``."""
    elapsed_s: float = 0.0
    notes: Counter[str] = field(default_factory=Counter)
    """What could not be taken over as it was, and how often."""


class Watcher(Protocol):
    """Told what goes on."""

    def phase(self, name: str, total_bytes: int) -> None:
        """A pass over the files begins."""

    def record(self, record: Record) -> None:
        """A record was read."""

    def problem(self, message: str) -> None:
        """A record was refused; the message names file and line."""


def import_trajectories(store: Store, source: Source, plan: ImportPlan, watcher: Watcher) -> ImportSummary:
    """Import every trajectory of ``source`` into a run of ``store``.

    The files are read twice: first everything is checked, and a tokenizer is trained where one is needed.
    Sessions that the run has already are left alone, so the same import may be run again.

    Raises:
        NotFound, InvalidInput: a file is missing or cannot be read.
        MalformedMessage: no trajectory at all, or a bad record with ``on_error="fail"``.
        Conflict: the run's fields or its tokenizer do not fit.
        ArrowTQError: the store failed. What was imported stays; the session under way is aborted, or is
            left open where the same import can go on with it later.
    """
    started = time.monotonic()
    total_bytes = check_files(source.files)
    watcher.phase("checking", total_bytes)
    survey = take_survey(source, watcher.record)
    _tell_problems(survey, source, plan, watcher)
    work = _Work(store, source, plan, survey)
    watcher.phase("importing", total_bytes)
    for record in source.records():
        if record.place not in survey.bad:
            _import_record(work, record, watcher)
        watcher.record(record)
    work.summary.elapsed_s = time.monotonic() - started
    return work.summary


class _Work:
    """An import under way: the tools that all of its trajectories share."""

    def __init__(self, store: Store, source: Source, plan: ImportPlan, survey: Survey) -> None:
        self.source = source
        self.plan = plan
        self.summary = ImportSummary(bad=len(survey.bad))
        self.tokenizer = _make_tokenizer(plan, survey)
        self.model = _make_model(plan, survey, self.tokenizer)
        fields = [presets.token_ids()]
        if survey.with_logprobs or self.model is not None:
            fields.append(presets.logprobs())
        if self.model is not None:
            fields.append(self.model.shape.routed_experts())
        fingerprint = None if self.tokenizer is None else self.tokenizer.fingerprint
        self.destination = Destination(store, plan.run, fields, fingerprint)
        self.max_tokens = plan.max_tokens
        if self.model is not None and self.max_tokens is None:
            self.max_tokens = MODEL_TOKENS_MAX

    def note(self, text: str) -> None:
        notes = self.summary.notes
        notes[text if text in notes or len(notes) < NOTES_MAX else "further notes"] += 1


def _tell_problems(survey: Survey, source: Source, plan: ImportPlan, watcher: Watcher) -> None:
    problems = list(survey.bad.values())
    if problems and plan.on_error == "fail":
        more = f" (and {len(problems) - 1} more bad records)" if len(problems) > 1 else ""
        raise MalformedMessage(f"{problems[0]}{more}; nothing was imported")
    for problem in problems:
        watcher.problem(problem)
    if not survey.trajectories:
        names = ", ".join(map(str, source.files))
        raise MalformedMessage(f"{names}: no trajectory to import ({len(problems)} bad records)")


def _import_record(work: _Work, record: Record, watcher: Watcher) -> None:
    trajectory = work.source.parse(record)
    try:
        if work.destination.has(trajectory.session_id):
            work.summary.existing += 1
            return
        _store(work, trajectory)
    except (InvalidInput, Conflict) as error:
        if isinstance(error, StaleEpoch):
            raise
        message = f"{record.place}: {error.message}"
        if work.plan.on_error == "fail":
            stored = f"; {work.summary.sessions} sessions before it are imported"
            raise type(error)(message + stored, **error.details) from None
        watcher.problem(message)
        work.summary.bad += 1


def _store(work: _Work, trajectory: Trajectory) -> None:
    """One trajectory: everything is computed before its session begins."""
    steps = step_tokens(trajectory, work.tokenizer)
    kept = _cut(steps, work.max_tokens)
    routing: list[StepRouting] = [] if work.model is None else step_routing(work.model, kept)
    columns: dict[str, object] = {}
    if len(kept) < len(steps):
        columns["truncated"] = True
        work.summary.cut += 1
        work.note(f"cut before the model call that passes {work.max_tokens} tokens")
    elif trajectory.trailing:
        # JSON text, as steps have their messages: lone surrogates stay as their escapes.
        columns["trailing_messages"] = json.dumps(trajectory.trailing)
    segments, payload_bytes = work.destination.add(trajectory, kept, routing, columns)
    for note in trajectory.notes:
        work.note(note)
    summary = work.summary
    summary.sessions += 1
    summary.steps += len(kept)
    summary.segments += segments
    summary.tokens += sum(len(step.ids) for step in kept)
    summary.payload_bytes += payload_bytes


def _cut(steps: list[StepTokens], max_tokens: int | None) -> list[StepTokens]:
    if max_tokens is None:
        return steps
    fitting = next((n for n, step in enumerate(steps) if step.end > max_tokens), len(steps))
    if not fitting:
        raise InvalidInput(f"its first model call has {steps[0].end} tokens: at most {max_tokens}")
    return steps[:fitting]


def _make_tokenizer(plan: ImportPlan, survey: Survey) -> ChatTokenizer | None:
    if not survey.needs_tokenizer:
        return None
    tokenizer = ChatTokenizer.load(plan.tokenizer) if plan.tokenizer else ChatTokenizer.train(survey.texts)
    survey.texts.clear()
    if plan.save_tokenizer is not None:
        tokenizer.save(plan.save_tokenizer)
    return tokenizer


def _make_model(plan: ImportPlan, survey: Survey, tokenizer: ChatTokenizer | None) -> RecordedModel | None:
    if not plan.model:
        return None
    from arrow_tq.demo.model import ModelShape, RecordedModel

    vocabulary = max(survey.token_id_max + 1, 0 if tokenizer is None else tokenizer.vocabulary)
    return RecordedModel(ModelShape(vocabulary=vocabulary), plan.seed)
