"""Settings of a server: flags over environment (``ARROW_TQ_*``) over a TOML file over defaults."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field as Setting
from pydantic_settings import BaseSettings, SettingsConfigDict

from arrow_tq.settings import load_settings
from arrow_tq_schemas.errors import InvalidInput

ENV_PREFIX = "ARROW_TQ_"
MIB = 1 << 20


def _quotas(value: object) -> object:
    """From a flag they come as the JSON that the environment has."""
    return json.loads(value) if isinstance(value, str) else value


class ServerConfig(BaseSettings):
    """Everything a server can be told. Sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    data_dir: Path = Setting(description="Directory on disk: catalog, sidecars, chunks of disk-durable runs.")
    memory_dir: Path | None = Setting(
        default=None,
        description="Directory in memory for the chunks of other runs. Unset: where the store had it before, "
        "else one of its own under `/dev/shm`.",
    )
    host: str = Setting(default="127.0.0.1", description="Address to listen on, for Flight and HTTP.")
    port: int = Setting(default=8815, ge=0, le=65535, description="Flight port; 0 picks a free one.")
    http_port: int = Setting(
        default=8816,
        ge=0,
        le=65535,
        description="Port of `/livez`, `/readyz` and `/metrics`; 0 picks a free one.",
    )
    advertise_url: str | None = Setting(
        default=None,
        description="URL that clients are told to connect to. Unset: made of host (the machine's name where "
        "it listens on every address) and port.",
    )
    unix_socket: Path | None = Setting(
        default=None,
        description="Path of a Unix socket to serve Flight on, instead of the port.",
    )
    tokens_file: Path | None = Setting(
        default=None,
        description="File of the tokens that are taken (TOML or JSON; `arrow-tq token new` makes its lines), "
        "read again when it changes. Unset: whoever can connect may do everything.",
    )
    insecure: bool = Setting(
        default=False,
        description="Serve without tokens although `host` is more than this machine; the server refuses to "
        "start so otherwise.",
    )
    tls_cert: Path | None = Setting(
        default=None, description="Certificate chain (PEM) of both ports. Unset: no TLS."
    )
    tls_key: Path | None = Setting(default=None, description="Private key (PEM) of `tls_cert`.")
    tls_client_ca: Path | None = Setting(
        default=None,
        description="CA (PEM) that must have signed a client's certificate, on both ports: mutual TLS.",
    )
    role: Literal["all", "catalog", "shard"] = Setting(
        default="all",
        description="What this server does of a store: `catalog` holds the metadata and the map of shards, "
        "`shard` holds chunks, `all` is both.",
    )
    join: str | None = Setting(default=None, description="URL of the catalog that a `shard` joins.")
    lease_s: float = Setting(
        default=5.0, gt=0, description="A shard that the catalog has not heard of for so long is down."
    )
    fence_s: float = Setting(
        default=60.0,
        gt=0,
        description="A shard that does not reach its catalog goes on answering for so long (for `lease_s` "
        "where that is longer), and then stops. Nobody else gets its number before, unless it was stopped "
        "in order or its successor has locked the same directory on the same machine.",
    )
    cache_bytes: int = Setting(
        default=0,
        ge=0,
        description="Of a `shard`: bytes of other nodes' chunks kept for readers on this node, so that each "
        "is fetched once; 0: none.",
    )
    host_id: str | None = Setting(
        default=None,
        description="What this machine is called where it matters who is on it (placing, caching). Unset: "
        "the kernel's boot id.",
    )
    cluster_token: str | None = Setting(
        default=None,
        description="Token that catalog and shards show each other: `admin` for every run. Best given "
        "in the environment.",
    )
    cluster_ca: Path | None = Setting(
        default=None, description="CA (PEM) of the certificates of the cluster's servers."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Setting(
        default="info", description="Least level that is logged (JSON lines on standard error)."
    )

    capacity_bytes: int | None = Setting(
        default=None,
        ge=MIB,
        description="Payload bytes at most, memory and disk together. Unset: four fifths of the free space "
        "of the memory directory.",
    )
    memory_share: float | None = Setting(
        default=None,
        gt=0,
        le=1,
        description="Share of the host's memory (0 to 1) that the capacity never passes. Unset: no such "
        "bound.",
    )
    run_quota_bytes: int | None = Setting(
        default=None,
        ge=MIB,
        description="Payload bytes of one run at most, what is made ready for it included. Unset: no bound "
        "but the capacity.",
    )
    run_quotas: Annotated[dict[str, int], BeforeValidator(_quotas)] = Setting(
        default={},
        description='The same by run, where it differs: JSON, such as `{"eval": 1073741824}`.',
    )
    soft_mark: float = Setting(
        default=0.85, gt=0, le=1, description="Fill above which new sessions are refused, 0 to 1."
    )
    orphan_ttl_s: float = Setting(
        default=600.0, gt=0, description="Age at which a chunk that no step attached is reaped."
    )
    keep_marks: int = Setting(
        default=1,
        ge=0,
        description="How many of a run's marks back what was released since is kept for a rewind; 0: none.",
    )
    keep_released_s: float = Setting(
        default=86_400.0, gt=0, description="How long what was released is kept for a rewind at most."
    )

    blob_bytes_max: int = Setting(
        default=64 * MIB, ge=1, description="Largest file that a step may attach (`step.attach_blob`)."
    )

    sql_timeout_s: float = Setting(default=30.0, gt=0, description="A SQL query that runs longer is killed.")
    sql_memory_bytes: int = Setting(
        default=1024 * MIB, ge=64 * MIB, description="What a SQL query and the tables it reads may use."
    )
    sql_result_bytes_max: int = Setting(
        default=256 * MIB, ge=1, description="A SQL query with a larger result is stopped."
    )
    sql_rows_max: int = Setting(
        default=10_000_000, ge=1, description="A SQL query with more rows in its result is stopped."
    )

    put_ack_batches: int = Setting(
        default=32, ge=1, description="Batches of a put stream after which the server acks unasked."
    )
    put_ack_bytes: int = Setting(
        default=16 * MIB, ge=1, description="Bytes of a put stream after which the server acks unasked."
    )
    message_bytes_max: int = Setting(
        default=64 * MIB, ge=MIB, le=1 << 30, description="Largest batch taken or reply given in one message."
    )
    get_message_bytes: int = Setting(
        default=2 * MIB,
        ge=64 << 10,
        le=64 * MIB,
        description="Aimed size of one message of an answer: smaller pieces are joined, larger ones cut.",
    )
    segments_max: int = Setting(
        default=100_000, ge=1, description="Segments that one query, ticket or listing may name."
    )

    put_streams_max: int = Setting(
        default=512, ge=1, description="Put and commit streams open at a time, idle ones included."
    )
    gets_max: int = Setting(default=64, ge=1, description="Answers streamed at a time.")
    actions_max: int = Setting(default=64, ge=1, description="Actions worked on at a time.")
    waiting_claims_max: int = Setting(
        default=256, ge=1, description="Claims that wait for segments at a time; they hold no action's place."
    )
    handler_wait_s: float = Setting(
        default=10.0, ge=0, description="How long a call waits for a place before it is refused as busy."
    )
    drain_s: float = Setting(
        default=10.0, ge=0, description="How long work under way may take to finish after SIGTERM."
    )


def load(flags: Mapping[str, object], file: Path | None = None) -> ServerConfig:
    """The settings in effect.

    Args:
        flags: values from the command line by setting name; None stands for "not given".
        file: TOML file with the same names, if any.

    Raises:
        InvalidInput: an unknown setting or a value that does not fit, naming it; an unreadable file.
    """
    config = load_settings(ServerConfig, flags, file)
    _check_doors(config)
    if (config.role == "shard") != (config.join is not None):
        raise InvalidInput(
            "setting join: a server of role 'shard' takes the URL of its catalog, no other does"
        )
    return config


def _check_doors(config: ServerConfig) -> None:
    """Raises ``InvalidInput`` for a server that is open to strangers unasked, or half of a TLS set-up."""
    if config.tokens_file is None and not config.insecure and not is_loopback(config.host):
        raise InvalidInput(
            f"setting host: {config.host!r} can be reached from other machines, and without tokens whoever "
            "reaches it may do everything: set tokens_file, or insecure to serve all the same"
        )
    if (config.tls_cert is None) != (config.tls_key is None):
        raise InvalidInput("setting tls_cert: it takes tls_cert and tls_key together")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise InvalidInput("setting tls_client_ca: client certificates need TLS: set tls_cert and tls_key")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
