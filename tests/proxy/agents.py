"""What the tests' agents say and check."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np

from arrow_tq.runs import Run
from tests.proxy.conftest import SIZES
from tests.proxy.upstream_engine import Sizes, experts_of, logprobs_of

SESSION, GROUP, STEP = "x-arrow-tq-session", "x-arrow-tq-group", "x-arrow-tq-step"
PARENT, RETRY_OF, RECORDED = "x-arrow-tq-parent", "x-arrow-tq-retry-of", "x-arrow-tq-recorded"
MARK = b',"arrow_tq":'


def named(session: str, step: str | None = None, **more: str) -> dict[str, str]:
    """Headers of a call: ``parent=``, ``retry_of=``, ``group=``, ``fault=``, ``pace=``."""
    known = {
        "parent": PARENT,
        "retry_of": RETRY_OF,
        "group": GROUP,
        "fault": "x-test-fault",
        "pace": "x-test-pace",
    }
    headers = {SESSION: session, **({} if step is None else {STEP: step})}
    return headers | {known[key]: value for key, value in more.items()}


def without_reference(body: bytes) -> tuple[bytes, dict[str, Any]]:
    """An answer, or a stream, as the engine would have sent it, and the reference that was in it."""
    place = body.rfind(MARK)
    assert place >= 0, body[-500:]
    start = place + len(MARK)
    reference, end = json.JSONDecoder().raw_decode(body[start:].decode("latin-1"))
    return body[:place] + body[start + end :], reference


def events(body: bytes) -> list[dict[str, Any]]:
    """A stream's objects; it must have its end."""
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], parts[-2:]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]


def generate(
    url: str, session: str, prompt: list[int], step: str | None = None, **more: Any
) -> httpx.Response:
    """One ``/generate`` call; ``replay=`` is what the engine answers."""
    headers = named(
        session,
        step,
        **{key: more.pop(key) for key in list(more) if key in ("parent", "retry_of", "group", "fault")},
    )
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 12}, **more}
    return httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30)


def sampled(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["output_ids"]
    return ids


def finalize(url: str, session: str, **body: Any) -> list[dict[str, Any]]:
    response = httpx.post(f"{url}/arrow-tq/sessions/{session}/finalize", json=body, timeout=30)
    assert response.status_code == 200, response.text
    segments: list[dict[str, Any]] = response.json()["segments"]
    return segments


def check_segments(run: Run, session: str, sizes: Sizes = SIZES) -> list[dict[str, Any]]:
    """Every value of every segment of a finalized session is what its tokens make it."""
    rows = run.table([session]).to_pylist()
    for row in rows:
        tokens = np.array(row["token_ids"], np.int32)
        stored = np.array(row["routed_experts"], np.int32).reshape(-1, sizes.layers, sizes.topk)
        np.testing.assert_array_equal(stored, experts_of(tokens, sizes))
        chances = np.array(row["logprobs"], np.float32)
        loss = chances != 0
        np.testing.assert_array_equal(chances[loss], logprobs_of(tokens)[loss].astype(np.float32))
        row["loss"] = np.flatnonzero(loss)
    return rows


def steps_of(run: Run, session: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.sql(
        "SELECT step_id, parent_id, status, version, sampled_start, sampled_end, messages FROM steps "
        f"WHERE session_id = '{session}' ORDER BY step_index"
    ).to_pylist()
    return found
