"""Runs: declared once, joined by name, fenced by epoch."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apsw

from arrow_tq.store.catalog.database import Readers
from arrow_tq.store.catalog.task_sets import task_set
from arrow_tq.store.catalog.versions import version_ordinal
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.blobs import BLOB_FIELD
from arrow_tq_schemas.bundles import BUNDLE_FIELD
from arrow_tq_schemas.commands import Done, OpenBundleRun, OpenRun, RunInfo, SetPolicyVersion, TaskSpec
from arrow_tq_schemas.errors import Conflict, InvalidField, InvalidInput, NotFound, StaleEpoch
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.names import check_id, check_run

DEFAULT_TASK = "train"
FIELDS_MAX = 256
TASKS_MAX = 64
RUNS_NAMED_MAX = 20
VERSIONS_CACHED_MAX = 4096


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as the catalog knows it."""

    id: int
    name: str
    fields: dict[str, Field]
    tasks: dict[str, Task]
    durability: str
    epoch: int
    policy_version: str | None
    info: RunInfo

    def field(self, name: str) -> Field:
        """The declared field; raises ``NotFound`` naming those that exist."""
        found = self.fields.get(name)
        if found is None:
            raise NotFound(
                f"run {self.name!r} has no field {name!r}; it has {', '.join(self.fields)}", field=name
            )
        return found

    def check_epoch(self, epoch: int) -> None:
        """Raises ``StaleEpoch`` for a writer of an older epoch, ``Conflict`` for one not reached yet."""
        if epoch < self.epoch:
            raise StaleEpoch(
                f"run {self.name!r} is at epoch {self.epoch}: a writer of epoch {epoch} is refused",
                run=self.name,
                epoch=self.epoch,
            )
        if epoch > self.epoch:
            raise Conflict(
                f"run {self.name!r} is at epoch {self.epoch}, not yet at {epoch}", epoch=self.epoch
            )


class WriterRuns:
    """The writer thread's view: runs as the open transaction has them."""

    def __init__(self) -> None:
        self._records: dict[str, RunRecord] = {}
        self._task_names: dict[int, list[str]] = {}
        self._ordered: set[tuple[int, str]] = set()
        """Runs and versions that have their place in the order."""

    def order_version(self, change: Change, run: RunRecord, version: str) -> None:
        """Give a version its place, if it is new."""
        key = run.id, version
        if key in self._ordered:
            return
        version_ordinal(change, run.id, version)
        if len(self._ordered) >= VERSIONS_CACHED_MAX:
            self._ordered.clear()
        self._ordered.add(key)
        change.undo.append(lambda _: self._ordered.clear())

    def task_names(self, change: Change, task_set: int) -> list[str]:
        """The tasks of a set that was committed before: its row never changes."""
        found = self._task_names.get(task_set)
        if found is None:
            text = change.execute("SELECT tasks FROM task_sets WHERE id = ?", (task_set,)).get
            found = self._task_names[task_set] = json.loads(text)
        return found

    def get(self, change: Change, name: str) -> RunRecord:
        found = self._records.get(name)
        if found is None:
            found = self._records[name] = load_run(change.connection, name)
        return found

    def touched(self, change: Change, name: str) -> None:
        """The run's row was written: read it again, also where that is rolled back."""
        self._records.pop(name, None)
        change.undo.append(lambda _: self._records.clear())


