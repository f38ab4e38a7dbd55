"""Settings of a server: flags over environment (``ARROW_TQ_*``) over a TOML file over defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field as Setting, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.errors import InvalidInput, Unsupported

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
    role: Literal["all", "catalog", "shard"] = Setting(
        default="all", description="What this server does of a store. This version knows `all`."
    )
    join: str | None = Setting(
        default=None, description="URL of a cluster to join. This version has no clusters."
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
        default=3 * MIB,
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
        Unsupported: a role or a cluster to join.
    """

    class Sources(ServerConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if file is None:
                return init_settings, env_settings
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)

    if file is not None and not os.access(file, os.R_OK):
        raise InvalidInput(f"config file {str(file)!r}: cannot be read")
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config = Sources(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise InvalidInput(f"setting {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"config file {str(file)!r}: {error}") from None
    if config.role != "all":
        raise Unsupported(f"role {config.role!r}: this version serves a whole store in one process ('all')")
    if config.join is not None:
        raise Unsupported(f"join {config.join!r}: this version has no clusters")
    return config
