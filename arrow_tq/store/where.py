"""``where=`` and ``order_by=`` over segment columns, as SQLite SQL with bound values.

The text is read as DuckDB SQL, so a predicate means here what it means in ``run.sql``; it may use what
is listed in ``PREDICATES`` and nothing else. Where the two databases differ, the SQL made here follows
DuckDB: ``/`` divides as floats, LIKE tells upper case from lower, nulls sort last. Where DuckDB raises
for one row (a division by zero, an integer overflow), the predicate is NULL or a float for that row.
A number written with a point is a float here, a decimal there: they part only beyond 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arrow_tq.store.clause import DEPTH_MAX, Clause, Column

if TYPE_CHECKING:
    from sqlglot import exp

__all__ = ["Column", "compile_order_by", "compile_where"]

WILDCARDS_MAX = 16
"""``%`` in one LIKE pattern."""
INT64_MAX = 2**63 - 1
PREDICATES = (
    "AND, OR, NOT, = <> < <= > >=, IS [NOT] NULL/TRUE/FALSE, [NOT] IN (literals), BETWEEN, LIKE 'pattern', "
    "+ - * / %, abs, length, coalesce, list_contains, columns, numbers, 'text', TRUE, FALSE, NULL"
)
_NUMBERS = ("int", "float")
_COMPARISONS = {"EQ": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">="}
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_PREDICATE_NODES = frozenset({*_COMPARISONS, "Is", "In", "Between", "Like", "Escape", "Not", "And", "Or"})


@dataclass(frozen=True, slots=True)
class _Term:
    """Compiled SQL with its values, in the order of their question marks."""

    sql: str
    kind: str
    values: tuple[object, ...] = ()
    literal: bool = False

    @property
    def real(self) -> str:
        """The SQL as a float, as DuckDB sees an integer beside one."""
        return f"CAST({self.sql} AS REAL)" if self.kind == "int" and not self.literal else self.sql


def compile_where(text: str, columns: Mapping[str, Column]) -> tuple[str, list[object]]:
    """A predicate as a SQLite expression and the values of its ``?``, in order.

    Names match without regard to case where only one column fits.

    Raises:
        InvalidQuery: it does not parse, uses something outside ``PREDICATES``, names an unknown column
            (those known are listed), mixes kinds, or passes a bound; names the part.
    """
    from sqlglot import exp

    compiler = _Compiler(text, columns, "where")
    term = compiler.boolean(compiler.parse(exp.Condition, text), 0)
    return term.sql, list(term.values)


def compile_order_by(text: str, columns: Mapping[str, Column]) -> str:
    """The terms of an ORDER BY: columns with ASC or DESC and NULLS FIRST or LAST (last when left out).

    Raises:
        InvalidQuery: anything else than columns, or an unknown one (those known are listed).
    """
    from sqlglot import exp

    compiler = _Compiler(text, columns, "order_by")
    order = compiler.parse(exp.Order, f"ORDER BY {text}")
    compiler.only(order, "expressions")
    terms = []
    for item in order.expressions:
        compiler.only(item, "this", "desc", "nulls_first")
        if not isinstance(item.this, exp.Column):
            raise compiler.refuse(item.this, "expected a column")
        column = compiler.column(item.this)
        if column.kind in ("json", "list"):
            raise compiler.refuse(item.this, f"a {column.kind} column has no order")
        direction = "DESC" if item.args.get("desc") else "ASC"
        nulls = "FIRST" if item.args.get("nulls_first") else "LAST"
        terms.append(f"{column.sql} {direction} NULLS {nulls}")
    return ", ".join(terms)


class _Compiler(Clause):
    """Turns the tree of one clause into SQL, node by node."""

    def boolean(self, node: exp.Expr, depth: int) -> _Term:
        term = self.term(node, depth)
        if term.kind not in ("bool", "null"):
            raise self.refuse(node, f"expected a condition, got {_a(term.kind)}")
        return term

    def number(self, node: exp.Expr, depth: int) -> _Term:
        term = self.term(node, depth)
        if term.kind not in (*_NUMBERS, "null"):
            raise self.refuse(node, f"expected a number, got {_a(term.kind)}")
        return term

    def text(self, node: exp.Expr, depth: int) -> _Term:
        term = self.term(node, depth)
        if term.kind not in ("text", "null"):
            raise self.refuse(node, f"expected text, got {_a(term.kind)}")
        return term

    def term(self, node: exp.Expr, depth: int) -> _Term:
        """Any expression of the whitelist."""
        if depth > DEPTH_MAX:
            raise self.too_deep()
        name, inner = type(node).__name__, depth + 1
        if name in _COMPARISONS:
            return self._compare(node, inner)
        if name in _ARITHMETIC:
            return self._calculate(node, inner)
        compile_node = getattr(self, f"_on_{name.lower()}", None)
        if compile_node is None:
            raise self.refuse(node, f"not allowed; expected {PREDICATES}")
        term: _Term = compile_node(node, inner)
        return term

    def _operand(self, node: exp.Expr, depth: int) -> _Term:
        """An operand of a comparison. DuckDB refuses ``a = b = c`` too, and ranks some unlike SQLite."""
        if type(node).__name__ in _PREDICATE_NODES:
            raise self.refuse(node, "put parentheses around a condition inside a comparison")
        return self.term(node, depth)

    def _compare(self, node: exp.Expr, depth: int) -> _Term:
        self.only(node, "this", "expression")
        left, right = self._operand(node.this, depth), self._operand(node.expression, depth)
        first, second = self._alike(node, [left, right])
        sign = _COMPARISONS[type(node).__name__]
        return _Term(f"({first} {sign} {second})", "bool", left.values + right.values)

    def _calculate(self, node: exp.Expr, depth: int) -> _Term:
        self.only(node, "this", "expression")
        left, right = self.number(node.this, depth), self.number(node.expression, depth)
        sign = _ARITHMETIC[type(node).__name__]
        kind = "float" if "float" in (left.kind, right.kind) else "int"
        values = left.values + right.values
        if sign == "/":
            return _Term(f"(CAST({left.sql} AS REAL) / {right.sql})", "float", values)
        if sign == "%" and kind == "float":
            raise self.refuse(node, "% works on integers")
        return _Term(f"({left.sql} {sign} {right.sql})", kind, values)

    def _alike(self, node: exp.Expr, terms: list[_Term]) -> list[str]:
        """SQL of terms that are to be compared, or the reason why they cannot be."""
        kinds = {term.kind for term in terms} - {"null"}
        if kinds & {"json", "list"}:
            hint = "list_contains" if "list" in kinds else "IS NULL"
            raise self.refuse(node, f"{_a(min(kinds & {'json', 'list'}))} cannot be compared; use {hint}")
        if kinds == set(_NUMBERS):
            # An integer beside a float column is a float in DuckDB; beside a written number it stays exact.
            exact = all(term.literal for term in terms if term.kind == "float")
            return [term.sql if exact else term.real for term in terms]
        if len(kinds) > 1:
            raise self.refuse(node, f"{' and '.join(_a(kind) for kind in sorted(kinds))} cannot be compared")
        return [term.sql for term in terms]

    def _on_and(self, node: exp.Expr, depth: int) -> _Term:
        terms = [self.boolean(operand, depth) for operand in _chain(node)]
        word = f" {type(node).__name__.upper()} "
        return _Term(f"({word.join(term.sql for term in terms)})", "bool", _values(terms))

    _on_or = _on_and

    def _on_not(self, node: exp.Not, depth: int) -> _Term:
        self.only(node, "this")
        term = self.boolean(node.this, depth)
        return _Term(f"(NOT {term.sql})", "bool", term.values)

    def _on_paren(self, node: exp.Paren, depth: int) -> _Term:
        self.only(node, "this")
        return self.term(node.this, depth)

    def _on_is(self, node: exp.Is, depth: int) -> _Term:
        self.only(node, "this", "expression")
        term, right = self._operand(node.this, depth), node.expression
        if type(right).__name__ == "Null":
            return _Term(f"({term.sql} IS NULL)", "bool", term.values)
        if type(right).__name__ != "Boolean":
            raise self.refuse(node, "expected IS NULL, IS TRUE or IS FALSE")
        if term.kind not in ("bool", "null"):
            raise self.refuse(node, f"expected a condition, got {_a(term.kind)}")
        return _Term(f"({term.sql} IS {1 if right.this else 0})", "bool", term.values)

    def _on_in(self, node: exp.In, depth: int) -> _Term:
        self.only(node, "this", "expressions")
        if not node.expressions:
            raise self.refuse(node, "expected a list of literals")
        terms = [self._operand(node.this, depth), *(self.term(item, depth) for item in node.expressions)]
        for item, term in zip(node.expressions, terms[1:], strict=True):
            if not term.literal:
                raise self.refuse(item, "expected a literal in the list of IN")
        first, *rest = self._alike(node, terms)
        return _Term(
            f"({first} IN ({', '.join(rest)}))",
            "bool",
            tuple(value for term in terms for value in term.values),
        )

    def _on_between(self, node: exp.Between, depth: int) -> _Term:
        self.only(node, "this", "low", "high")
        parts = [self._operand(node.args[key], depth) for key in ("this", "low", "high")]
        value, low, high = self._alike(node, parts)
        return _Term(f"({value} BETWEEN {low} AND {high})", "bool", _values(parts))

    def _on_like(self, node: exp.Like, depth: int, escape: str | None = None) -> _Term:
        self.only(node, "this", "expression", "negate")
        term = self.text(node.this, depth)
        if type(node.this).__name__ in _PREDICATE_NODES:
            raise self.refuse(node, "put parentheses around a condition inside LIKE")
        pattern = self.term(node.expression, depth)
        if pattern.kind != "text" or not pattern.literal:
            raise self.refuse(node.expression, "expected a pattern in quotes after LIKE")
        glob = self._glob(node, str(pattern.values[0]), escape)
        word = "NOT GLOB" if node.args.get("negate") else "GLOB"
        return _Term(f"({term.sql} {word} ?)", "bool", (*term.values, glob))

    def _on_escape(self, node: exp.Escape, depth: int) -> _Term:
        self.only(node, "this", "expression")
        like, mark = node.this, node.expression
        if type(like).__name__ != "Like" or type(mark).__name__ != "Literal" or len(mark.name) != 1:
            raise self.refuse(node, "expected LIKE 'pattern' ESCAPE 'one character'")
        return self._on_like(like, depth, mark.name)

    def _glob(self, node: exp.Expr, pattern: str, escape: str | None) -> str:
        """A LIKE pattern for SQLite's GLOB, which tells upper case from lower as DuckDB's LIKE does."""
        parts, letters, wildcards = [], iter(pattern), 0
        for letter in letters:
            if letter == escape:
                letter = next(letters, "")
                if not letter:
                    raise self.refuse(node, "the pattern ends with its escape character")
            elif letter in "%_":
                wildcards += letter == "%"
                parts.append("*" if letter == "%" else "?")
                continue
            parts.append(f"[{letter}]" if letter in "*?[" else letter)
        if wildcards > WILDCARDS_MAX:
            raise self.refuse(node, f"{wildcards} % in one pattern, {WILDCARDS_MAX} at most")
        return "".join(parts)

    # -- values --------------------------------------------------------------------------------

    def _on_column(self, node: exp.Column, depth: int) -> _Term:
        column = self.column(node)
        return _Term(column.sql, column.kind)

    def _on_literal(self, node: exp.Literal, depth: int, sign: int = 1) -> _Term:
        if node.is_string:
            return _Term("?", "text", (node.this,), literal=True)
        try:
            whole = sign * int(node.this)
        except ValueError:
            return self._float(node, sign)
        if not -INT64_MAX - 1 <= whole <= INT64_MAX:
            raise self.refuse(node, "integers have 64 bits")
        return _Term("?", "int", (whole,), literal=True)

    def _float(self, node: exp.Literal, sign: int) -> _Term:
        try:
            value = sign * float(node.this)
        except ValueError:
            raise self.refuse(node, "not a number") from None
        if not math.isfinite(value):
            raise self.refuse(node, "larger than a float can be")
        return _Term("?", "float", (value,), literal=True)

    def _on_neg(self, node: exp.Neg, depth: int) -> _Term:
        self.only(node, "this")
        if type(node.this).__name__ == "Literal" and not node.this.is_string:
            return self._on_literal(node.this, depth, sign=-1)
        term = self.number(node.this, depth)
        return _Term(f"(- {term.sql})", term.kind, term.values)

    def _on_boolean(self, node: exp.Boolean, depth: int) -> _Term:
        return _Term("?", "bool", (int(node.this),), literal=True)

    def _on_null(self, node: exp.Null, depth: int) -> _Term:
        return _Term("?", "null", (None,), literal=True)

    def _on_abs(self, node: exp.Abs, depth: int) -> _Term:
        self.only(node, "this")
        term = self.number(node.this, depth)
        # SQLite raises for the smallest integer, the only one without a counterpart.
        safe = f"max({term.sql}, {-INT64_MAX})" if term.kind == "int" else term.sql
        return _Term(f"abs({safe})", term.kind, term.values)

    def _on_length(self, node: exp.Length, depth: int) -> _Term:
        self.only(node, "this")
        term = self.text(node.this, depth)
        return _Term(f"length({term.sql})", "int", term.values)

    def _on_coalesce(self, node: exp.Coalesce, depth: int) -> _Term:
        self.only(node, "this", "expressions")
        terms = [self.term(item, depth) for item in (node.this, *node.expressions)]
        if len(terms) < 2:
            raise self.refuse(node, "expected two values or more")
        parts = self._alike(node, terms)
        kinds = {term.kind for term in terms} - {"null"}
        kind = "float" if "float" in kinds else next(iter(kinds), "null")
        if kind == "float":
            parts = [f"CAST({part} AS REAL)" for part in parts]
        return _Term(f"coalesce({', '.join(parts)})", kind, _values(terms))

    def _on_arraycontains(self, node: exp.Expr, depth: int) -> _Term:
        self.only(node, "this", "expression")
        names, wanted = self.term(node.this, depth), self.term(node.expression, depth)
        if names.kind != "list" or wanted.kind != "text" or not wanted.literal:
            raise self.refuse(node, "expected list_contains(list column, 'text')")
        found = f"EXISTS (SELECT 1 FROM json_each({names.sql}) AS item WHERE item.value = ?)"
        return _Term(f"(CASE WHEN {names.sql} IS NOT NULL THEN {found} END)", "bool", wanted.values)


def _values(terms: list[_Term]) -> tuple[object, ...]:
    return tuple(value for term in terms for value in term.values)


def _chain(node: exp.Expr) -> list[exp.Expr]:
    """Operands of ``a AND b AND c`` (or of OR), left to right, without recursion."""
    kind, operands = type(node), []
    while type(node) is kind:
        operands.append(node.expression)
        node = node.this
    return [node, *reversed(operands)]


def _a(kind: str) -> str:
    """A kind in a sentence."""
    return {"bool": "a condition", "int": "an integer", "float": "a float", "null": "NULL"}.get(kind, kind)
