"""The text of a ``where=`` or ``order_by=``: its bounds, its parse tree, and the columns that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from arrow_tq_schemas.errors import InvalidQuery

if TYPE_CHECKING:
    from sqlglot import exp

    AnyNode = TypeVar("AnyNode", bound=exp.Expr)

TEXT_BYTES_MAX = 16_384
TOKENS_MAX = 2_000
DEPTH_MAX = 32
"""Operators and parentheses inside each other; a chain of AND or of OR counts once."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a predicate may name.

    Args:
        sql: SQLite expression of it, such as ``segments.reward``.
        kind: bool (0 or 1), int, float, text, json (mixed or nested: only IS NULL), or list (JSON text
            of an array of strings: only ``list_contains`` and IS NULL).
    """

    sql: str
    kind: str


class Clause:
    """One text on its way to SQLite: what is refused names the part and the argument it came in."""

    def __init__(self, text: str, columns: Mapping[str, Column], what: str) -> None:
        if not isinstance(text, str):
            raise InvalidQuery(f"{what}: expected text, got {type(text).__name__}")
        self._text = text
        self._columns = columns
        self._what = what

    def refuse(self, node: exp.Expr | str, why: str) -> InvalidQuery:
        part = node if isinstance(node, str) else node.sql("duckdb")
        short = part if len(part) <= 80 else f"{part[:77]}..."
        return InvalidQuery(f"{self._what}: {short!r}: {why}", part=short)

    def parse(self, kind: type[AnyNode], text: str) -> AnyNode:
        import sqlglot
        from sqlglot.errors import SqlglotError

        self._check_bytes()
        dialect = sqlglot.Dialect.get_or_raise("duckdb")
        try:
            tokens = dialect.tokenize(text)
            if len(tokens) > TOKENS_MAX:
                raise InvalidQuery(f"{self._what}: {len(tokens)} words and signs, {TOKENS_MAX} at most")
            if any(token.comments for token in tokens):
                raise InvalidQuery(f"{self._what}: {self._text[:80]!r}: comments are not allowed")
            parsed = [node for node in dialect.parser().parse_into(kind, tokens, text) if node is not None]
        except SqlglotError as error:
            raise InvalidQuery(f"{self._what}: {self._text[:80]!r} does not parse: {_cause(error)}") from None
        except RecursionError:
            raise self.too_deep() from None
        if len(parsed) != 1 or not isinstance(parsed[0], kind):
            raise InvalidQuery(f"{self._what}: {self._text[:80]!r}: expected one expression")
        return parsed[0]

    def _check_bytes(self) -> None:
        try:
            size = len(self._text.encode())
        except UnicodeEncodeError as error:
            raise InvalidQuery(f"{self._what}: a lone surrogate at {error.start} is not text") from None
        if size > TEXT_BYTES_MAX:
            raise InvalidQuery(f"{self._what}: {size} bytes, {TEXT_BYTES_MAX} at most")
        if "\x00" in self._text:
            raise InvalidQuery(f"{self._what}: NUL at {self._text.index(chr(0))} is not allowed")
        if not self._text.strip():
            raise InvalidQuery(f"{self._what}: empty; expected an expression, or None for none")

    def too_deep(self) -> InvalidQuery:
        return InvalidQuery(f"{self._what}: more than {DEPTH_MAX} operators or parentheses inside each other")

    def only(self, node: exp.Expr, *names: str) -> None:
        """Refuse a node that says more than what is read of it."""
        extra = [name for name, value in node.args.items() if value and name not in names]
        if extra:
            raise self.refuse(node, f"{', '.join(extra)} is not allowed here")

    def column(self, node: exp.Column) -> Column:
        self.only(node, "this", "table")
        if node.table and node.table.lower() != "segments":
            raise self.refuse(node, "expected a column's name alone")
        name = node.name
        found = self._columns.get(name)
        if found is not None:
            return found
        alike = [known for known in self._columns if known.lower() == name.lower()]
        if len(alike) == 1:
            return self._columns[alike[0]]
        known = ", ".join(sorted(alike or self._columns))
        why = "more than one column is called so" if alike else "unknown column"
        raise self.refuse(node, f"{why}; there are {known}")


def _cause(error: Exception) -> str:
    """The innermost reason of a parse error, one line, without the terminal's underlining."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    first = str(error).partition("\n")[0]
    return first.replace("\x1b[4m", "").replace("\x1b[0m", "").rstrip(".")
