"""Whole dicts handed over: ``put_bundle`` and what goes with it, on any backend."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_tq.backend import Backend, BundleWriter, Read, written
from arrow_tq.bundles import LayoutMiss, Structure, pack, plan_fields
from arrow_tq.bundles.columns import column_names, positions_of, to_table
from arrow_tq.bundles.infer import SCHEMA_WORDS
from arrow_tq.bundles.objects import field_name
from arrow_tq.bundles.pieces import Span as Bytes
from arrow_tq.bundles.rebuild import Out, keys_of, read_fields, rebuild
from arrow_tq.bundles.selection import Rows, RowType, Selection, chosen_fields, select
from arrow_tq.calls import ask, checked
from arrow_tq.parallel import PART_BYTES_MIN, portions, run_all
from arrow_tq_schemas.bundles import BUNDLE_FIELD, DEFAULT_RUN, BundleRef, chunk_id, metadata_json
from arrow_tq_schemas.commands import (
    BundleInfo,
    CommitBundle,
    DeleteBundle,
    Done,
    OpenBundle,
    OpenBundleRun,
    RunInfo,
)
from arrow_tq_schemas.errors import DeadlineExceeded, InternalError, InvalidInput
from arrow_tq_schemas.spans import Span, Spans, to_spans

SPAN_BYTES = 3 << 20
"""Of one message where what is read has to travel."""
STRUCTURE_BYTES_MAX = 48 << 20
SHAPES_KEPT_MAX = 256
FIELDS_NAMED_MAX = 1000
DELETE_POLL_S = 0.05
Schema = Mapping[str, str]


class Bundles:
    """The bundles of one store. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._runs: dict[str, RunInfo] = {}
        self._hints: OrderedDict[object, dict[str, str]] = OrderedDict()
        """By shape of a dict, what its first bundle taught about its fields."""

    def joined(self, info: RunInfo) -> None:
        """A run was opened: bundles put into it from now on are of that epoch."""
        with self._lock:
            self._runs[info.run] = info

    def put(
        self, value: dict[object, object], schema: Schema | None, run: str | None, metadata: object
    ) -> BundleRef:
        """Store a dict; see ``Store.put_bundle``."""
        words = _checked(schema or {})
        text = metadata_json(metadata)
        info = self._run(DEFAULT_RUN if run is None else run)
        shape = _shape(value)
        hints = dict(self._hints.get(shape, {}))
        while True:
            try:
                bundle_id = self._write(value, words, hints, info, text)
            except LayoutMiss as miss:
                # Some block held what its field's first rows did not promise.
                if hints.get(miss.name) == miss.instead:
                    raise InternalError(f"bundle field {miss.name!r}: no layout fits") from None
                hints[miss.name] = miss.instead
                continue
            self._learnt(shape, hints)
            return BundleRef.make(info.run, bundle_id, text)

    def open(self, ref: str, lease_s: float) -> OpenedBundle:
        """A bundle to read from; see ``Store.open_bundle``."""
        named = BundleRef.parse(ref)
        with checked("open bundle"):
            command = OpenBundle(run=named.run, bundle_id=named.bundle_id, lease_s=lease_s)
        reply = self._backend.execute(command)
        if not isinstance(reply.body, BundleInfo):
            raise InternalError(f"reply to {command.verb}: {type(reply.body).__name__}")
        return OpenedBundle(self._backend, reply.body, Structure.from_bytes(reply.blobs[0]))

    def delete(self, ref: str, wait_s: float) -> None:
        """Take a bundle away; see ``Store.delete_bundle``."""
        named = BundleRef.parse(ref)
        until = time.monotonic() + wait_s
        while True:
            left = ask(self._backend, DeleteBundle(run=named.run, bundle_id=named.bundle_id), Done).count
            if not left or wait_s <= 0:
                return
            if time.monotonic() >= until:
                raise DeadlineExceeded(
                    f"bundle {named.bundle_id}: {left} readers still hold it after {wait_s} s; it is "
                    "deleted, and its bytes go with them",
                    readers=left,
                )
            time.sleep(min(DELETE_POLL_S, max(until - time.monotonic(), 0.0)))

    def _write(
        self, value: dict[object, object], words: Schema, hints: Schema, info: RunInfo, metadata: str
    ) -> str:
        plans = plan_fields(value, words, hints)
        writer = self._backend.bundle_writer(info)
        numbers = count(1)
        try:
            structure = pack(
                plans, None, writer.chunk_bytes, lambda size, fill: writer.write(next(numbers), size, fill)
            )
            head = structure.to_bytes()
            if len(head) > STRUCTURE_BYTES_MAX:
                raise InvalidInput(f"bundle: a structure of {len(head)} bytes, at most {STRUCTURE_BYTES_MAX}")
            # First by its number: it says where all else lies, which is known now.
            writer.write(0, len(head), lambda out: written(out, np.frombuffer(head, np.uint8)))
            writer.finish()
            names = [plan.name for plan in plans[:FIELDS_NAMED_MAX]]
            self._commit(writer, info, structure, len(head), names, metadata)
        except BaseException:
            writer.abandon()
            raise
        return writer.bundle_id

    def _commit(
        self,
        writer: BundleWriter,
        info: RunInfo,
        structure: Structure,
        head_bytes: int,
        names: list[str],
        metadata: str,
    ) -> None:
        with checked("put bundle"):
            command = CommitBundle(
                run=info.run,
                epoch=info.epoch,
                bundle_id=writer.bundle_id,
                chunks=1 + len(structure.chunks),
                rows=structure.rows,
                bytes=head_bytes + structure.nbytes,
                fields=names,
                metadata=metadata,
            )
        ask(self._backend, command, Done)

    def _run(self, name: str) -> RunInfo:
        with self._lock:
            known = self._runs.get(name)
        if known is None:
            with checked(f"run {name!r}"):
                command = OpenBundleRun(run=name)
            known = ask(self._backend, command, RunInfo)
            self.joined(known)
        return known

    def _learnt(self, shape: object, hints: dict[str, str]) -> None:
        if not hints:
            return
        with self._lock:
            self._hints[shape] = hints
            self._hints.move_to_end(shape)
            while len(self._hints) > SHAPES_KEPT_MAX:
                self._hints.popitem(last=False)


