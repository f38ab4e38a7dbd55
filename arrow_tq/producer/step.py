"""A step: one model call, committed whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from arrow_tq.backend import PutHandle
from arrow_tq.calls import ask
from arrow_tq.producer.blobs import StepBlobs
from arrow_tq.producer.branch import Branch
from arrow_tq.producer.encode import Encoded
from arrow_tq.producer.stream import AsyncStepStream, StepStream
from arrow_tq_schemas.blobs import BlobRef, StepBlob
from arrow_tq_schemas.commands import Done, DropChunks, StepCommit
from arrow_tq_schemas.errors import ArrowTQError, Conflict, MalformedMessage
from arrow_tq_schemas.fields import Field
from arrow_tq_schemas.receipts import Receipt, chunk_ids, joined
from arrow_tq_schemas.trusted import trusted

if TYPE_CHECKING:
    from arrow_tq.producer.session import Session

COPY_BYTES_MAX = 16 << 20
"""Puts up to this size are copied so that they travel in the background; waiting for the ack of each
was measured to cost a third of the wire's rate, the copy a tenth. Larger ones fill the wire by themselves."""
NO_BLOBS: list[StepBlob] = []
"""Of every step without: nobody changes what a record holds."""
CLEAN_UP_S = 10.0
"""How long a failed step waits for its puts under way before it frees them."""


