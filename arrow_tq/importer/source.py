"""The input as trajectories: which format a record has, and what all of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from arrow_tq.importer.atif_steps import parse_atif
from arrow_tq.importer.chat_tokenizer import TRAIN_CHARS_MAX, message_text
from arrow_tq.importer.openai_messages import parse_messages
from arrow_tq.importer.records import Record, read_records
from arrow_tq.importer.trajectory import Keys, Trajectory
from arrow_tq_schemas.errors import MalformedMessage

Format = Literal["auto", "messages", "atif"]


@dataclass(frozen=True, slots=True)
class Source:
    """Files and how to read them."""

    files: tuple[Path, ...]
    format: Format = "auto"
    keys: Keys = field(default_factory=Keys)

    def records(self) -> Iterator[Record]:
        """All records, one file after another."""
        before_bytes = 0
        for path in self.files:
            yield from read_records(path, before_bytes)
            before_bytes += path.stat().st_size

    def parse(self, record: Record) -> Trajectory:
        """The record's trajectory. Raises ``MalformedMessage`` with file name and line number."""
        try:
            if record.value is None:
                raise MalformedMessage(record.problem)
            fallback = f"{record.path.name.split('.')[0]}-{record.number}"
            return self._parser(record.value)(record.value, self.keys, fallback)
        except MalformedMessage as error:
            raise MalformedMessage(f"{record.place}: {error.message}") from None

    def _parser(self, value: Mapping[str, object]) -> Callable[[Mapping[str, object], Keys, str], Trajectory]:
        if self.format == "messages":
            return parse_messages
        if self.format == "atif":
            return parse_atif
        if "messages" in value:
            return parse_messages
        if "steps" in value and "schema_version" in value:
            return parse_atif
        raise MalformedMessage("neither chat messages (key messages) nor ATIF (schema_version and steps)")


@dataclass(slots=True)
class Survey:
    """What a first pass over the input found; it decides fields and tokenizer before anything is stored."""

    trajectories: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    """By place (``file:line``), why a record is none."""
    with_tokens: int = 0
    """Trajectories whose token ids are in the file."""
    with_logprobs: int = 0
    token_id_max: int = -1
    texts: list[str] = field(default_factory=list)
    """Text to train a tokenizer on, ``TRAIN_CHARS_MAX`` characters at most."""
    text_chars: int = 0

    @property
    def needs_tokenizer(self) -> bool:
        return self.with_tokens < self.trajectories

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        given = [turn.given for turn in trajectory.turns if turn.given is not None]
        if not given:
            self._add_text(trajectory)
            return
        self.with_tokens += 1
        self.with_logprobs += any(tokens.logprobs is not None for tokens in given)
        largest = max(max(tokens.prompt + tokens.completion) for tokens in given)
        self.token_id_max = max(self.token_id_max, largest)

    def _add_text(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            for message in turn.messages:
                room = TRAIN_CHARS_MAX - self.text_chars
                if room <= 0:
                    return
                self.texts.append(message_text(message)[:room])
                self.text_chars += len(self.texts[-1])


def take_survey(source: Source, on_record: Callable[[Record], None]) -> Survey:
    """Read everything once; bad records are listed in the survey's ``bad``.

    Raises:
        MalformedMessage: a file that cannot be read on.
    """
    survey = Survey()
    places: dict[str, str] = {}
    for record in source.records():
        on_record(record)
        try:
            trajectory = source.parse(record)
            earlier = places.setdefault(trajectory.session_id, record.place)
            if earlier != record.place:
                what = f"session {trajectory.session_id!r} is at {earlier} already"
                raise MalformedMessage(f"{record.place}: {what}")
            survey.add(trajectory)
        except MalformedMessage as error:
            survey.bad[record.place] = error.message
    return survey
