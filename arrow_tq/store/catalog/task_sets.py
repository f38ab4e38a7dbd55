"""Which tasks a session is for, and which of them keeps a chunk of each field alive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.fields import Task

NOBODY = ""
"""Stands for a task where a session has none: it is never claimed, and freed by discard or expiry."""


def task_set(
    change: Change, run: int, declared: Mapping[str, Task], fields: Iterable[str], names: Sequence[str]
) -> int:
    """The row of this set of a run's tasks, made when it is new.

    A chunk is held by each task of the set that reads its field, or by all of them where none does.

    Raises:
        InvalidInput: a name that the run does not declare.
    """
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise InvalidInput(f"tasks {', '.join(map(repr, unknown))}: the run declares {', '.join(declared)}")
    chosen = [name for name in declared if name in names]
    text = json.dumps(chosen)
    found = change.execute("SELECT id FROM task_sets WHERE run = ? AND tasks = ?", (run, text)).get
    if found is not None:
        return int(found)
    change.execute("INSERT INTO task_sets (run, tasks) VALUES (?, ?)", (run, text))
    made = change.connection.last_insert_rowid()
    for field in fields:
        _add_holders(change, made, declared, chosen, field)
    return made


def add_holders(change: Change, run: int, declared: Mapping[str, Task], field: str) -> None:
    """Say in every set of the run which tasks hold a field that came late."""
    sets = change.execute("SELECT id, tasks FROM task_sets WHERE run = ?", (run,)).fetchall()
    for made, names in sets:
        _add_holders(change, int(str(made)), declared, json.loads(str(names)), field)


def _add_holders(
    change: Change, made: int, declared: Mapping[str, Task], chosen: Sequence[str], field: str
) -> None:
    readers = [name for name in chosen if declared[name].reads(field)] or chosen or [NOBODY]
    change.executemany("INSERT INTO holders VALUES (?, ?, ?)", [(made, holder, field) for holder in readers])
