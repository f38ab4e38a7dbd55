"""Bearer tokens: how one is made, and what a server keeps of it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence

from arrow_tq_schemas.access import RIGHTS, Right
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_schemas.names import check_id, check_run

TOKEN_VARIABLE = "ARROW_TQ_TOKEN"
"""A token comes from the environment: the command line of a process is there for all to read."""
PREFIX = "atq_"
SCHEME = "sha256:"


def new_token() -> str:
    """A token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> bytes:
    """The sha256 of a token: its 256 random bits need no salt."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def check_rights(text: str) -> list[Right]:
    """The rights in ``read,write``; raises ``InvalidInput`` naming those that there are."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    rights: list[Right] = [right for right in RIGHTS if right in named]
    if not named or len(rights) != len(set(named)):
        raise InvalidInput(f"rights {text!r}: expected some of {', '.join(RIGHTS)}, joined by commas")
    return rights


def token_line(token: str, name: str, runs: Sequence[str], may: Iterable[Right]) -> str:
    """The line that a server's token file needs for a token; no runs: it covers every run."""
    # JSON's strings and arrays are TOML's too.
    scope = json.dumps([check_run(run) for run in runs]) if runs else '"*"'
    fields = (
        f"name = {json.dumps(check_id(name, 'token name'))}, runs = {scope}, may = {json.dumps(list(may))}"
    )
    return f'"{SCHEME}{digest_of(token).hex()}" = {{ {fields} }}'
