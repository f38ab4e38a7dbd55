"""The trainer of the demonstration, a process of its own: attach, fetch, and compare every value.

``python -m arrow_tq.demo.consumer`` reads an ``Order`` as JSON from stdin and answers with a ``Findings``
as JSON on stdout. It loads no model and no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

import arrow_tq
from arrow_tq_schemas.errors import ArrowTQError

FIELDS = ("token_ids", "logprobs", "routed_experts")
DIFFERENCES_MAX = 20


class Order(BaseModel):
    """What to check."""

    url: str
    run: str
    ref: str
    """Reference of a claimed batch."""
    truth: dict[str, str]
    """By session id, the ``.npz`` file that the producer left."""


class Findings(BaseModel):
    """What the check found."""

    segments: int
    tokens: int
    values: int
    """Values compared."""
    payload_bytes: int
    fetch_s: float
    differences: list[str]
    """One line each; empty: everything is the same, bit for bit."""


def check(order: Order) -> Findings:
    """Fetch the batch and compare it with the truth."""
    with arrow_tq.connect(order.url) as store:
        batch = store.run(order.run).attach(order.ref, rank=0, world=1)
        started = time.perf_counter()
        data = batch.fetch(list(FIELDS))
        fetch_s = time.perf_counter() - started
        sessions = batch.table["session_id"].to_pylist()
        differences = [f"session {name!r} is missing" for name in sorted(set(order.truth) - set(sessions))]
        values = payload_bytes = tokens = 0
        for index, session_id in enumerate(sessions):
            with np.load(Path(order.truth[session_id])) as truth:
                got = {field: np.asarray(data[field][index]) for field in FIELDS}
                differences += compare(session_id, got, truth)
                values += sum(array.size for array in got.values())
                payload_bytes += sum(array.nbytes for array in got.values())
                tokens += len(truth["token_ids"])
        batch.release()
    return Findings(
        segments=len(sessions),
        tokens=tokens,
        values=values,
        payload_bytes=payload_bytes,
        fetch_s=fetch_s,
        differences=differences[:DIFFERENCES_MAX],
    )


def compare(
    session_id: str,
    got: Mapping[str, npt.NDArray[np.generic]],
    truth: Mapping[str, npt.NDArray[np.generic]],
) -> list[str]:
    """A line for each field that is not the same bits as the truth; names the first position."""
    lines: list[str] = []
    for field in FIELDS:
        left, right = got[field], truth[field]
        if left.shape != right.shape or left.dtype != right.dtype:
            made = f"the model produced {right.dtype}{right.shape}"
            lines.append(f"{session_id} {field}: {left.dtype}{left.shape}, {made}")
        elif left.tobytes() != right.tobytes():
            bits = np.dtype(f"u{left.dtype.itemsize}")
            differs = np.ascontiguousarray(left).view(bits) != np.ascontiguousarray(right).view(bits)
            position = int(np.argwhere(differs)[0][0])
            lines.append(
                f"{session_id} {field}: {int(differs.sum())} values differ, from position {position}"
            )
    return lines


def main() -> int:
    """Check the order on stdin; exit code 0 whatever was found, 1 where it could not be checked."""
    try:
        findings = check(Order.model_validate_json(sys.stdin.read()))
    except ArrowTQError as error:
        sys.stderr.write(f"error [{error.code}]: {error.message}\n")
        return 1
    sys.stdout.write(findings.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
