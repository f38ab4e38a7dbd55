"""Fields that a run gets after it was declared."""

from __future__ import annotations

import json
from collections.abc import Mapping

from arrow_tq.store.catalog.runs import FIELDS_MAX, CommittedRuns, WriterRuns, declared_fields
from arrow_tq.store.catalog.task_sets import add_holders
from arrow_tq.store.catalog.writer import Change
from arrow_tq_schemas.commands import AddField, RunInfo
from arrow_tq_schemas.errors import Conflict, InvalidField


def add_field(change: Change, runs: WriterRuns, committed: CommittedRuns, command: AddField) -> RunInfo:
    """Declare one more field; the same again changes nothing.

    Raises:
        Conflict: the run has another field of that name; shows both.
        InvalidField: the declaration, or too many fields.
        StaleEpoch: the writer's epoch is over.
    """
    run = runs.get(change, command.run)
    run.check_epoch(command.epoch)
    (field,) = declared_fields([command.field]).values()
    known = run.fields.get(field.name)
    if known == field:
        return run.info
    if known is not None:
        raise Conflict(
            f"run {run.name!r} has a field {field.name!r} declared as {_plain(known.to_json())}, "
            f"now as {_plain(field.to_json())}",
            field=field.name,
        )
    if len(run.fields) >= FIELDS_MAX:
        raise InvalidField(f"run {run.name!r} has {len(run.fields)} fields: at most {FIELDS_MAX}")
    declared = [one.to_json() for one in [*run.fields.values(), field]]
    change.execute(
        "UPDATE runs SET fields = ?, rev = ? WHERE id = ?", (json.dumps(declared), change.rev, run.id)
    )
    change.execute("INSERT INTO late_fields VALUES (?, ?)", (run.id, field.name))
    add_holders(change, run.id, run.tasks, field.name)
    runs.touched(change, run.name)
    change.after.append(committed.forget)
    return runs.get(change, run.name).info


def _plain(declaration: Mapping[str, object]) -> str:
    return json.dumps({key: value for key, value in declaration.items() if value is not None})