class Step:
    """A step being written. ``with`` commits it on exit; an exception inside frees what it wrote.

    ``async with`` gives the awaitable twin, an ``AsyncStep``.
    """

    def __init__(
        self,
        session: Session,
        step_id: str,
        branch: Branch,
        messages: str,
        version: str | None,
        sampled: tuple[int, int] | None,
    ) -> None:
        self.session = session
        self.id = step_id
        self._branch = branch
        self._messages = messages
        self._version = version
        self._sampled = sampled
        self._receipts: list[Receipt] = []
        self._written: list[Receipt] = []
        self._pending: list[PutHandle] = []
        self._streams: tuple[StepStream, ...] = ()
        self._blobs: StepBlobs | None = None
        """Of few steps: what every step has on it, the collector walks."""
        self._state = "open"

    def put(self, field: str, array: object, start: int) -> Receipt:
        """Store rows of a field at absolute positions ``[start, start + rows)``.

        The array is the caller's again when this returns. Rows travel in the background where they had
        to be converted anyway; the step's commit waits for them.

        Args:
            field: a field of the run.
            array: ``[rows, *field.shape]``: numpy, nested lists, pyarrow or torch; or a list of numpy arrays
                or tensors of that shape, which are stored as if they were one.
            start: absolute position of the first row.

        Raises:
            InvalidField: shape or dtype does not fit; names both.
            ValueOutOfRange: a value does not fit; names field, value and position.
            StoreFull: no room; retryable.
        """
        self.check_open("put")
        run = self.session.run
        declared = run.field(field)
        backend = run.backend
        encoded = run.encoder(declared).encode(array, start, self.session.shard(), run.ids, backend.placer)
        if not encoded.copied and backend.puts_in_background and encoded.nbytes <= COPY_BYTES_MAX:
            encoded = encoded.copy()
        self.store(declared, encoded, encoded.copied)
        self._receipts.append(encoded.receipt)
        return encoded.receipt

    def attach(self, receipt: Receipt | str | bytes | Mapping[str, object], overlay: bool = False) -> None:
        """Make rows that another writer stored (an engine with a recorder) part of this step.

        Several producers may serve one step (prefill and decode apart), each with positions of its own.

        Args:
            receipt: as an object, as JSON text, or as what JSON text parses to.
            overlay: let it cover positions that the step has already; the field's overlay policy decides
                which rows are seen.

        Raises:
            Conflict: it covers positions that the step has already, and ``overlay`` is not set; names both
                ranges.
            MalformedMessage: no receipt.
        """
        self.check_open("attach")
        if isinstance(receipt, Mapping):
            try:
                receipt = json.dumps(receipt)
            except (TypeError, ValueError) as error:
                raise MalformedMessage(f"receipt: {error}") from None
        if not isinstance(receipt, Receipt):
            receipt = Receipt.from_json(receipt)
        declared = self.session.run.field(receipt.field)
        if not overlay:
            self._check_apart(receipt, declared)
        self._receipts.append(receipt)

    def attach_blob(self, data: bytes, media_type: str) -> BlobRef:
        """Refer to a file that the agent saw (a screenshot, a document); ``run.blob`` reads it.

        A run stores the same bytes once, however many steps and sessions attach them, and frees them with
        the last of these: aborted, discarded, expired, or released by every task.

        Args:
            data: the file's content.
            media_type: what it is, such as ``image/png``.

        Raises:
            InvalidInput: it is larger than the store's ``blob_bytes_max``, or the media type is none.
            StoreFull: no room; retryable.
        """
        self.check_open("attach_blob")
        self._blobs = self._blobs or StepBlobs()
        return self._blobs.attach(self, data, media_type)

    def stream(self, field: str, window_tokens: int = 32) -> StepStream:
        """Write a field as its rows come, the last ``window_tokens`` of which may still be replaced.

        Its ``finish`` attaches the rows to this step; a step with an unfinished stream does not commit.
        """
        self.check_open("stream")
        stream = StepStream(self, self.session.run.field(field), window_tokens)
        self._streams += (stream,)
        return stream

    def flush(self) -> None:
        """Return when everything that was put is stored: its receipts may then go to another process."""
        for handle in self._pending:
            handle.wait(self.session.run.put_timeout_s)
        self._pending.clear()

    def commit(self) -> None:
        """Commit, once the puts are stored. Called by the context manager's exit.

        Raises:
            RowCountMismatch: ``all`` fields end at different positions; names both.
            SessionClosed, StaleEpoch, Conflict: as their names say. The step's chunks are freed.
        """
        self.check_open("commit")
        try:
            for stream in self._streams:
                stream.check_finished()
            self._commit()
        except BaseException:
            self.cancel()
            raise
        self._state = "committed"
        if self._blobs is not None:
            self._blobs.let_go()

    def cancel(self) -> None:
        """Free what the step wrote; receipts of others are left to their writers. Idempotent."""
        if self._state != "open":
            return
        self._state = "cancelled"
        if self._blobs is not None:
            self._blobs.let_go()
        ids = chunk_ids(self._written)
        for handle in self._pending:
            try:
                handle.wait(CLEAN_UP_S)
            except ArrowTQError:
                # The put failed: there is nothing to free, and its error was raised or is superseded.
                continue
        if ids:
            names = [chunk.hex for chunk in ids]
            try:
                run = self.session.run
                ask(run.backend, DropChunks(run=run.name, chunk_ids=names), Done)
            except ArrowTQError:
                # A store out of reach reaps them itself: nothing attached them.
                return

    def store(self, declared: Field, encoded: Encoded, private: bool) -> None:
        """Store chunks as this step's own, without attaching them; for its streams.

        ``private``: nobody else has their memory, so they may travel in the background.
        """
        run = self.session.run
        self._written.append(encoded.receipt)
        if encoded.places:
            placer = run.backend.placer
            assert placer is not None
            self._pending.append(placer.stored(run.name, encoded.places))
        handles = [run.backend.put(declared, chunks) for chunks in encoded.chunks_by_group if chunks]
        if private:
            self._pending.extend(handles)
        else:
            # The chunks are the caller's own memory, which it may change once this returns.
            for handle in handles:
                handle.wait(run.put_timeout_s)

    def written_chunks(self) -> list[str]:
        """Ids of every chunk that this step stored itself, all layer groups."""
        return [chunk.hex for chunk in chunk_ids(self._written)]

    def attach_own(self, receipt: Receipt) -> None:
        """Attach what one of this step's streams wrote."""
        self._check_apart(receipt, self.session.run.field(receipt.field))
        self._receipts.append(receipt)

    def _check_apart(self, receipt: Receipt, declared: Field) -> None:
        for other in self._receipts:
            if other.field == receipt.field and max(other.start, receipt.start) < min(other.end, receipt.end):
                raise Conflict(
                    f"step {self.id!r}: field {receipt.field!r}: [{receipt.start}, {receipt.end}) overlaps "
                    f"[{other.start}, {other.end}), which the step has already; with overlay=True the "
                    f"field's policy ({declared.overlay!r} wins) decides",
                    field=receipt.field,
                    range=[receipt.start, receipt.end],
                    other=[other.start, other.end],
                )

    def _commit(self) -> None:
        """Commit the record, again where a blob that the run had was released meanwhile."""
        run = self.session.run
        while True:
            try:
                run.backend.commit(self._record(), self._pending, run.put_timeout_s)
                self._pending.clear()
                return
            except ArrowTQError as error:
                if self._blobs is None or not self._blobs.bring(self, error):
                    raise

    def _record(self) -> StepCommit:
        run = self.session.run
        # All of it was checked when it was given; the server checks it again.
        return trusted(
            StepCommit,
            {
                "run": run.name,
                "epoch": run.epoch,
                "session_id": self.session.id,
                "step_id": self.id,
                "parent": self._branch.parent,
                "messages": self._messages,
                "version": self._version,
                "sampled": self._sampled,
                "receipts": joined(self._receipts),
                "tools": self._branch.tools,
                "retry_of": self._branch.retry_of,
                "extends": self._branch.extends,
                "blobs": NO_BLOBS if self._blobs is None else self._blobs.record(),
            },
        )

    def check_open(self, what: str) -> None:
        """Raise ``Conflict`` where the step is over."""
        if self._state != "open":
            raise Conflict(f"{what} on step {self.id!r}: it is {self._state} already", step_id=self.id)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "open":
            return
        if error is None:
            self.commit()
        else:
            self.cancel()

    async def __aenter__(self) -> AsyncStep:
        return AsyncStep(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.run.threads.call(self.__exit__, kind, error, trace)


class AsyncStep:
    """What ``async with session.step(...)`` gives: the same step, awaitable."""

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def id(self) -> str:
        return self._step.id

    @property
    def session(self) -> Session:
        return self._step.session

    async def put(self, field: str, array: object, start: int) -> Receipt:
        """As ``Step.put``."""
        return await self.session.run.threads.call(self._step.put, field, array, start)

    async def attach(
        self, receipt: Receipt | str | bytes | Mapping[str, object], overlay: bool = False
    ) -> None:
        """As ``Step.attach``."""
        self._step.attach(receipt, overlay)

    async def attach_blob(self, data: bytes, media_type: str) -> BlobRef:
        """As ``Step.attach_blob``."""
        return await self.session.run.threads.call(self._step.attach_blob, data, media_type)

    def stream(self, field: str, window_tokens: int = 32) -> AsyncStepStream:
        """As ``Step.stream``."""
        return AsyncStepStream(self._step.stream(field, window_tokens), self.session.run.threads)

    async def flush(self) -> None:
        """As ``Step.flush``."""
        await self.session.run.threads.call(self._step.flush)

    async def commit(self) -> None:
        """As ``Step.commit``."""
        await self.session.run.threads.call(self._step.commit)

    async def cancel(self) -> None:
        """As ``Step.cancel``."""
        await self.session.run.threads.call(self._step.cancel)
