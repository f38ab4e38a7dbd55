"""A rollout proxy of one's own in a hundred lines: starlette and httpx, one route, one session a header.

    python examples/own_proxy.py --upstream http://engine:30000 --store grpc://head:8815 --run demo

It records SGLang's ``/generate`` with token ids in and out. ``arrow-tq proxy`` does more: streams, chats,
branches, failures of every kind; this is the part to start from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import arrow_tq
from arrow_tq import errors
from arrow_tq.adapters import EngineOutput, record, sglang
from arrow_tq.producer.session import Session
from arrow_tq.runs import Run


@dataclass
class Place:
    """How far a session's rows go. This proxy takes sessions whose prompts only grow."""

    session: Session
    tokens: int = 0
    routed: int = 0


class OwnProxy:
    def __init__(self, run: Run, upstream: httpx.AsyncClient) -> None:
        self.run = run
        self.upstream = upstream
        self.places: dict[str, Place] = {}

    async def generate(self, request: Request) -> Response:
        """One call: ask for more than the agent did, store it, give back what the agent asked for."""
        body = await request.json()
        place = await self.place(request.headers["x-session"])
        asked = {
            **body,
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": place.routed,
        }
        answered = await self.upstream.post("/generate", json=asked)
        if answered.status_code != 200:
            return Response(answered.content, answered.status_code)
        # Large JSON is parsed, and its base64 decoded, on a thread of the store's own pool.
        answer, output = await self.run.threads.call(self.decode, answered.content, body, place)
        await self.run.threads.call(
            self.store, place, request.headers.get("x-call"), body["input_ids"], output
        )
        return JSONResponse(answer)

    def decode(
        self, raw: bytes, body: dict[str, object], place: Place
    ) -> tuple[dict[str, object], EngineOutput]:
        answer = json.loads(raw)
        prompt = body["input_ids"]
        if not isinstance(prompt, list) or len(prompt) < place.tokens:
            raise errors.InvalidInput("input_ids: expected the session's tokens so far, and more")
        output = sglang.decode(answer, fields=self.run.fields, prompt_tokens=len(prompt), start=place.routed)
        for heavy in ("routed_experts", "output_token_logprobs", "input_token_logprobs"):
            answer["meta_info"].pop(heavy, None)
        return answer, output

    def store(self, place: Place, call: str | None, prompt: list[int], output: EngineOutput) -> None:
        """Leaving the block commits all of it, or frees all of it."""
        with place.session.step(call, version=output.version, sampled=output.sampled) as step:
            # One piece: what is new of the prompt. ``record`` puts the completion's rows.
            step.put("token_ids", np.array(prompt[place.tokens :], np.int32), start=place.tokens)
            record(step, output)
        place.tokens = output.sampled[1]
        place.routed = output.sampled[1] - 1

    async def place(self, name: str) -> Place:
        if name not in self.places:
            session = await self.run.asession(name)
            ends = session.ends
            self.places[name] = Place(session, ends.get("token_ids", 0), ends.get("routed_experts", 0))
        return self.places[name]

    async def finalize(self, request: Request) -> Response:
        place = self.places.pop(request.path_params["name"])
        segments = await place.session.afinalize(reward=(await request.json()).get("reward"))
        return JSONResponse([segment.model_dump() for segment in segments])


async def told(_: Request, error: Exception) -> Response:
    """Errors of the library say what they are, and whether the same call may work later."""
    assert isinstance(error, errors.ArrowTQError)
    return JSONResponse({"error": error.to_wire()}, 503 if error.retryable else 400)


def app(run: Run, upstream_url: str) -> Starlette:
    upstream = httpx.AsyncClient(base_url=upstream_url, timeout=600)
    proxy = OwnProxy(run, upstream)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with upstream:
            yield

    routes = [
        Route("/generate", proxy.generate, methods=["POST"]),
        Route("/sessions/{name:path}/finalize", proxy.finalize, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={errors.ArrowTQError: told}, lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--port", type=int, default=8901)
    asked = parser.parse_args()
    with arrow_tq.connect(asked.store) as store:
        uvicorn.run(app(store.run(asked.run), asked.upstream), port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
