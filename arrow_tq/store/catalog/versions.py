"""The order of weight versions: by ``set_policy_version`` or first appearance, whichever came first."""

from __future__ import annotations

import apsw

from arrow_tq.store.catalog.writer import Change


def version_ordinal(change: Change, run: int, version: str) -> int:
    """Place of a version in its run's order; a new one comes last."""
    found = change.execute("SELECT ordinal FROM versions WHERE run = ? AND version = ?", (run, version)).get
    if found is not None:
        return int(found)
    ordinal = int(change.execute("SELECT count(*) FROM versions WHERE run = ?", (run,)).get)
    change.execute("INSERT INTO versions VALUES (?, ?, ?)", (run, version, ordinal))
    return ordinal


def current_ordinal(connection: apsw.Connection, run: int) -> int:
    """Place of the policy version, or of the newest version where none was set; -1 before any."""
    found = connection.execute(
        "SELECT ordinal FROM versions JOIN runs ON runs.id = versions.run AND version = policy_version "
        "WHERE versions.run = ?",
        (run,),
    ).get
    if found is None:
        found = connection.execute("SELECT count(*) - 1 FROM versions WHERE run = ?", (run,)).get
    return int(found)
