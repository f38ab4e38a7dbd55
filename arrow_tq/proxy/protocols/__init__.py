"""The routes that are recorded: how each is asked for more, and how its answers are stripped again."""

from __future__ import annotations

from arrow_tq.proxy.config import ProxyConfig
from arrow_tq.proxy.protocols.base import Protocol
from arrow_tq.proxy.protocols.generate import Generate
from arrow_tq.proxy.protocols.sglang_chat import SglangChat
from arrow_tq.proxy.protocols.vllm import VllmChat, VllmCompletions


def protocols(config: ProxyConfig) -> dict[str, Protocol]:
    """The recorded routes of an engine, by path."""
    if config.engine == "vllm":
        return {
            "/v1/chat/completions": VllmChat(),
            "/v1/completions": VllmCompletions(),
        }
    return {
        "/generate": Generate(hidden_layers=config.hidden_layers),
        "/v1/chat/completions": SglangChat(hidden_layers=config.hidden_layers),
    }
