"""Who may come in to a store on Ray: what ``arrow-tq serve`` is told about tokens and TLS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from arrow_tq.client.tls import Tls
from arrow_tq_schemas.errors import InvalidInput

INSECURE = "insecure"


@dataclass(frozen=True, slots=True)
class Doors:
    """Files on every node, at the same path; each is the server's setting of that name.

    Args:
        tokens_file: the tokens that are taken; None: whoever can connect may do everything (``OPEN``).
        tls_cert: certificate chain (PEM) of all servers: it names the nodes' addresses.
        tls_key: its private key.
        tls_client_ca: CA that must have signed a client's certificate: mutual TLS.
        cluster_ca: CA of ``tls_cert``, by which servers know each other.

    Raises:
        InvalidInput: one of ``tls_cert`` and ``tls_key`` alone, or a CA without them.
    """

    tokens_file: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    tls_client_ca: Path | str | None = None
    cluster_ca: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInput("doors: tls_cert and tls_key are given together")
        if self.tls_cert is None and (self.tls_client_ca is not None or self.cluster_ca is not None):
            raise InvalidInput(
                "doors: a CA without tls_cert and tls_key: there is no TLS that it could check"
            )

    def settings(self) -> dict[str, str]:
        """As settings of ``arrow-tq serve``."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        found = {name: str(value) for name, value in given.items() if value is not None}
        return found if self.tokens_file is not None else {**found, INSECURE: "true"}

    def tls(self) -> Tls | None:
        """What the servers show and check among themselves; None: no TLS."""
        if self.tls_cert is None:
            return None
        if self.tls_client_ca is None:
            return Tls(self.cluster_ca)
        return Tls(self.cluster_ca, self.tls_cert, self.tls_key)

    def check(self, token: str | None, settings: Iterable[str]) -> None:
        """Raises ``InvalidInput``: no token where they take one, or a setting that says the same twice."""
        if self.tokens_file is not None and token is None:
            raise InvalidInput(
                "doors: with tokens_file, token is one of its tokens, with admin over every run"
            )
        twice = {INSECURE, *(one.name for one in fields(self))} & set(settings)
        if twice:
            raise InvalidInput(f"setting {min(twice)}: it is given as doors=Doors(...), not in settings")


OPEN = Doors()
"""No tokens, no TLS: for networks in which every machine is trusted."""
