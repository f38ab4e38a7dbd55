"""Metadata tables in memory, as a source for the SQL service."""

from __future__ import annotations

import json

import pyarrow as pa

from arrow_tq_schemas.tables import TABLES


class MemoryMetadata:
    """A ``MetadataSource`` whose rows are written by a test. Not for more than one thread."""

    def __init__(self) -> None:
        self._revision = 0
        self._rows: dict[str, dict[int, dict[str, object]]] = {name: {} for name in TABLES}
        self._kinds: dict[tuple[str, str], dict[str, str]] = {}
        self.asked: list[tuple[str, str | None, int]] = []
        """Arguments of the calls of ``changes``, in order."""

    def put(
        self, table: str, key: int, *, run: str, columns: dict[str, object] | None = None, **values: object
    ) -> None:
        """Write (or replace) the row of ``key``; the columns not given are NULL."""
        unknown = values.keys() - set(TABLES[table].names)
        if unknown:
            raise KeyError(f"{table} has no {', '.join(sorted(unknown))}")
        self._revision += 1
        text = None if columns is None else json.dumps(columns)
        self._rows[table][key] = {
            **dict.fromkeys(TABLES[table].names), **values,
            "run": run, "columns": text, "rev": self._revision, "key": key,
        }  # fmt: skip

    def declare(self, table: str, run: str, **kinds: str) -> None:
        """Kinds of user columns of a run's table."""
        self._kinds.setdefault((table, run), {}).update(kinds)

    def revision(self) -> int:
        return self._revision

    def changes(self, table: str, run: str | None, after: int) -> tuple[pa.Table, int]:
        self.asked.append((table, run, after))
        schema = pa.schema(
            [*TABLES[table], ("columns", pa.string()), ("rev", pa.int64()), ("key", pa.int64())]
        )
        rows = [
            row
            for row in self._rows[table].values()
            if (run is None or row["run"] == run) and int(str(row["rev"])) > after
        ]
        return pa.Table.from_pylist(rows, schema), self._revision

    def user_columns(self, table: str, run: str | None) -> dict[str, str]:
        found: dict[str, str] = {}
        for (name, owner), kinds in self._kinds.items():
            if name == table and run in (None, owner):
                found.update(kinds)
        return found
