"""Responses as engines send them, made from arrays by encoders of the tests' own."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer[Any]]


def routing(rows: int, layers: int, topk: int, experts: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """``[rows, layers, topk]``: distinct experts for each token and layer, as a router chooses them."""
    random = np.random.default_rng(seed)
    return random.random((rows, layers, experts)).argsort(axis=2)[:, :, :topk].astype(np.int32)


def indexer(rows: int, layers: int, topk: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """``[rows, layers, topk]``: positions up to the row's own, then -1."""
    random = np.random.default_rng(seed)
    chosen = np.full((rows, layers, topk), -1, np.int32)
    for row in range(rows):
        for layer in range(layers):
            found = random.permutation(row + 1)[:topk]
            chosen[row, layer, : len(found)] = found
    return chosen


def with_dense(rows: Ids, kept: tuple[int, ...], hidden: int) -> Ids:
    """``[rows, hidden, topk]``: layers that are not ``kept`` are zeros, as SGLang has them."""
    every = np.zeros((len(rows), hidden, rows.shape[2]), rows.dtype)
    every[:, list(kept)] = rows
    return every


def encoded(values: Ids, dtype: str = "int32") -> str:
    """Base64 of flat little-endian values."""
    return base64.b64encode(values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def npy(values: npt.NDArray[Any]) -> str:
    """Base64 of a ``.npy`` file."""
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


def tokens(count: int, seed: int = 0) -> tuple[list[int], list[float]]:
    """Ids and log-probs of a completion."""
    random = np.random.default_rng(seed)
    return random.integers(0, 50_000, count).tolist(), (-random.random(count)).tolist()


def generated(
    prompt: int, completion: int, routed: str | object | None, finish: str = "stop", **meta: object
) -> dict[str, Any]:
    """SGLang's ``/generate``."""
    ids, logprobs = tokens(completion)
    info: dict[str, Any] = {
        "id": "7e1f",
        "finish_reason": {"type": finish, "matched": 2},
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "weight_version": "3",
        "output_token_logprobs": [[chance, token, None] for chance, token in zip(logprobs, ids, strict=True)],
        "routed_experts": routed,
        **meta,
    }
    return {
        "text": "...",
        "output_ids": ids,
        "meta_info": {k: v for k, v in info.items() if v is not None or k == "finish_reason"},
    }


def choice(completion: int, routed: object | None, finish: str = "stop", **more: object) -> dict[str, Any]:
    """One OpenAI-like choice, with vLLM's and SGLang's ``token_ids`` and chat's log-probs."""
    ids, logprobs = tokens(completion)
    content = [{"token": "x", "logprob": chance, "bytes": None, "top_logprobs": []} for chance in logprobs]
    return {
        "index": 0,
        "message": {"role": "assistant", "content": "..."},
        "finish_reason": finish,
        "token_ids": ids,
        "logprobs": {"content": content},
        **({} if routed is None else {"routed_experts": routed}),
        **more,
    }


def chat(prompt: int, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    """An OpenAI-like response."""
    completion = sum(len(one["token_ids"]) for one in choices)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-7e1f", "object": "chat.completion", "choices": choices, "usage": usage, **more}