class OpenedBundle:
    """A bundle under a lease: its bytes stay until it is closed, or expires.

    What ``get`` gave stays valid after ``close``: views hold what they look at.

    Attributes:
        structure: its fields, their layouts, and where they lie.
        rows: how many samples it has.
        nbytes: bytes of its payload.
        metadata: as given to ``put_bundle``.
    """

    def __init__(self, backend: Backend, info: BundleInfo, structure: Structure) -> None:
        self._backend = backend
        self._info = info
        self.structure = structure
        self._keys = keys_of(structure)
        # A collector's finalizer is no place for a call over the network: elsewhere ``close`` tells, or time.
        self._lease = _Lease(backend if backend.reads_in_place else None, info)
        self._closed = False
        self.rows = structure.rows
        self.nbytes = info.bytes
        self.metadata = BundleRef.make(info.run, info.bundle_id, info.metadata).metadata

    @property
    def fields(self) -> list[object]:
        """The keys of the dict, in order."""
        return list(self._keys)

    def get(
        self,
        fields: Sequence[object] | None = None,
        rows: Rows = None,
        out: Out | None = None,
        row_type: RowType | None = None,
    ) -> dict[object, object]:
        """The dict, or a part of it; see ``Store.get_bundle``."""
        positions = chosen_fields(self.structure, fields, self._keys)
        selection = select(self.structure, rows, row_type)
        if out is not None:
            unknown = [name for name in out if name not in self._keys]
            if unknown:
                raise InvalidInput(f"out names {unknown[0]!r}: the bundle has no such field")
        span_bytes = None if self._backend.reads_in_place else SPAN_BYTES
        pieces = read_fields(self.structure, positions, selection, self._fetch, span_bytes)
        return rebuild(self.structure, positions, selection, pieces, out)

    def table(self, names: Sequence[str] | None = None) -> pa.Table:
        """Columns of the fields that have a row a sample, as Arrow; see ``bundles.columns``."""
        wanted = column_names(self.structure) if names is None else names
        positions = positions_of(self.structure, wanted)
        span_bytes = None if self._backend.reads_in_place else SPAN_BYTES
        pieces = read_fields(self.structure, positions, Selection(None, None), self._fetch, span_bytes)
        return to_table(self.structure, positions, pieces)

    def close(self) -> None:
        """Let go. Where rows are views of the store's own memory, that happens when the last one is gone."""
        if not self._closed and not self._backend.reads_in_place:
            self._backend.end_lease(self._info.run, self._info.lease_id)
        self._closed = True
        self._lease = _Lease(None, self._info)

    def _fetch(self, spans: Sequence[Bytes]) -> list[npt.NDArray[np.uint8]]:
        if not spans:
            return []
        asked = to_spans(
            [Span(0, chunk_id(self._info.bundle_id, span.chunk), span.offset, span.nbytes) for span in spans]
        )
        if self._backend.reads_in_place:
            return [np.asarray(_Held(block, self._lease)) for block in self._read(asked)]
        # What is seen for the first time is hashed, which takes longer than all else here.
        nbytes = sum(span.nbytes for span in spans)
        parts = portions(asked["rows"], min(self._backend.reads_at_once, nbytes // PART_BYTES_MIN))
        blocks: dict[int, list[npt.NDArray[np.uint8]]] = {}

        def read(first: int, end: int) -> None:
            blocks[first] = self._read(asked[first:end])

        run_all([partial(read, *part) for part in parts], len(parts))
        return [block for first, _ in parts for block in blocks[first]]

    def _read(self, asked: Spans) -> list[npt.NDArray[np.uint8]]:
        """Spans of bytes, one array each."""
        request = Read(self._info.run, BUNDLE_FIELD, 0, None, asked, whole=True)
        blocks = [np.asarray(rows.values).view(np.uint8) for rows in self._backend.read(request)]
        if [len(block) for block in blocks] != asked["rows"].tolist():
            raise InternalError(f"bundle {self._info.bundle_id}: an answer of other sizes than were asked")
        return blocks

    def __enter__(self) -> OpenedBundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lease:
    """Ends its lease when nothing refers to it any more."""

    __slots__ = ("__weakref__",)

    def __init__(self, backend: Backend | None, info: BundleInfo) -> None:
        if backend is not None:
            # Nobody is there to be told at the interpreter's end: the lease expires.
            weakref.finalize(self, backend.end_lease, info.run, info.lease_id).atexit = False


class _Held:
    """Memory of the store and the lease on it: as the base of an array it lives as long as any view."""

    __slots__ = ("__array_interface__", "_lease", "_memory")

    def __init__(self, memory: npt.NDArray[np.uint8], lease: _Lease) -> None:
        self._memory = memory
        self._lease = lease
        self.__array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (memory.ctypes.data, True),
            "version": 3,
        }


def _checked(schema: Schema) -> Schema:
    for name, word in schema.items():
        if word not in SCHEMA_WORDS:
            raise InvalidInput(
                f"bundle schema, field {name!r}: {word!r}, expected one of {', '.join(SCHEMA_WORDS)}",
                field=name,
            )
    return schema


def _shape(value: object) -> object:
    """What dicts of one kind have in common: their keys, and the types of values and first rows."""
    if not isinstance(value, dict):
        return None
    return tuple((field_name(key), type(one), _first_type(one)) for key, one in value.items())


def _first_type(value: object) -> object:
    return type(value[0]) if isinstance(value, list) and value else None
