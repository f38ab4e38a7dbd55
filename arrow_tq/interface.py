"""``Store``: what ``arrow_tq.open`` and ``arrow_tq.connect`` return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal

import pyarrow as pa

from arrow_tq.aio import Threads
from arrow_tq.backend import Backend
from arrow_tq.calls import ask, checked, read_table
from arrow_tq.runs import Run
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


class Store:
    """A trajectory store: an engine in this process, or a server. Thread-safe.

    Close it, or use it as a context manager. Methods with an ``a`` in front are the awaitable twins.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._threads = Threads()

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
        return Run(self._backend, self._threads, ask(self._backend, command, RunInfo))

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
