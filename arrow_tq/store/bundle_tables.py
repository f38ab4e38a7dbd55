"""``FROM bundle('...')`` in SQL: a bundle's columns, lent to the worker for one query.

The worker has no way to the store, and needs none: the columns that a query names are sent to it as an Arrow
table, over which it sees nothing but values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from arrow_tq.backend import Backend
from arrow_tq.bundle import Bundles, OpenedBundle
from arrow_tq.bundles.columns import column_names
from arrow_tq.sql_guard import split_explain
from arrow_tq_schemas.bundles import SCHEME, BundleRef
from arrow_tq_schemas.errors import InvalidInput, InvalidQuery, NotFound

FUNCTION = "bundle"
LENT_MAX = 16
"""Bundles that one query may name."""
LEASE_S = 600.0


class RunsOfBundles(Protocol):
    """What the catalog knows."""

    def run_of_bundle(self, bundle_id: str) -> str:
        """Raises ``NotFound``."""


@dataclass(frozen=True, slots=True)
class _Call:
    """``bundle('...')`` in a query: which text it is, and the reference in it."""

    start: int
    end: int
    reference: str


class BundleTables:
    """Finds bundles in queries. ``bytes_max`` bounds the columns that one query is lent."""

    def __init__(self, backend: Backend, catalog: RunsOfBundles, bytes_max: int) -> None:
        self._bundles = Bundles(backend)
        self._catalog = catalog
        self._bytes_max = bytes_max

    @contextmanager
    def lent(self, query: str, run: str | None) -> Iterator[tuple[str, dict[str, pa.Table]]]:
        """The query with names in place of ``bundle('...')``, and the tables of those names.

        Args:
            query: SQL. Without such a call it is passed on as it is.
            run: bundles of other runs do not exist for it; None: all do.

        Raises:
            InvalidQuery: too many bundles, or columns larger than a query may have.
            NotFound: no such bundle.
        """
        tokens = _tokens(query) if isinstance(query, str) and FUNCTION in query.lower() else []
        calls = _calls(tokens)
        everything = _wants_all(tokens)
        if len({call.reference for call in calls}) > LENT_MAX:
            raise InvalidQuery(f"SQL: {len(calls)} bundles in one query, {LENT_MAX} at most")
        tables: dict[str, pa.Table] = {}
        with ExitStack() as open_bundles:
            for call in reversed(calls):
                reference = self._reference(call.reference, run)
                name = f"_bundle_{reference.bundle_id}"
                if name not in tables:
                    opened = open_bundles.enter_context(self._bundles.open(reference, LEASE_S))
                    tables[name] = self._table(opened, query, everything)
                    self._check(tables)
                query = f"{query[: call.start]}{name}{query[call.end :]}"
            yield query, tables

    def _reference(self, text: str, run: str | None) -> BundleRef:
        """From a reference, or from a bundle's id alone."""
        try:
            if not text.startswith(SCHEME):
                BundleRef.parse(BundleRef.make("x", text))
                text = BundleRef.make(self._catalog.run_of_bundle(text), text)
            reference = BundleRef.parse(text)
        except InvalidInput:
            raise InvalidQuery(f"SQL: bundle({text[:80]!r}): expected a reference or a bundle_id") from None
        if run is not None and reference.run != run:
            raise NotFound(f"run {run!r} has no bundle {reference.bundle_id}", id=reference.bundle_id)
        return reference

    def _table(self, opened: OpenedBundle, query: str, everything: bool) -> pa.Table:
        """The columns that the query's text can refer to; row numbers where it names none."""
        names = column_names(opened.structure)
        lowered = query.lower()
        return opened.table(names if everything else [name for name in names if name.lower() in lowered])

    def _check(self, tables: dict[str, pa.Table]) -> None:
        size = sum(table.nbytes for table in tables.values())
        if size > self._bytes_max:
            raise InvalidQuery(
                f"SQL: the bundle columns that this query names are {size} bytes, {self._bytes_max} at most "
                "(half of memory_bytes): name fewer"
            )


class _Token(Protocol):
    """What sqlglot tells of a word of a query."""

    @property
    def text(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def _tokens(query: str) -> Sequence[_Token]:
    """The words of a query; none where it has no words, of which DuckDB says better what is wrong."""
    dialect = importlib.import_module("sqlglot.dialects.duckdb").DuckDB
    errors = importlib.import_module("sqlglot.errors")
    explained = split_explain(query)
    if explained is not None:
        # What follows it would be one word. Places stay as they are.
        query = explained.rjust(len(query))
    try:
        found: Sequence[_Token] = dialect().tokenize(query)
    except errors.SqlglotError:
        return []
    return found


def _kind(token: _Token) -> str:
    return str(token.token_type.name)  # type: ignore[attr-defined]


def _calls(tokens: Sequence[_Token]) -> Sequence[_Call]:
    """Every ``bundle('...')`` of a query, by its tokens: text in strings and comments is none."""
    calls = []
    for word, bracket, text, end in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        kinds = (_kind(bracket), _kind(text), _kind(end))
        if word.text.lower() == FUNCTION and kinds == ("L_PAREN", "STRING", "R_PAREN"):
            calls.append(_Call(word.start, end.end + 1, text.text))
    return calls


def _wants_all(tokens: Sequence[_Token]) -> bool:
    """Whether a star of the query stands for columns, and is no product and no ``count(*)``."""
    for before, token in pairwise(tokens):
        if _kind(token) == "STAR" and _kind(before) in ("SELECT", "COMMA", "DOT", "DISTINCT", "ALL"):
            return True
    return any(token.text.lower() in ("columns", "unpack", "exclude") for token in tokens)
