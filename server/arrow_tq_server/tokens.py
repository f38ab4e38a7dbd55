"""Bearer tokens: a file of their hashes, read again when it changes.

::

    [tokens]
    "sha256:HEX" = { name = "proxy", runs = ["qwen3-grpo"], may = ["read", "write"] }
    "sha256:HEX" = { name = "operator", runs = "*", may = ["admin"] }

TOML, or the same shape as JSON where the name ends in ``.json``. The tokens themselves are nowhere.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field as Bound, ValidationError

from arrow_tq.tokens import SCHEME, digest_of
from arrow_tq_schemas.access import Grant, Right
from arrow_tq_schemas.chunks import explain
from arrow_tq_schemas.errors import InvalidInput, Unauthenticated
from arrow_tq_schemas.names import check_run

LOOK_S = 1.0
"""How often the file's time is looked at."""
TOKENS_MAX = 10_000
TOKEN_CHARS_MAX = 1024


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Bound(min_length=1, max_length=200)]
    runs: Literal["*"] | Annotated[list[str], Bound(min_length=1)]
    may: Annotated[list[Right], Bound(min_length=1)]

    def grant(self) -> Grant:
        runs = None if self.runs == "*" else frozenset(map(check_run, self.runs))
        return Grant(self.name, frozenset(self.may), runs)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[
        dict[Annotated[str, Bound(pattern=r"^sha256:[0-9a-f]{64}$")], _Entry], Bound(max_length=TOKENS_MAX)
    ]


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read, and the state of the file that it was read from."""

    grants: tuple[tuple[bytes, Grant], ...]
    stamp: tuple[int, int, int]


class Tokens:
    """The tokens that a server takes. Thread-safe.

    A file that became unreadable or wrong changes nothing: the tokens before it stay in force, and the log
    says so.

    Raises:
        InvalidInput: the file cannot be read, or does not fit; names key and value.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._known = _load(path)
        self._refused: tuple[int, int, int] | None = None

    def grant(self, token: str) -> Grant:
        """What a token allows; raises ``Unauthenticated`` for one that is not in the file."""
        self._look()
        found: Grant | None = None
        digest = digest_of(token) if len(token) <= TOKEN_CHARS_MAX else b""
        for known, grant in self._known.grants:
            # No early end: how long this takes says nothing about which token is close.
            if hmac.compare_digest(known, digest):
                found = grant
        if found is None:
            raise Unauthenticated("the token is not one that this server knows")
        return found

    def look_again(self) -> None:
        """Read the file anew at the next call, whatever its time says. Safe in a signal handler."""
        self._looked_at = 0.0
        self._known = _Known(self._known.grants, (0, 0, 0))

    def _look(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_at = time.monotonic()
            stamp = _stamp(self._path)
            if stamp in (self._known.stamp, self._refused):
                return
            self._refused = stamp
            self._known = _load(self._path)
            self._refused = None
            structlog.get_logger("arrow_tq.server").info("tokens read", tokens=len(self._known.grants))
        except (InvalidInput, OSError) as error:
            log = structlog.get_logger("arrow_tq.server")
            log.error("token file refused; the tokens before it stay in force", error=str(error))
        finally:
            self._lock.release()


def _load(path: Path) -> _Known:
    try:
        stamp, text = _stamp(path), path.read_text()
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        parsed = _File.model_validate(raw)
        grants = [(bytes.fromhex(key[len(SCHEME) :]), one.grant()) for key, one in parsed.tokens.items()]
    except OSError as error:
        raise InvalidInput(f"token file {str(path)!r}: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"token file {str(path)!r}: {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"token file {str(path)!r}: {error}") from None
    return _Known(tuple(grants), stamp)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size
