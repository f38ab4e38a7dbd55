"""Settings of a process: flags over environment over a TOML file over defaults."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.errors import InvalidInput

Config = TypeVar("Config", bound=BaseSettings)


def load_settings(kind: type[Config], flags: Mapping[str, object], file: Path | None = None) -> Config:
    """The settings in effect.

    Args:
        kind: the settings there are.
        flags: values from the command line by setting name; None stands for "not given".
        file: TOML file with the same names, if any.

    Raises:
        InvalidInput: an unknown setting or a value that does not fit, naming it; an unreadable file.
    """

    def sources(
        cls: type[BaseSettings],
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
    members = {"settings_customise_sources": classmethod(sources), "__module__": kind.__module__}
    layered = types.new_class("Sources", (kind,), exec_body=lambda names: names.update(members))
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config: Config = layered(**given)
    except ValidationError as error:
        raise InvalidInput(f"setting {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"config file {str(file)!r}: {error}") from None
    return config


def assigned(items: Iterable[str]) -> dict[str, str]:
    """Values of ``--set NAME=VALUE`` by name; raises ``InvalidInput`` for one without a name."""
    values = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise InvalidInput(f"--set {item!r}: expected NAME=VALUE")
        values[name] = value
    return values
