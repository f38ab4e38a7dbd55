"""Settings of a proxy: flags over environment (``ARROW_TQ_PROXY_*``) over a TOML file over defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field as Setting
from pydantic_settings import BaseSettings, SettingsConfigDict

from arrow_tq.settings import load_settings
from arrow_tq_schemas.errors import InvalidInput

ENV_PREFIX = "ARROW_TQ_PROXY_"
MIB = 1 << 20


class ProxyConfig(BaseSettings):
    """Everything a proxy can be told. Sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    upstream: str = Setting(description="URL of the engine, or of the router in front of several.")
    store: str = Setting(description="URL of a store's server, or a folder that this process opens itself.")
    run: str = Setting(default="default", description="Run that sessions belong to.")
    token: str | None = Setting(default=None, description="Bearer token for the store's server.")
    host: str = Setting(default="127.0.0.1", description="Address to listen on.")
    port: int = Setting(default=8900, ge=0, le=65535, description="Port; 0 picks a free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Setting(
        default="info", description="Least level that is logged (JSON lines on standard error)."
    )

    engine: Literal["sglang", "vllm"] = Setting(
        default="sglang", description="Whose protocol the upstream speaks."
    )
    routing: Literal["payload", "receipts"] = Setting(
        default="payload",
        description="How expert ids come: in responses, or as receipts of an engine with a recorder.",
    )
    chat_streams: Literal["auto", "native", "gathered"] = Setting(
        default="auto",
        description="Streamed calls of the OpenAI routes: asked of the engine as a stream, or asked whole "
        "and answered as one. `auto`: as a stream where the engine's streams carry what the run declares.",
    )
    row_rule: Literal["exact", "stop-edge", "prefill-only", "past-stop", "ignores-start"] = Setting(
        default="exact", description="Which rows of routing the engine is known to send (docs/engines.md)."
    )
    hidden_layers: int | None = Setting(
        default=None,
        ge=1,
        description="Hidden layers that SGLang sends, dense ones included. Unset: exactly the field's.",
    )
    declare_layers: int | None = Setting(
        default=None,
        ge=1,
        description="Creates the run, with routing of so many MoE layers. Unset: the run exists.",
    )
    declare_topk: int = Setting(default=8, ge=1, description="Experts a token and layer, for a new run.")
    declare_experts: int = Setting(default=256, ge=1, description="Experts a layer, for a new run.")
    declare_tasks: str = Setting(default="train", description="Tasks of a new run, with commas between.")

    on_store_failure: Literal["fail", "pass"] = Setting(
        default="fail",
        description="A call that cannot be recorded because of the store: refused with 503, or answered all "
        "the same, and said to be unrecorded.",
    )
    on_no_session: Literal["pass", "refuse"] = Setting(
        default="pass", description="A call that names no session: passed through untouched, or refused."
    )
    session_ttl_s: float | None = Setting(
        default=None, gt=0, description="Age at which an unfinished session expires. Unset: never."
    )

    connect_s: float = Setting(default=10.0, gt=0, description="Until an engine is called unreachable.")
    response_s: float = Setting(
        default=1800.0, gt=0, description="How long the engine may be silent before, or within, an answer."
    )
    call_s: float = Setting(default=3600.0, gt=0, description="Deadline of one recorded call, all of it.")
    store_s: float = Setting(default=30.0, gt=0, description="Deadline of one command to the store.")

    calls_max: int = Setting(default=1024, ge=1, description="Calls under way; more are refused as busy.")
    decodes_max: int = Setting(default=4, ge=1, description="Responses decoded at a time, on threads.")
    request_bytes_max: int = Setting(default=64 * MIB, ge=1, description="Largest body of a recorded call.")
    response_bytes_max: int = Setting(
        default=512 * MIB, ge=MIB, description="Largest answer, or event of a stream, of a recorded call."
    )
    inflight_bytes_max: int = Setting(
        default=512 * MIB,
        ge=MIB,
        description="Bytes of recorded calls' answers in memory; what does not fit is not read yet.",
    )
    put_inflight_bytes_max: int = Setting(
        default=64 * MIB, ge=MIB, description="Bytes on their way to the store, and not acked yet."
    )
    sessions_max: int = Setting(
        default=65536, ge=1, description="Sessions remembered; the one used last longest ago is forgotten."
    )
    replies_bytes_max: int = Setting(
        default=64 * MIB, ge=0, description="Answers kept for calls that are repeated with their step id."
    )
    drain_s: float = Setting(
        default=30.0, ge=0, description="How long calls under way may take to finish after SIGTERM."
    )


def load(flags: Mapping[str, object], file: Path | None = None) -> ProxyConfig:
    """The settings in effect.

    Args:
        flags: values from the command line by setting name; None stands for "not given".
        file: TOML file with the same names, if any.

    Raises:
        InvalidInput: an unknown setting or a value that does not fit, naming it; an unreadable file.
    """
    config = load_settings(ProxyConfig, flags, file)
    if config.response_bytes_max > config.inflight_bytes_max:
        raise InvalidInput(
            f"setting response_bytes_max: {config.response_bytes_max}, expected at most inflight_bytes_max "
            f"({config.inflight_bytes_max})"
        )
    return config