class CommittedRuns:
    """What readers see: committed rows, cached."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._lock = threading.Lock()
        self._generation = 0
        self._records: dict[str, RunRecord] = {}

    def get(self, name: str) -> RunRecord:
        """Raises ``NotFound`` naming the runs that exist."""
        found = self._records.get(name)
        if found is None:
            generation = self._generation
            with self._readers.snapshot() as connection:
                found = load_run(connection, name)
            with self._lock:
                # A row that was read before a commit must not be kept after it.
                if generation == self._generation:
                    self._records[name] = found
        return found

    def forget(self) -> None:
        """A run changed."""
        with self._lock:
            self._generation += 1
            self._records.clear()


def load_run(connection: apsw.Connection, name: str) -> RunRecord:
    """Raises ``NotFound`` naming the runs that exist."""
    row: Any = connection.execute(
        "SELECT id, fields, tasks, durability, epoch, policy_version FROM runs WHERE run = ?", (name,)
    ).fetchone()
    if row is None:
        known: Any = connection.execute("SELECT run FROM runs ORDER BY run LIMIT ?", (RUNS_NAMED_MAX,))
        names = [one for (one,) in known]
        there = f"there are {', '.join(names)}" if names else "there is none yet"
        raise NotFound(f"run {name!r} does not exist; {there}", run=name)
    run_id, fields, tasks, durability, epoch, policy_version = row
    info = RunInfo(
        run=name,
        fields=json.loads(fields),
        tasks=json.loads(tasks),
        durability=durability,
        epoch=epoch,
        policy_version=policy_version,
    )
    declared = {field.name: field for field in map(Field.from_json, info.fields)}
    return RunRecord(run_id, name, declared, _tasks(info.tasks), durability, epoch, policy_version, info)


def open_run(change: Change, runs: WriterRuns, committed: CommittedRuns, command: OpenRun) -> RunInfo:
    """Create a run or join it; see ``OpenRun``.

    Raises:
        NotFound: no fields are declared and there is no such run.
        Conflict: a field, a task or the durability differs from what was declared first.
        StaleEpoch: the epoch is neither current nor the next.
    """
    name = check_run(command.run)
    row: Any = change.execute("SELECT epoch FROM runs WHERE run = ?", (name,)).fetchone()
    if row is None and command.fields is None:
        load_run(change.connection, name)
    if row is None:
        _create(change, command)
    elif command.fields is not None and not runs.get(change, name).fields:
        _declare(change, runs.get(change, name), command)
    else:
        _check_agrees(runs.get(change, name), command, _late_fields(change, name))
    _advance(change, name, 0 if row is None else int(row[0]), command.epoch)
    runs.touched(change, name)
    change.after.append(committed.forget)
    return runs.get(change, name).info


def open_bundle_run(
    change: Change, runs: WriterRuns, committed: CommittedRuns, command: OpenBundleRun
) -> RunInfo:
    """Join a run, making one without fields where there is none of that name."""
    name = check_run(command.run)
    if change.execute("SELECT 1 FROM runs WHERE run = ?", (name,)).get is None:
        _insert(change, name, "process", {}, {})
        runs.touched(change, name)
        change.after.append(committed.forget)
    return runs.get(change, name).info


def set_policy_version(
    change: Change, runs: WriterRuns, committed: CommittedRuns, command: SetPolicyVersion
) -> Done:
    """Note the version that the trainer serves; a new one comes last in the order."""
    record = runs.get(change, command.run)
    record.check_epoch(command.epoch)
    version_ordinal(change, record.id, check_id(command.version, "version"))
    change.execute(
        "UPDATE runs SET policy_version = ?, rev = ? WHERE id = ?", (command.version, change.rev, record.id)
    )
    runs.touched(change, command.run)
    change.after.append(committed.forget)
    # It may be an older version again: what was too stale may not be any more.
    change.wakes = True
    return Done(count=1)


def _create(change: Change, command: OpenRun) -> None:
    fields = declared_fields(command.fields or [])
    specs = [TaskSpec(name=DEFAULT_TASK)] if command.tasks is None else command.tasks
    tasks = declared_tasks(specs, fields)
    run = _insert(change, command.run, command.durability, fields, tasks)
    _make_task_sets(change, run, fields, tasks)


def _insert(
    change: Change, name: str, durability: str, fields: dict[str, Field], tasks: dict[str, Task]
) -> int:
    change.execute(
        "INSERT INTO runs (run, durability, epoch, fields, tasks, created_at, rev)"
        " VALUES (?, ?, 0, ?, ?, ?, ?)",
        (name, durability, _declaration(fields), _declaration(tasks), change.now_us, change.rev),
    )
    return change.connection.last_insert_rowid()


def _declare(change: Change, record: RunRecord, command: OpenRun) -> None:
    """Fields and tasks of a run that only held bundles so far.

    Raises:
        Conflict: another durability: bundles are stored under the first one.
    """
    if command.durability != record.durability:
        raise Conflict(
            f"run {record.name!r} holds bundles with durability {record.durability!r}, "
            f"not {command.durability!r}: declare the run before its first bundle"
        )
    fields = declared_fields(command.fields or [])
    specs = [TaskSpec(name=DEFAULT_TASK)] if command.tasks is None else command.tasks
    tasks = declared_tasks(specs, fields)
    change.execute(
        "UPDATE runs SET fields = ?, tasks = ?, rev = ? WHERE id = ?",
        (_declaration(fields), _declaration(tasks), change.rev, record.id),
    )
    _make_task_sets(change, record.id, fields, tasks)


def _make_task_sets(change: Change, run: int, fields: dict[str, Field], tasks: dict[str, Task]) -> None:
    """The usual sets exist from the start: every task, and none."""
    task_set(change, run, tasks, fields, list(tasks))
    task_set(change, run, tasks, fields, [])


def _declaration(named: Mapping[str, Field] | Mapping[str, Task]) -> str:
    return json.dumps([one.to_json() for one in named.values()])


def _advance(change: Change, name: str, current: int, epoch: int | None) -> None:
    if epoch is None or epoch == current:
        return
    if epoch != current + 1:
        raise StaleEpoch(
            f"run {name!r} is at epoch {current}: epoch {epoch} can neither join it nor follow it",
            run=name,
            epoch=current,
        )
    change.execute("UPDATE runs SET epoch = ?, rev = ? WHERE run = ?", (epoch, change.rev, name))


def declared_fields(declarations: Sequence[dict[str, object]]) -> dict[str, Field]:
    """Fields by name; refuses none, too many, and a name declared twice."""
    if not 0 < len(declarations) <= FIELDS_MAX:
        raise InvalidField(f"{len(declarations)} fields: expected 1 to {FIELDS_MAX}")
    fields: dict[str, Field] = {}
    for declaration in declarations:
        field = _field(declaration)
        if field.name == BUNDLE_FIELD.name:
            raise InvalidField(f"field name {field.name!r} is kept for bundles", field=field.name)
        if field.name in fields:
            raise InvalidField(f"field {field.name!r} is declared twice", field=field.name)
        if field.name == BLOB_FIELD.name:
            raise InvalidField(f"field {field.name!r}: the name is kept for blobs", field=field.name)
        fields[field.name] = field
    return fields


def declared_tasks(specs: Sequence[TaskSpec], fields: dict[str, Field]) -> dict[str, Task]:
    """Tasks by name; refuses none, too many, a name twice, and fields that the run does not declare."""
    if not 0 < len(specs) <= TASKS_MAX:
        raise InvalidInput(f"{len(specs)} tasks: expected 1 to {TASKS_MAX}")
    tasks = _tasks(specs)
    if len(tasks) != len(specs):
        names = [spec.name for spec in specs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"task {twice!r} is declared twice")
    for task in tasks.values():
        unknown = [name for name in task.fields or () if name not in fields]
        if unknown:
            raise InvalidField(
                f"task {task.name!r} reads {', '.join(unknown)}: the run declares {', '.join(fields)}",
                task=task.name,
            )
    return tasks


def _late_fields(change: Change, name: str) -> set[str]:
    """Fields that were added: whoever declares the run as it was first need not know them."""
    rows: Any = change.execute(
        "SELECT field FROM late_fields JOIN runs ON runs.id = late_fields.run WHERE runs.run = ?", (name,)
    )
    return {field for (field,) in rows}


def _check_agrees(record: RunRecord, command: OpenRun, late: set[str]) -> None:
    if command.fields is not None:
        asked = {name: field.to_json() for name, field in declared_fields(command.fields).items()}
        known = {
            name: field.to_json()
            for name, field in record.fields.items()
            if name in asked or name not in late
        }
        _compare(record.name, "field", known, asked)
        if command.durability != record.durability:
            raise Conflict(
                f"run {record.name!r} has durability {record.durability!r}, not {command.durability!r}"
            )
    if command.tasks is not None:
        asked = {name: task.to_json() for name, task in declared_tasks(command.tasks, record.fields).items()}
        _compare(record.name, "task", {name: task.to_json() for name, task in record.tasks.items()}, asked)


def _compare(
    run: str, what: str, known: dict[str, dict[str, object]], asked: dict[str, dict[str, object]]
) -> None:
    for name in [*known, *asked]:
        if known.get(name) != asked.get(name):
            raise Conflict(
                f"run {run!r}, {what} {name!r}: declared first as {_plain(known.get(name))}, "
                f"now as {_plain(asked.get(name))}",
                **{what: name},
            )


def _plain(declaration: dict[str, object] | None) -> str:
    if declaration is None:
        return "absent"
    return json.dumps({key: value for key, value in declaration.items() if value is not None})


def _field(declaration: dict[str, object]) -> Field:
    try:
        return Field.from_json(declaration)
    except TypeError as error:
        # A value of a type that no check expects, such as a list where a name belongs.
        raise InvalidField(f"field declaration {declaration!r}: {error}") from None


def _tasks(specs: Sequence[TaskSpec]) -> dict[str, Task]:
    return {spec.name: Task(spec.name, None if spec.fields is None else tuple(spec.fields)) for spec in specs}
