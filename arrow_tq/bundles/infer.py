"""Which layout a field gets: looked at once, by the types of all rows; or as its schema says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from arrow_tq.bundles import arrays, lists, scalars, tensors_io
from arrow_tq.bundles.objects import Encoder, field_name
from arrow_tq.bundles.packed import pack_value
from arrow_tq.bundles.plans import BlockPlan, FieldPlan, array_blocks, columns_of, row_blocks
from arrow_tq.bundles.scalars import byte_blocks
from arrow_tq.bundles.structure import ROWS_MAX
from arrow_tq_schemas.errors import InvalidInput

MSGPACK, WHOLE, AUTO = "msgpack", "whole", "auto"
SCHEMA_WORDS = ("auto", "whole", "objects", "msgpack")
Hints = Mapping[str, str]
"""By field name: what ``LayoutMiss`` said instead, or a word of the schema."""


def plan_fields(value: dict[object, object], schema: Hints, hints: Hints) -> list[FieldPlan]:
    """Plans of all fields, in the dict's order.

    Args:
        value: the dict; read, never changed, and to be left as it is until its bundle is written.
        schema: by field, ``auto`` (as without), ``objects`` (the tagged encoding, row by row), ``msgpack``,
            or ``whole`` (never split by samples, whatever its length).
        hints: what was learnt from earlier dicts of this shape.

    Raises:
        InvalidInput: not a dict, a value that cannot be represented (named by its path), or a schema that
            names no field.
    """
    if type(value) is not dict:
        raise InvalidInput(f"bundle: expected a dict, got {type(value).__name__}")
    plans = []
    seen: set[str] = set()
    for key, one in value.items():
        name = field_name(key)
        seen.add(name)
        word = schema.get(name, AUTO)
        plan = FieldPlan(Encoder().plain(key, f"key {key!r}"), name, "objects", 1, False)
        plan_field(plan, one, word, hints.get(name))
        if plan.count > ROWS_MAX:
            raise InvalidInput(f"{name}: {plan.count} rows, at most {ROWS_MAX}", path=name)
        if word == WHOLE:
            plan.meta["whole"] = True
        plans.append(plan)
    unknown = sorted(set(schema) - seen)
    if unknown:
        raise InvalidInput(
            f"bundle schema names {unknown[0]!r}: the dict has no such field", field=unknown[0]
        )
    return plans


def plan_field(plan: FieldPlan, value: object, word: str, hint: str | None) -> None:
    """Fill in a plan for one field's value."""
    if word == MSGPACK:
        _plan_msgpack(plan, value)
    elif type(value) is np.ndarray or tensors_io.is_tensor(value):
        if word == "objects":
            _plan_objects(plan, [value], False)
        else:
            arrays.plan_array(plan, value)
    elif type(value) is not list:
        _plan_objects(plan, [value], False)
    else:
        plan.count, plan.sequence = len(value), True
        if word == "objects" or hint == lists.OBJECTS or not _plan_column(plan, value, hint):
            plan.meta.clear()
            plan.buffers.clear()
            _plan_objects(plan, value, True)


def _plan_column(plan: FieldPlan, rows: list[object], hint: str | None) -> bool:
    some = next((row for row in rows if row is not None), None)
    if type(some) is np.ndarray or tensors_io.is_tensor(some):
        return arrays.plan_rows(plan, rows, some, hint)
    if rows and scalars.plan_numbers(plan, rows):
        return True
    kinds = set(map(type, rows))
    present: Sequence[object] = rows
    if type(None) in kinds:
        kinds.remove(type(None))
        present = [row for row in rows if row is not None]
    if len(kinds) != 1:
        return False
    if kinds == {list}:
        return lists.plan_rows(plan, rows, present, hint)  # type: ignore[arg-type]
    return scalars.plan_rows(plan, rows, present)


def _plan_objects(plan: FieldPlan, rows: Sequence[object], sequence: bool) -> None:
    """Each row as JSON, and what is large in it beside."""
    encoder = Encoder()
    texts, counts = [], []
    for index, row in enumerate(rows):
        before = len(encoder.attachments)
        texts.append(encoder.text(row, f"{plan.name}[{index}]" if sequence else plan.name))
        counts.append(len(encoder.attachments) - before)
    plan.layout, plan.count, plan.sequence = "objects", len(rows), sequence
    _plan_texts(plan, texts)
    if not encoder.attachments:
        return
    memories = encoder.attachments
    sizes = np.fromiter(map(len, memories), np.int64, len(memories))
    meta, buffers = columns_of(counts, "counts")
    plan.meta.update(meta)
    plan.buffers.update(buffers)
    plan.buffers["sizes"] = array_blocks(sizes)
    plan.buffers["attached"] = _attachment_blocks(memories, sizes, counts)


def _attachment_blocks(
    memories: Sequence[np.ndarray], sizes: np.ndarray, counts: Sequence[int]
) -> list[BlockPlan]:
    """Attachments row by row, each padded so that the next one is aligned."""
    padded = -(-sizes // ATTACHMENT_ALIGN) * ATTACHMENT_ALIGN
    firsts = np.concatenate([[0], np.cumsum(counts)])
    ends = np.concatenate([[0], np.cumsum(padded)])
    by_row = ends[firsts[1:]] - ends[firsts[:-1]]

    def write(first: int, end: int, out: np.ndarray) -> None:
        place = 0
        for number in range(int(firsts[first]), int(firsts[end])):
            size = int(sizes[number])
            out[place : place + size] = memories[number]
            out[place + size : place + int(padded[number])] = 0
            place += int(padded[number])

    def part(index: int, low: int, high: int, out: np.ndarray) -> None:
        """Of a row larger than a block: never all of it at once."""
        out[:] = 0
        place = 0
        for number in range(int(firsts[index]), int(firsts[index + 1])):
            begin, end = max(low, place), min(high, place + int(sizes[number]))
            if begin < end:
                out[begin - low : end - low] = memories[number][begin - place : end - place]
            place += int(padded[number])

    return row_blocks(by_row, write, part=part)


ATTACHMENT_ALIGN = 64


def _plan_msgpack(plan: FieldPlan, value: object) -> None:
    sequence = type(value) is list
    rows = value if isinstance(value, list) else [value]
    texts = [pack_value(row, f"{plan.name}[{i}]" if sequence else plan.name) for i, row in enumerate(rows)]
    plan.layout, plan.count, plan.sequence = "msgpack", len(rows), sequence
    _plan_texts(plan, texts)


def _plan_texts(plan: FieldPlan, texts: Sequence[bytes]) -> None:
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    meta, buffers = columns_of(sizes)
    plan.meta.update({**meta, "list": plan.sequence})
    plan.buffers.update(buffers)
    plan.buffers["values"] = byte_blocks(texts, sizes)
