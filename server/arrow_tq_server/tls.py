"""The server's certificate and key, and whose client certificates it takes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from arrow_tq.client.tls import Tls as ClientTls
from arrow_tq_schemas.errors import InvalidInput
from arrow_tq_server.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. With ``client_ca_file`` both ends show certificates."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """What the settings say, checked; None: no TLS.

        Raises:
            InvalidInput: a file that cannot be read, or a certificate and a key that do not belong together.
        """
        if config.tls_cert is None or config.tls_key is None:
            return None
        found = cls(config.tls_cert, config.tls_key, config.tls_client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(found.cert_file, found.key_file)
        except (OSError, ssl.SSLError) as error:
            files = f"{str(found.cert_file)!r} with tls_key {str(found.key_file)!r}"
            raise InvalidInput(f"setting tls_cert: {files}: {_reason(error)}") from None
        if found.client_ca_file is not None:
            try:
                context.load_verify_locations(found.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                path = str(found.client_ca_file)
                raise InvalidInput(f"setting tls_client_ca: {path!r}: {_reason(error)}") from None
        return found

    def as_client(self, ca: Path | None) -> ClientTls:
        """What this server shows and checks when it calls another of its cluster."""
        own = (None, None) if self.client_ca_file is None else (self.cert_file, self.key_file)
        return ClientTls(ca, *own)

    def flight_arguments(self) -> dict[str, object]:
        """What ``FlightServerBase`` takes."""
        arguments: dict[str, object] = {
            "tls_certificates": [(self.cert_file.read_bytes(), self.key_file.read_bytes())]
        }
        if self.client_ca_file is not None:
            arguments |= {"verify_client": True, "root_certificates": self.client_ca_file.read_bytes()}
        return arguments


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
