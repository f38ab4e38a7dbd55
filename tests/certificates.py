"""Certificates for tests, made by the openssl command line."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    cert: Path
    key: Path


class Authority:
    """A CA of its own in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", self.pair.key, "-out", self.pair.cert, "-days", "30", "-subj", f"/CN={name}"),
        )

    @property
    def cert(self) -> Path:
        return self.pair.cert

    def issue(self, name: str, days: int = 30, addresses: Sequence[str] = ("127.0.0.1",)) -> Pair:
        """A certificate for addresses and localhost; with ``days=-1`` one that has expired."""
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names = ",".join(["DNS:localhost", *(f"IP:{one}" for one in addresses)])
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", made.key, "-out", request, "-subj", f"/CN={name}"),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.pair.cert, "-CAkey", self.pair.key),
            *("-CAcreateserial", "-days", str(days), "-extfile", extensions, "-out", made.cert),
        )
        return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
