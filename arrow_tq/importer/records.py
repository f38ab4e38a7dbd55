"""Records of a file: JSON lines, or one JSON document; gzip by its name. Streamed, bounded, numbered."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from arrow_tq_schemas.errors import InvalidInput, MalformedMessage, NotFound

RECORD_BYTES_MAX = 256 << 20
"""Longest line, and largest ``.json`` document, that is read into memory."""
SKIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file: its JSON object, or what is wrong with it."""

    path: Path
    number: int
    """Line number from 1; in a ``.json`` document the place in its list, from 1."""
    value: dict[str, object] | None
    problem: str = ""
    """Why ``value`` is None."""
    consumed_bytes: int = 0
    """Bytes as they lie on disk that were read so far."""

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}"


def check_files(paths: Sequence[Path]) -> int:
    """Total bytes on disk of files that must all be readable.

    Raises:
        NotFound: no such file.
        InvalidInput: a folder, or not to be opened.
    """
    total = 0
    for path in paths:
        if not path.exists():
            raise NotFound(f"{path}: no such file", path=str(path))
        if not path.is_file():
            raise InvalidInput(f"{path}: not a regular file (it is read twice, so a pipe cannot be)")
        try:
            with path.open("rb"):
                total += path.stat().st_size
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", path=str(path)) from None
    return total


def read_records(path: Path, before_bytes: int = 0) -> Iterator[Record]:
    """The records of one file, in order; blank lines are passed over.

    ``before_bytes`` is added to each record's ``consumed_bytes``: the files read before.

    A record that is not a JSON object comes with its ``problem``, and reading goes on.

    Raises:
        MalformedMessage: the file as a whole cannot be read on (broken gzip); names the line.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = path.suffix == ".gz"
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            records = _document(path, stream) if _is_document(path) else None
            for record in records if records is not None else _lines(path, raw, stream):
                number = record.number
                yield replace(record, consumed_bytes=before_bytes + record.consumed_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise MalformedMessage(f"{path}:{number + 1}: cannot read on: {error}", path=str(path)) from None


def _is_document(path: Path) -> bool:
    return Path(path.name.removesuffix(".gz")).suffix == ".json"


def _lines(path: Path, raw: BinaryIO, stream: BinaryIO) -> Iterator[Record]:
    number = 0
    while True:
        line = stream.readline(RECORD_BYTES_MAX + 1)
        if not line:
            return
        number += 1
        if len(line) > RECORD_BYTES_MAX and not line.endswith(b"\n"):
            _skip_line(stream)
            yield Record(path, number, None, f"longer than {RECORD_BYTES_MAX} bytes", raw.tell())
        elif line.strip():
            value, problem = _parse(line)
            yield Record(path, number, value, problem, raw.tell())


def _skip_line(stream: BinaryIO) -> None:
    while True:
        piece = stream.readline(SKIP_BYTES)
        if not piece or piece.endswith(b"\n"):
            return


def _document(path: Path, stream: BinaryIO) -> Iterator[Record] | None:
    """The records of a ``.json`` file that holds one value; None where it holds lines after all."""
    text = stream.read(RECORD_BYTES_MAX + 1)
    if len(text) > RECORD_BYTES_MAX:
        stream.seek(0)
        return None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        # Lines under a name that says document, or a broken document: the line reader tells.
        stream.seek(0)
        return None
    return _items(path, whole if isinstance(whole, list) else [whole])


def _items(path: Path, items: list[object]) -> Iterator[Record]:
    size = path.stat().st_size
    for number, item in enumerate(items, start=1):
        value, problem = _object(item)
        yield Record(path, number, value, problem, size)


def _parse(line: bytes) -> tuple[dict[str, object] | None, str]:
    try:
        return _object(json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"


def _object(value: object) -> tuple[dict[str, object] | None, str]:
    if isinstance(value, dict):
        return value, ""
    return None, f"expected a JSON object, got {type(value).__name__}"
