"""What is not recorded passes through to the byte."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.proxy.conftest import Lab
from tests.proxy.processes import Process


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_methods_paths_headers_and_bodies(sglang: Process, method: str) -> None:
    target = "/v1/odd%2Fpath//x%20y?a=1&a=2&q=%C3%A9"
    body = bytes(range(256)) * 5 if method in ("POST", "PUT", "PATCH") else b""
    headers = [("X-Custom", "one"), ("X-Custom", "two"), ("Accept", "a/b"), ("Authorization", "Bearer t")]
    with httpx.Client() as client:
        response = client.request(method, sglang.url + target, content=body, headers=headers)
    assert response.status_code == 207
    assert response.headers["x-target"] == "/sglang" + target
    assert response.headers["x-method"] == method
    assert response.headers["content-type"] == "application/x-odd; a=1"
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    seen = json.loads(response.headers["x-seen"])
    assert [value for name, value in seen if name == "x-custom"] == ["one", "two"]
    # Nothing is added, and nothing but the host's name is changed.
    names = {name for name, _ in seen}
    assert names <= {
        "x-custom",
        "accept",
        "authorization",
        "host",
        "accept-encoding",
        "connection",
        "user-agent",
        "content-length",
    }
    assert response.content == (b"" if method == "HEAD" else body)


def test_large_and_chunked_bodies(sglang: Process) -> None:
    body = bytes(range(256)) * (3 << 14)
    assert httpx.post(f"{sglang.url}/blob", content=body, timeout=30).content == body
    pieces = (body[place : place + 50_000] for place in range(0, len(body), 50_000))
    assert httpx.post(f"{sglang.url}/blob", content=pieces, timeout=30).content == body


def test_a_call_without_a_session_is_untouched(lab: Lab, sglang: Process) -> None:
    body = b'{"input_ids":[65,66,67],  "sampling_params":{"max_new_tokens":5},"return_logprob":true}'
    headers = {"content-type": "application/json"}
    through = httpx.post(f"{sglang.url}/generate", content=body, headers=headers)
    direct = httpx.post(f"{lab.upstream.url}/sglang/generate", content=body, headers=headers)
    assert through.content == direct.content
    assert "x-arrow-tq-session" not in through.headers
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    assert httpx.post(f"{sglang.url}/v1/chat/completions", json=chat).status_code == 200


def test_an_engine_that_is_not_there(lab: Lab) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    from tests.proxy import processes

    log = lab.folder / "nobody.log"
    with processes.proxy(log, f"http://127.0.0.1:{port}", lab.server.url, lab.run.name) as proxy:
        for headers in ({}, {"x-arrow-tq-session": "nobody-1"}):
            response = httpx.post(f"{proxy.url}/generate", json={"input_ids": [65]}, headers=headers)
            assert response.status_code == 502
            assert response.json()["error"]["code"] == "unreachable"
        assert httpx.get(f"{proxy.url}/v1/models").status_code == 502


def test_the_proxys_own_endpoints(sglang: Process) -> None:
    assert httpx.get(f"{sglang.url}/arrow-tq/livez").text == "ok\n"
    assert httpx.get(f"{sglang.url}/arrow-tq/readyz").text == "ok\n"
    metrics = httpx.get(f"{sglang.url}/arrow-tq/metrics")
    assert (
        "arrow_tq_proxy_calls_total" in metrics.text and "arrow_tq_proxy_store_connected 1.0" in metrics.text
    )
    for path in ("/arrow-tq", "/arrow-tq/other", "/arrow-tq/sessions/none", "/arrow-tq/sessions/x/odd"):
        assert httpx.get(sglang.url + path).status_code == 404
    assert httpx.post(f"{sglang.url}/arrow-tq/sessions/x/odd").status_code == 404
