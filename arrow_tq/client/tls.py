"""What a client shows and checks on a TLS connection."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from arrow_tq_schemas.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM, read when a connection is made.

    Args:
        ca: CA that must have signed the server's certificate; None: those that gRPC brings along.
        cert: certificate chain that is shown to the server (mutual TLS).
        key: private key of ``cert``.
        verify: False takes any server. Then no client certificate can be shown: Arrow Flight would drop it
            without a word.

    Raises:
        InvalidInput: one of ``cert`` and ``key`` alone, or a certificate or CA with ``verify=False``.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidInput("tls: cert and key are given together")
        if not self.verify and (self.cert is not None or self.ca is not None):
            raise InvalidInput(
                "tls: verify=False with a client certificate or a CA: the certificate would not be shown and "
                "the CA not be asked; leave one of them out"
            )

    @classmethod
    def from_environment(cls) -> Tls | None:
        """As ``ARROW_TQ_TLS_CA``, ``..._CLIENT_CERT`` and ``..._CLIENT_KEY`` say, if any of them does."""
        names = ("ARROW_TQ_TLS_CA", "ARROW_TQ_TLS_CLIENT_CERT", "ARROW_TQ_TLS_CLIENT_KEY")
        ca, cert, key = (os.environ.get(name) or None for name in names)
        return None if ca is cert is key is None else cls(ca, cert, key)

    def flight_arguments(self) -> dict[str, object]:
        """What ``FlightClient`` takes; raises ``InvalidInput`` for a file that cannot be read."""
        if not self.verify:
            return {"disable_server_verification": True}
        arguments: dict[str, object] = {}
        for name, path in (("tls_root_certs", self.ca), ("cert_chain", self.cert), ("private_key", self.key)):
            if path is not None:
                arguments[name] = _read(path)
        return arguments


def _read(path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"tls: {str(path)!r}: {error.strerror}") from None
