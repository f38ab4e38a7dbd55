"""What a recorded call is to the store: where its step goes, what is missing, and the commit."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from arrow_tq.adapters import EngineOutput
from arrow_tq.proxy.document import Document
from arrow_tq.proxy.failures import EngineFailure, StoreFailure
from arrow_tq.proxy.headers import CallNames
from arrow_tq.proxy.parts import Parts
from arrow_tq.proxy.protocols.base import INDEXER, ROUTED, Answer, Ask, Prompt, Protocol
from arrow_tq.proxy.recording import (
    CommitFailed,
    Place,
    Recorded,
    Said,
    check_receipts,
    drop,
    first_id,
    record,
)
from arrow_tq.proxy.sessions import SessionState
from arrow_tq.proxy.tree import NOTHING, Base, Known, Tokens, base_of_messages, base_of_tokens
from arrow_tq_schemas.commands import new_request_id
from arrow_tq_schemas.errors import ArrowTQError, MalformedMessage
from arrow_tq_schemas.fields import TOKEN_FIELD

LOGPROBS = "logprobs"
Result = TypeVar("Result")


class AskAgain(Exception):
    """The engine must be asked again: its tokens need rows from further before."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class Work:
    """One call's step, from before it is asked until it is committed."""

    def __init__(self, parts: Parts, state: SessionState, names: CallNames, prompt: Prompt) -> None:
        self.prompt = prompt
        self._parts = parts
        self._state = state
        self._name = names.step or new_request_id()
        self.key = (names.session, names.step)
        """Under which the answer is kept, where the agent named the call."""
        self._run = state.session.run
        self._heavy = frozenset(name for name in (ROUTED, INDEXER) if name in self._run.fields)
        attempts = state.attempts.get(self._name, 0)
        self._attempt = attempts + 1
        parent, told, retry_of = self._parent(names, attempts)
        base = self._base(parent)
        step_id = f"{self._name}~{self._attempt}" if attempts else self._name
        self.place = Place(step_id, parent, told, retry_of, base)

    @property
    def promised(self) -> bool:
        """Whether only the messages say what is there already."""
        return self.prompt.tokens is None and self.place.base.step is not None

    def streams(self, protocol: Protocol) -> bool:
        """Whether the engine is asked for a stream."""
        chosen = self._parts.config.chat_streams
        if not self.prompt.stream or chosen == "native":
            return self.prompt.stream
        if protocol.streams >= {ROUTED, INDEXER}:
            return True
        return chosen == "auto" and self._streamed_whole(protocol)

    def ask(self, protocol: Protocol, start: int | None) -> Ask:
        """What to ask the engine for; ``start`` where an answer showed which is needed."""
        fields = self._heavy if self._parts.config.routing == "payload" else frozenset[str]()
        if start is None:
            start = self.place.base.covered if self._heavy else 0
            if self.promised and self.streams(protocol):
                # What was passed on cannot be asked again: no risk is taken.
                start = 0
        return Ask(fields, start)

    async def take(self, protocol: Protocol, answer: Answer, raw: bytes | bytearray) -> bytes:
        """An answer's text without what the agent did not ask for; what was asked for is in the answer.

        Raises:
            EngineFailure: it is not of its form.
        """

        def work() -> bytes:
            document = Document(raw, "the engine's answer", protocol.shape)
            stripped = answer.take(document)
            if not answer.found.finished:
                raise MalformedMessage("the engine's answer: no finish reason")
            return stripped

        return await self._decoding(work)

    async def record(self, answer: Answer, ask: Ask) -> bytes:
        """Decode, store and commit; gives the reference, as JSON.

        Raises:
            AskAgain: rows are missing before those that were asked for.
            EngineFailure: the answer cannot be recorded.
            StoreFailure: the store could not.
            ArrowTQError: the session has ended, or the step's place is taken.
        """
        found = answer.found
        tokens = self.prompt.tokens if self.prompt.tokens is not None else found.prompt
        if tokens is None:
            raise EngineFailure(502, MalformedMessage("the engine's answer: no prompt_token_ids"))
        base = self.place.base
        if self.prompt.tokens is None:
            base = base_of_tokens(self.place.parent, tokens)
            if self._heavy and base.covered < answer.asked:
                await self._drop(answer)
                raise AskAgain(base.covered)
        try:
            output = await self._decoding(self._decode, answer, ask, len(tokens), base)
        except EngineFailure:
            await self._drop(answer)
            raise
        task = asyncio.create_task(self._commit(base, tokens, output, answer))
        self._parts.commits.add(task)
        task.add_done_callback(self._parts.commits.discard)
        if self.key[1] is not None:
            self._state.commits[self._name] = task
        # Once it goes out, a commit is not taken back, whether or not the agent still waits.
        return await asyncio.shield(task)

    def _decode(self, answer: Answer, ask: Ask, prompt_tokens: int, base: Base) -> EngineOutput:
        names = {TOKEN_FIELD, LOGPROBS, *ask.fields} & set(self._run.fields)
        fields = {name: self._run.fields[name] for name in names}
        output = answer.decode(fields, prompt_tokens, answer.asked, self._parts.policy)
        missing = self._heavy - ask.fields
        if missing and not output.aborted:
            end = prompt_tokens + output.completion_tokens - 1
            check_receipts(answer.found.receipts, missing, base.covered, end)
        answer.release()
        return output

    async def _commit(self, base: Base, tokens: Tokens, output: EngineOutput, answer: Answer) -> bytes:
        state, parts = self._state, self._parts
        said = self._said(answer.found.reply)
        place = replace(self.place, base=base)
        began = time.monotonic()
        try:
            done: Recorded = await parts.store.ask(
                record, state.session, place, said, tokens, output, answer.found.receipts
            )
        except CommitFailed as failed:
            self._note_attempt(output)
            raise StoreFailure(failed.error) from None
        self._note_attempt(output)
        if self.place.retry_of is not None:
            state.forget(self._name)
        state.commit(self._name, done.step)
        parts.metrics.steps.inc()
        parts.metrics.record_s.observe(time.monotonic() - began)
        fields = done.reference["fields"]
        assert isinstance(fields, dict)
        parts.metrics.stored_bytes.inc(sum(entry["bytes"] for entry in fields.values()))
        return json.dumps(done.reference, separators=(",", ":")).encode("ascii")

    def _note_attempt(self, output: EngineOutput) -> None:
        """The store has this attempt, or may have it: the next one replaces it."""
        self._state.attempts[self._name] = self._attempt
        self._state.firsts.setdefault(self._name, first_id(self.place.step_id, output))

    async def _drop(self, answer: Answer) -> None:
        if answer.found.receipts:
            await self._run.threads.call(drop, self._run, answer.found.receipts)

    async def _decoding(self, call: Callable[..., Result], *args: object) -> Result:
        try:
            return await self._parts.decoding.run(call, *args)
        except ArrowTQError as error:
            raise EngineFailure(502, error) from None

    def _streamed_whole(self, protocol: Protocol) -> bool:
        """Whether a stream of the engine would carry everything that the run declares."""
        expected = self._heavy if self._parts.config.routing == "payload" else frozenset[str]()
        return protocol.streams_tokens and expected <= protocol.streams

    def _parent(self, names: CallNames, attempts: int) -> tuple[Known | None, str | None, str | None]:
        """The step before, what the store is told of it, and what is retried."""
        state = self._state
        again = self._name if attempts else names.retry_of
        if again is not None:
            before = state.steps.get(again)
            retried = state.firsts.get(again, again)
            if before is not None and names.parent is None:
                # The store knows where it went.
                return before.parent, None, retried
            parent = state.parent_of(names)
            return parent, parent.step_id if parent is not None else "", retried
        parent = state.parent_of(names)
        return parent, parent.step_id if parent is not None else "", None

    def _base(self, parent: Known | None) -> Base:
        if self.prompt.tokens is not None:
            return base_of_tokens(parent, self.prompt.tokens)
        if self.prompt.messages is not None:
            return base_of_messages(parent, self.prompt.messages)
        return NOTHING

    def _said(self, reply: object) -> Said:
        whole, parent = self.prompt.messages, self.place.parent
        if whole is None:
            return Said(None, (), None, extends=False)
        grew = parent is not None and parent.begins_messages(whole)
        new = list(whole)
        if grew and parent is not None:
            new = new[parent.messages :]
            if new and isinstance(new[0], dict) and new[0].get("role") == "assistant":
                # The parent's own answer, which is on record as the engine gave it.
                new = new[1:]
        if reply is not None:
            new.append(reply)
        return Said(whole, new, self.prompt.tools, extends=grew)
