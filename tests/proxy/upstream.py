"""An engine's HTTP server for tests: a double of SGLang's and vLLM's, to the letter of their protocols.

It is no engine: ``upstream_engine`` says where tokens and routing come from. Below ``/sglang`` it speaks as
SGLang, below ``/vllm`` as vLLM 0.22, below ``/recorded`` as a SGLang whose scheduler has a recorder. Of its
own are a request's ``replay`` (the completion to give) and these request headers:

* ``x-test-fault``: ``500``, ``hang``, ``truncate``, ``drop``, ``more-rows``, ``ignore-start``, ``abort``,
  ``versions``;
* ``x-test-pace``: seconds between a stream's events.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.proxy.upstream_engine import (
    Brain,
    Formula,
    Generated,
    Ids,
    Model,
    Sizes,
    render,
    replayed,
    text_of,
)

EVENT_TOKENS = 8


def wants_logprobs(body: dict[str, Any]) -> bool:
    """``true``, or a number, which may be 0."""
    asked = body.get("logprobs")
    return asked is True or type(asked) is int


class Cut(Response):
    """Says a length, and sends less."""

    def __init__(self, whole: Response) -> None:
        super().__init__()
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._whole.body
        await send({"type": "http.response.start", "status": 200, "headers": self._whole.raw_headers})
        await send({"type": "http.response.body", "body": bytes(body[: len(body) // 2]), "more_body": True})


class Upstream:
    """The server's state: what it answers with, and what it was asked."""

    def __init__(self, brain: Brain, incremental: bool, recorder: Any) -> None:
        self.brain = brain
        self.incremental = incremental
        self.recorder = recorder
        self.calls: Counter[str] = Counter()
        self.starts: list[int] = []
        self.version = "7"
        self.disconnects = 0

    # -- what every route needs ----------------------------------------------------------------

    async def fault(self, request: Request) -> Response | None:
        fault = request.headers.get("x-test-fault")
        self.calls[request.url.path] += 1
        if fault == "500":
            return JSONResponse({"error": "out of memory"}, 500, headers={"x-engine": "broken"})
        if fault == "hang":
            await asyncio.sleep(3600)
        return None

    def generate(
        self, prompt: Ids, body: dict[str, Any], tokens_max: int, start: int, fault: str
    ) -> Generated:
        replay = body.get("replay")
        if isinstance(replay, dict):
            replay = replayed(replay)
        given = None if replay is None else np.array(replay, np.int32)
        self.starts.append(start)
        begin = 0 if fault == "ignore-start" else start
        made = self.brain.generate(prompt, given, tokens_max, int(body.get("seed") or 0), begin)
        if fault == "more-rows":
            more = np.concatenate([made.experts, made.experts[-1:]])
            made = Generated(made.completion, made.logprobs, more)
        return made

    # -- SGLang ----------------------------------------------------------------------------------

    async def sglang_generate(self, request: Request) -> Response:
        body = await request.json()
        refused = await self.fault(request)
        if refused is not None:
            return refused
        prompt = (
            np.array(body["input_ids"], np.int32)
            if body.get("input_ids") is not None
            else np.frombuffer(body["text"].encode(), np.uint8).astype(np.int32)
        )
        start = body.get("routed_experts_start_len", 0)
        if not 0 <= start <= len(prompt):
            return JSONResponse({"error": {"message": "routed_experts_start_len"}}, 400)
        fault = request.headers.get("x-test-fault", "")
        tokens_max = body.get("sampling_params", {}).get("max_new_tokens", 16)
        made = await asyncio.to_thread(self.generate, prompt, body, tokens_max, start, fault)
        if fault == "abort":
            made = Generated(made.completion[:0], made.logprobs[:0], made.experts[:0])
        meta = await self.meta(request, body, body.get("return_logprob"), prompt, made, start, fault)
        top: dict[str, Any] = {"text": text_of(made.completion), "output_ids": made.completion.tolist()}
        if body.get("return_prompt_token_ids"):
            top["prompt_token_ids"] = prompt.tolist()
        if body.get("stream"):
            return self.sse(request, self.generate_events(top, meta, made))
        response = JSONResponse({**top, "meta_info": meta})
        return Cut(response) if fault == "truncate" else response

    async def meta(
        self,
        request: Request,
        body: dict[str, Any],
        logprobs: Any,
        prompt: Ids,
        made: Generated,
        start: int,
        fault: str,
    ) -> dict[str, Any]:
        abort = fault == "abort"
        meta: dict[str, Any] = {
            "id": f"req-{len(prompt)}-{int(prompt.sum())}",
            "finish_reason": {"type": "abort"} if abort else {"type": "stop", "matched": 257},
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(made.completion),
            "cached_tokens": 0,
            "e2e_latency": 0.25000000000000001,
        }
        if logprobs:
            pairs = zip(made.logprobs.tolist(), made.completion.tolist(), strict=True)
            meta["output_token_logprobs"] = [[chance, token, None] for chance, token in pairs]
            meta["input_token_logprobs"] = []
        if abort:
            return meta
        if fault == "versions":
            middle, end = len(made.completion) // 2, len(made.completion)
            spans = [("7", 0, middle), ("8", middle, end)]
            names = ("version", "start", "end")
            meta["weight_versions"] = [dict(zip(names, span, strict=True)) for span in spans]
        if self.recorder is not None and request.url.path.startswith("/recorded"):
            first = int(request.headers["x-arrow-tq-start"])
            meta["arrow_tq_receipts"] = await asyncio.to_thread(
                self.receipts, made.experts[first - start :], first
            )
        elif body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(made.experts.astype("<i4").tobytes()).decode()
        return meta

    def receipts(self, experts: Any, first: int) -> list[str]:
        recording = self.recorder.begin(f"req-{sum(self.calls.values())}-{id(experts)}")
        recording.append("routed_experts", first, experts)
        return [one.to_json() for one in recording.finish(kept=first + len(experts)).values()]

    async def generate_events(
        self, top: dict[str, Any], meta: dict[str, Any], made: Generated
    ) -> AsyncIterator[dict[str, Any]]:
        total, before = len(made.completion), 0
        last = ("finish_reason", "routed_experts", "arrow_tq_receipts")
        for end in [*range(EVENT_TOKENS, total, EVENT_TOKENS), total]:
            first = before if self.incremental else 0
            ids = made.completion[first:end]
            now = {key: value for key, value in meta.items() if end == total or key not in last}
            now.update(completion_tokens=end)
            if end < total:
                now["finish_reason"] = None
            if "output_token_logprobs" in meta:
                now["output_token_logprobs"] = meta["output_token_logprobs"][first:end]
            yield {**top, "text": text_of(ids), "output_ids": ids.tolist(), "meta_info": now}
            before = end

    async def sglang_chat(self, request: Request) -> Response:
        body = await request.json()
        refused = await self.fault(request)
        if refused is not None:
            return refused
        if body.get("stream") and body.get("return_prompt_token_ids"):
            text = "Please set stream=false when using return_prompt_token_ids=true."
            return JSONResponse({"object": "error", "message": text, "code": 400}, 400)
        prompt = render(body["messages"])
        start = body.get("routed_experts_start_len", 0)
        if not 0 <= start <= len(prompt):
            return JSONResponse({"object": "error", "message": "routed_experts_start_len", "code": 400}, 400)
        fault = request.headers.get("x-test-fault", "")
        made = await asyncio.to_thread(self.generate, prompt, body, body.get("max_tokens", 16), start, fault)
        meta = await self.meta(request, body, body.get("logprobs"), prompt, made, start, fault)
        routed = meta.get("routed_experts")
        choice: dict[str, Any] = {
            "index": 0,
            "message": self.message(body, made),
            "logprobs": self.openai_logprobs(made) if body.get("logprobs") else None,
            "finish_reason": "stop",
            "matched_stop": 257,
        }
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = prompt.tolist()
        if body.get("return_meta_info"):
            choice["meta_info"] = meta
        whole = {
            "id": meta["id"], "object": "chat.completion", "created": 1764400000, "model": body.get("model"),
            "choices": [choice], "usage": self.usage(prompt, made),
            "metadata": {"weight_version": self.version},
        }  # fmt: skip
        if routed is not None:
            whole["sglext"] = {"routed_experts": routed}
        response = JSONResponse(whole)
        return Cut(response) if fault == "truncate" else response

    # -- vLLM ------------------------------------------------------------------------------------

    async def vllm(self, request: Request) -> Response:
        body = await request.json()
        refused = await self.fault(request)
        if refused is not None:
            return refused
        chat = request.url.path.endswith("/chat/completions")
        given = body.get("prompt")
        if chat:
            prompt = render(body["messages"])
        elif isinstance(given, list):
            prompt = np.array(given, np.int32)
        else:
            prompt = np.frombuffer(given.encode(), np.uint8).astype(np.int32)
        start = body.get("routed_experts_prompt_start", 0)
        fault = request.headers.get("x-test-fault", "")
        made = await asyncio.to_thread(self.generate, prompt, body, body.get("max_tokens", 16), start, fault)
        ids = body.get("return_token_ids")
        if body.get("stream"):
            return self.sse(request, self.vllm_events(body, chat, prompt, made))
        file = io.BytesIO()
        np.save(file, made.experts.astype(np.uint8))
        asked = wants_logprobs(body)
        choice: dict[str, Any] = {"index": 0}
        choice |= {"message": self.message(body, made)} if chat else {"text": text_of(made.completion)}
        choice |= {
            "logprobs": self.logprobs(chat, made) if asked else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": made.completion.tolist() if ids else None,
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }
        if not chat:
            choice["prompt_token_ids"] = prompt.tolist() if ids else None
        whole = {
            "id": "cmpl-1", "object": "chat.completion" if chat else "text_completion", "created": 1764400000,
            "model": body.get("model"), "choices": [choice], "usage": self.usage(prompt, made),
        }  # fmt: skip
        if chat:
            whole["prompt_token_ids"] = prompt.tolist() if ids else None
        response = JSONResponse(whole)
        return Cut(response) if fault == "truncate" else response

    async def vllm_events(
        self, body: dict[str, Any], chat: bool, prompt: Ids, made: Generated
    ) -> AsyncIterator[dict[str, Any]]:
        ids, asked = body.get("return_token_ids"), wants_logprobs(body)
        head = {
            "id": "cmpl-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1764400000,
        }
        if chat:
            first = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield {**head, "choices": [first], "prompt_token_ids": prompt.tolist() if ids else None}
        for begin in range(0, len(made.completion), EVENT_TOKENS):
            end = min(begin + EVENT_TOKENS, len(made.completion))
            part = Generated(made.completion[begin:end], made.logprobs[begin:end], made.experts)
            choice: dict[str, Any] = {"index": 0}
            text = text_of(part.completion)
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            choice |= {
                "logprobs": self.logprobs(chat, part) if asked else None,
                "finish_reason": "stop" if end == len(made.completion) else None,
                "token_ids": part.completion.tolist() if ids else None,
            }
            if not chat and begin == 0:
                choice["prompt_token_ids"] = prompt.tolist() if ids else None
            yield {**head, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self.usage(prompt, made)}

    # -- pieces ----------------------------------------------------------------------------------

    def message(self, body: dict[str, Any], made: Generated) -> dict[str, Any]:
        replay = body.get("replay")
        if isinstance(replay, dict):
            return {
                "role": "assistant",
                "content": replay.get("content"),
                "tool_calls": replay.get("tool_calls"),
            }
        return {"role": "assistant", "content": text_of(made.completion), "tool_calls": None}

    def logprobs(self, chat: bool, made: Generated) -> dict[str, Any]:
        if chat:
            return self.openai_logprobs(made)
        return {"token_logprobs": made.logprobs.tolist(), "tokens": ["x"] * len(made.completion)}

    def openai_logprobs(self, made: Generated) -> dict[str, Any]:
        content = [
            {"token": "x", "logprob": one, "bytes": None, "top_logprobs": []}
            for one in made.logprobs.tolist()
        ]
        return {"content": content}

    def usage(self, prompt: Ids, made: Generated) -> dict[str, int]:
        count = len(made.completion)
        return {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}

    def sse(self, request: Request, events: AsyncIterator[dict[str, Any]]) -> Response:
        pace = float(request.headers.get("x-test-pace", "0"))
        fault = request.headers.get("x-test-fault", "")

        async def told() -> AsyncIterator[bytes]:
            try:
                number = 0
                async for event in events:
                    yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
                    number += 1
                    if fault == "drop" and number == 2:
                        raise ConnectionAbortedError
                    await asyncio.sleep(pace)
                yield b"data: [DONE]\n\n"
            except (asyncio.CancelledError, GeneratorExit):
                self.disconnects += 1
                raise

        return StreamingResponse(told(), media_type="text/event-stream")

    async def seen(self, request: Request) -> Response:
        state = {"calls": dict(self.calls), "starts": self.starts[-64:], "disconnects": self.disconnects}
        return JSONResponse(state)

    async def set_version(self, request: Request) -> Response:
        self.version = (await request.json())["version"]
        return JSONResponse({})

    async def echo(self, request: Request) -> Response:
        """Sends the body back, and what came before it in headers."""
        body = await request.body()
        headers = {
            "X-Target": (request.scope["raw_path"] + b"?" + request.scope["query_string"]).decode("latin-1"),
            "X-Method": request.method,
            "X-Seen": json.dumps(
                [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers.raw]
            ),
        }
        response = Response(body, 207, headers=headers, media_type="application/x-odd; a=1")
        response.raw_headers += [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        return response


def app(upstream: Upstream) -> Starlette:
    routes = [Route("/seen", upstream.seen), Route("/version", upstream.set_version, methods=["POST"])]
    for base in ("/sglang", "/recorded"):
        routes.append(Route(f"{base}/generate", upstream.sglang_generate, methods=["POST"]))
        routes.append(Route(f"{base}/v1/chat/completions", upstream.sglang_chat, methods=["POST"]))
    paths = ("/v1/chat/completions", "/v1/completions")
    routes += [Route(f"/vllm{path}", upstream.vllm, methods=["POST"]) for path in paths]
    everything = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]
    routes.append(Route("/{rest:path}", upstream.echo, methods=everything))
    return Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--model", action="store_true", help="a real model instead of arithmetic")
    parser.add_argument("--incremental", action="store_true", help="streams tell what is new alone")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--store", default=None, help="where the recorder of /recorded writes")
    parser.add_argument("--run", default="default")
    asked = parser.parse_args()
    brain: Brain = Model() if asked.model else Formula(Sizes(asked.layers, asked.topk, asked.experts))
    recorder = None
    if asked.store is not None:
        import arrow_tq
        from arrow_tq.recorder import Recorder

        run = arrow_tq.connect(asked.store).run(asked.run)
        recorder = Recorder(run, ["routed_experts"], owner=True)
    upstream = Upstream(brain, asked.incremental, recorder)
    config = uvicorn.Config(
        app(upstream), host="127.0.0.1", port=asked.port, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"upstream http://127.0.0.1:{port}", flush=True)
        await task

    asyncio.run(serve())


if __name__ == "__main__":
    main()
