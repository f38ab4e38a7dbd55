"""``Store``: what ``arrow_tq.open`` and ``arrow_tq.connect`` return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from arrow_tq.aio import Threads
from arrow_tq.backend import Backend
from arrow_tq.bundle import Bundles, OpenedBundle
from arrow_tq.calls import ask, checked, read_table
from arrow_tq.runs import Run
from arrow_tq_schemas.bundles import BundleRef
from arrow_tq_schemas.commands import (
    GetPressure,
    GetStats,
    OpenRun,
    Pressure,
    RunInfo,
    RunQuery,
    Stats,
    TaskSpec,
)
from arrow_tq_schemas.errors import InvalidField
from arrow_tq_schemas.fields import Field, Task

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from arrow_tq.bundles.selection import Rows, RowType

BUNDLE_LEASE_S = 600.0


class Store:
    """A trajectory store: an engine in this process, or a server. Thread-safe.

    Close it, or use it as a context manager. Methods with an ``a`` in front are the awaitable twins.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._threads = Threads()
        self._bundles = Bundles(backend)

    @property
    def url(self) -> str:
        """Path or URL of the store."""
        return self._backend.url

    def run(
        self,
        name: str,
        fields: Sequence[Field] | None = None,
        tasks: Iterable[Task | str] = ("train",),
        durability: Literal["process", "disk"] = "process",
        epoch: int | None = None,
    ) -> Run:
        """Open a run, creating it when it is new.

        Args:
            name: the run's name.
            fields: its columns; None opens the run as it exists. Otherwise they, the tasks and the
                durability must equal what was declared first.
            tasks: consumers that claim and release on their own.
            durability: ``process`` survives kill -9 of everything, ``disk`` also power loss.
            epoch: None joins the current epoch; ``n`` advances it from n - 1 (compare-and-set) and fences
                writers of older epochs.

        Raises:
            NotFound: ``fields`` is None and there is no such run.
            Conflict: declarations differ; names the first difference.
            StaleEpoch: the run is past ``epoch``, or has not reached ``epoch - 1``.
        """
        declared: list[dict[str, object]] | None = None
        specs: list[TaskSpec] | None = None
        if fields is not None:
            for field in fields:
                if not isinstance(field, Field):
                    raise InvalidField(f"run {name!r}: fields must be arrow_tq.Field, got {field!r}")
            declared = [field.to_json() for field in fields]
            plain = [Task(task) if isinstance(task, str) else task for task in tasks]
            specs = [
                TaskSpec(name=task.name, fields=None if task.fields is None else list(task.fields))
                for task in plain
            ]
        with checked(f"run {name!r}"):
            command = OpenRun(run=name, fields=declared, tasks=specs, durability=durability, epoch=epoch)
        info = ask(self._backend, command, RunInfo)
        self._bundles.joined(info)
        return Run(self._backend, self._threads, info)

    # -- bundles: whole dicts ------------------------------------------------------------------

    def put_bundle(
        self,
        d: dict[Any, Any],
        schema: Mapping[str, str] | None = None,
        run: str | None = None,
        metadata: object = None,
    ) -> BundleRef:
        """Store a finished dict of per-sample values; readers see it when this returns, whole.

        Args:
            d: arrays, tensors, lists of either, of lists of numbers, of scalars, text or bytes, None, images,
                and nested values of these. To be left as it is until this returns.
            schema: by field, ``auto``, ``objects``, ``msgpack`` or ``whole``; see ``docs/bundles.md``.
            run: the run that it belongs to and whose quota it counts in, made if it is new; ``default``.
            metadata: up to 4 KB of JSON that travels with the reference, for a scheduler.

        Returns:
            A reference: text, under 256 bytes without metadata.

        Raises:
            InvalidInput: a value that could not come back as it is; names its path (``metadata[3].tool``).
            QuotaExceeded: the run has no room; names used and quota bytes. StoreFull: nor has the store.
        """
        return self._bundles.put(d, schema, run, metadata)

    def get_bundle(
        self,
        ref: str,
        fields: Sequence[Any] | None = None,
        rows: Rows = None,
        out: Mapping[Any, npt.NDArray[np.generic]] | None = None,
        row_type: RowType | None = None,
    ) -> dict[Any, Any]:
        """The dict that was put, or a part of it, equal in value and type.

        Arrays are read-only views: of the store's memory in this process, of what was received elsewhere.

        Args:
            ref: what ``put_bundle`` returned, also after a trip through JSON.
            fields: keys; None for all.
            rows: samples: a slice, a range, indices or a mask, in the order wanted; fields that have no row a
                sample come whole. ``"numpy"`` or ``"torch"`` here is a ``row_type``.
            out: by field, a flat writable array that takes the values; rows are then views of it.
            row_type: rows of numbers as ``numpy`` views or ``torch`` tensors, whatever they were put as.

        Raises:
            NotFound: no such bundle, field or run; a deleted bundle.
            InvalidInput: rows that are not there.
        """
        with self._bundles.open(ref, BUNDLE_LEASE_S) as opened:
            return opened.get(fields, rows, out, row_type)

    def open_bundle(self, ref: str, lease_s: float = BUNDLE_LEASE_S) -> OpenedBundle:
        """A bundle to read parts of, one after another; its bytes stay until it is closed, or ``lease_s``."""
        return self._bundles.open(ref, lease_s)

    def delete_bundle(self, ref: str, wait_s: float = 0) -> None:
        """Take a bundle away: nobody finds it any more. Its bytes go when its last reader is done.

        Args:
            ref: its reference. Deleting again does nothing.
            wait_s: how long to wait for readers.

        Raises:
            NotFound: there never was such a bundle.
            DeadlineExceeded: readers still held it after ``wait_s``; it is deleted all the same.
        """
        self._bundles.delete(ref, wait_s)

    async def aput_bundle(
        self,
        d: dict[Any, Any],
        schema: Mapping[str, str] | None = None,
        run: str | None = None,
        metadata: object = None,
    ) -> BundleRef:
        return await self._threads.call(self.put_bundle, d, schema, run, metadata)

    async def aget_bundle(
        self,
        ref: str,
        fields: Sequence[Any] | None = None,
        rows: Rows = None,
        out: Mapping[Any, npt.NDArray[np.generic]] | None = None,
        row_type: RowType | None = None,
    ) -> dict[Any, Any]:
        return await self._threads.call(self.get_bundle, ref, fields, rows, out, row_type)

    async def aopen_bundle(self, ref: str, lease_s: float = BUNDLE_LEASE_S) -> OpenedBundle:
        return await self._threads.call(self.open_bundle, ref, lease_s)

    async def adelete_bundle(self, ref: str, wait_s: float = 0) -> None:
        await self._threads.call(self.delete_bundle, ref, wait_s)

    # -- people --------------------------------------------------------------------------------

    def sql(self, query: str, run: str | None = None) -> pa.Table:
        """Ask in DuckDB SQL over the metadata tables of one run, or of all (``run=None``).

        The answer reflects every commit that was acked before the call.

        Raises:
            InvalidQuery: the statement is refused or wrong.
            QueryKilled: it passed its time or memory bound.
        """
        reply = self._backend.execute(RunQuery(query=query, run=run))
        return read_table(reply.blobs[0])

    def pressure(self) -> Pressure:
        """How full the store is, and who waits: for producers to hold back by."""
        return ask(self._backend, GetPressure(), Pressure)

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return ask(self._backend, GetStats(), Stats).values

    def close(self) -> None:
        """Let go of threads, connections and files. Idempotent."""
        self._threads.close()
        self._backend.close()

    async def arun(
        self,
        name: str,
        fields: Sequence[Field] | None = None,
        tasks: Iterable[Task | str] = ("train",),
        durability: Literal["process", "disk"] = "process",
        epoch: int | None = None,
    ) -> Run:
        return await self._threads.call(self.run, name, fields, tasks, durability, epoch)

    async def asql(self, query: str, run: str | None = None) -> pa.Table:
        return await self._threads.call(self.sql, query, run)

    async def apressure(self) -> Pressure:
        return await self._threads.call(self.pressure)

    async def astats(self) -> dict[str, float]:
        return await self._threads.call(self.stats)

    async def aclose(self) -> None:
        await self._threads.call(self._backend.close)
        self._threads.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"
