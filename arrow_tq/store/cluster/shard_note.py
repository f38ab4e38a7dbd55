"""What a shard's data directory says of itself: a name for life, and the number that its chunks carry."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

NOTE_NAME = "shard.json"


@dataclass(frozen=True, slots=True)
class ShardNote:
    """The note in a shard's data directory.

    Args:
        node: name of the directory, made with its first use.
        number: the shard's number; None: it never joined.
    """

    node: str
    number: int | None

    @classmethod
    def read(cls, folder: Path) -> ShardNote | None:
        """None: no shard was ever here."""
        path = folder / NOTE_NAME
        if not path.exists():
            return None
        note = json.loads(path.read_text())
        return cls(note["node"], note["number"])

    @classmethod
    def read_or_make(cls, folder: Path) -> ShardNote:
        """The note; one of a new shard where there is none."""
        found = cls.read(folder)
        if found is None:
            found = cls(uuid.uuid4().hex, None)
            found.write(folder)
        return found

    def write(self, folder: Path) -> None:
        """On disk when this returns."""
        part = (folder / NOTE_NAME).with_suffix(".part")
        with part.open("w") as file:
            file.write(json.dumps({"node": self.node, "number": self.number}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NOTE_NAME)
