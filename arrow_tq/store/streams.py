"""The streams of a shard, by key; and the folders of keys that hold nothing any more.

Runs come and go, and nothing of a finished one stays behind. A folder is removed only while nobody can be
about to write into it: under the lock that streams are opened under, with no stream of the key (for the
run's folder, of the run) left.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Container
from pathlib import Path

from arrow_tq.store import extent_schema
from arrow_tq.store.extent_key import TIERS, ExtentKey, Roots
from arrow_tq.store.stream import Stream, StreamSite
from arrow_tq_schemas.fields import Field


class Streams:
    """Streams that were opened and are not gone. Thread-safe."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._opening = threading.Lock()
        """Of its own: a stream writes a file as it opens, for which readers and droppers need not wait."""
        self._by_key: dict[ExtentKey, Stream] = {}
        self._first_numbers: dict[ExtentKey, int] = {}
        self._empty: set[ExtentKey] = set()
        """Keys whose folders may be empty now, or later."""

    def all(self) -> list[Stream]:
        return list(self._by_key.values())

    def number_after(self, key: ExtentKey, number: int) -> None:
        """An extent of an earlier process has this number."""
        self._first_numbers[key] = number + 1

    def locked(self, key: ExtentKey, field: Field, site: StreamSite) -> Stream:
        """Where chunks of this key are appended, its lock held."""
        while True:
            stream = self._by_key.get(key) or self._open(key, field, site)
            stream.lock.acquire()
            if not stream.gone:
                return stream
            # It was idle, and its folders went the moment before.
            stream.lock.release()

    def locked_at_once(self, key: ExtentKey, field: Field, site: StreamSite) -> Stream | None:
        """As ``locked``; None where somebody else has its lock."""
        while True:
            stream = self._by_key.get(key) or self._open(key, field, site)
            if not stream.lock.acquire(blocking=False):
                return None
            if not stream.gone:
                return stream
            stream.lock.release()

    def emptied(self, key: ExtentKey) -> None:
        """An extent of this key lost its name."""
        with self._opening:
            self._empty.add(key)

    def find_empty(self) -> None:
        """At start: any folder that an earlier process left may be."""
        for tier in TIERS:
            self._empty.update(self._roots.keys(tier))

    def tidy(self, used: Container[ExtentKey]) -> None:
        """Remove the folders of keys without extents; one that is being written to keeps its own.

        Args:
            used: keys that have extents.
        """
        with self._opening:
            empty = [key for key in self._empty if key not in used]
        for key in empty:
            stream = self._by_key.get(key)
            if stream is None:
                self._remove(key)
            elif stream.lock.acquire(blocking=False):
                try:
                    if stream.live is None and stream.spare is None:
                        stream.gone = True
                        self._remove(key)
                finally:
                    stream.lock.release()

    def _open(self, key: ExtentKey, field: Field, site: StreamSite) -> Stream:
        with self._opening:
            if key not in self._by_key:
                schema, first = field.arrow_schema(key.group), self._first_numbers.get(key, 0)
                self._by_key[key] = Stream(key, schema, first, site)
            return self._by_key[key]

    def _remove(self, key: ExtentKey) -> None:
        with self._opening:
            stream = self._by_key.get(key)
            if stream is not None:
                if not stream.gone:
                    # Opened since we looked.
                    return
                self._first_numbers[key] = stream.next_number
                del self._by_key[key]
            self._empty.discard(key)
            extents, sidecars = self._roots.extents(key.tier) / key.folder, self._roots.sidecars(key)
            if not _remove_empty(extents):
                return
            copy = sidecars / extent_schema.COPY_NAME
            if sidecars.is_dir() and {path.name for path in sidecars.iterdir()} <= {copy.name}:
                copy.unlink(missing_ok=True)
                _remove_empty(sidecars)
            if not any((other.run, other.tier) == (key.run, key.tier) for other in self._by_key):
                _remove_empty(extents.parent)
                _remove_empty(sidecars.parent)


def _remove_empty(folder: Path) -> bool:
    """Whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
