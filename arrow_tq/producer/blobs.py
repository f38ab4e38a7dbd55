"""The blobs of one open step: files that the agent saw, sent only where the run has none of that content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from arrow_tq.calls import ask
from arrow_tq_schemas.blobs import BLOB_FIELD, BlobRef, StepBlob, blob_id
from arrow_tq_schemas.commands import BlobInfo, FindBlob
from arrow_tq_schemas.errors import ArrowTQError, ChunkReleased, InvalidInput
from arrow_tq_schemas.names import check_media_type
from arrow_tq_schemas.receipts import Receipt

if TYPE_CHECKING:
    from arrow_tq.producer.step import Step


class StepBlobs:
    """What one step attached. Not thread-safe, as its step is not.

    The step comes with each call that needs it: known here, the two would be a cycle, left to the collector.
    """

    def __init__(self) -> None:
        self._attached: list[StepBlob] = []
        self._found: dict[str, bytes] = {}
        """Content that the run had when it was attached: kept, in case it is released before the commit."""
        self._brought: dict[str, Receipt] = {}
        """Where the content is that this step stored."""

    def attach(self, step: Step, content: bytes, media_type: str) -> BlobRef:
        """Refer to a file; its bytes are stored unless the run has them."""
        if not isinstance(content, bytes | bytearray | memoryview):
            raise InvalidInput(f"blob: expected bytes, got {type(content).__name__}")
        check_media_type(media_type)
        # A copy only of what its owner could still change.
        content = bytes(content)
        name = blob_id(content)
        run = step.session.run
        if name not in self._brought and name not in self._found:
            info = ask(run.backend, FindBlob(run=run.name, blob_id=name, bytes=len(content)), BlobInfo)
            if info.state == "stored":
                self._found[name] = content
            else:
                self._brought[name] = _store(step, content)
        self._attached.append(StepBlob(blob_id=name, media_type=media_type, bytes=len(content)))
        return BlobRef(run=run.name, blob_id=name, media_type=media_type, bytes=len(content))

    def record(self) -> list[StepBlob]:
        """What the step's commit says of them."""
        return [one.model_copy(update={"receipt": self._brought.get(one.blob_id)}) for one in self._attached]

    def bring(self, step: Step, error: ArrowTQError) -> bool:
        """Store what the run had and has no more, if that is what a commit failed by; whether it was."""
        names = error.details.get("blobs")
        if not isinstance(error, ChunkReleased) or not isinstance(names, list):
            return False
        gone = [str(name) for name in names]
        if not gone or not set(gone) <= self._found.keys():
            return False
        for name in gone:
            self._brought[name] = _store(step, self._found.pop(name))
        return True

    def let_go(self) -> None:
        """The step is over: nothing will be sent again."""
        self._found.clear()


def _store(step: Step, content: bytes) -> Receipt:
    run = step.session.run
    backend, rows = run.backend, np.frombuffer(content, np.uint8)
    encoded = run.encoder(BLOB_FIELD).encode(rows, 0, backend.shard(), run.ids, backend.placer)
    # Nobody can change bytes, so they may travel in the background.
    step.store(BLOB_FIELD, encoded, private=True)
    return encoded.receipt
