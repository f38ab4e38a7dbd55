"""The rules for names and ids that people choose."""

from __future__ import annotations

import re

from arrow_tq_schemas.errors import InvalidInput

ID_BYTES_MAX = 256
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def check_identifier(value: str, what: str) -> str:
    """A name that also serves as a column name (fields, tasks, user columns)."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise InvalidInput(
            f"{what} {value!r}: expected a letter or _ and then letters, digits or _, 64 at most"
        )
    return value


def check_run(value: str) -> str:
    """A run's name: it also names a folder."""
    if not isinstance(value, str) or not _RUN.fullmatch(value):
        raise InvalidInput(
            f"run {value!r}: expected a letter or digit and then letters, digits or ._-, 128 at most"
        )
    return value


def check_store(value: str) -> str:
    """A store's name: it names a folder too, and what belongs to the store is called ``NAME.WHAT``."""
    if not isinstance(value, str) or not _STORE.fullmatch(value):
        raise InvalidInput(
            f"store {value!r}: expected a letter or digit and then letters, digits or _-, 128 at most"
        )
    return value


def check_id(value: str, what: str) -> str:
    """A free text id (session, step, group, version): valid Unicode, 1 to 256 bytes of UTF-8."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what} {value!r}: expected a string, got {type(value).__name__}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} {value!r}: a lone surrogate at {error.start} is not an id") from None
    if not 0 < size <= ID_BYTES_MAX or "\x00" in value:
        raise InvalidInput(f"{what} {value!r}: expected 1 to {ID_BYTES_MAX} bytes of UTF-8 without NUL")
    return value


_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}(;[ -~]*)?", re.ASCII)


def check_media_type(value: str) -> str:
    """A media type such as ``image/png`` or ``text/plain; charset=utf-8``, 1 to 256 characters."""
    if not isinstance(value, str) or len(value) > ID_BYTES_MAX or not _MEDIA_TYPE.fullmatch(value):
        raise InvalidInput(f"media type {value!r}: expected one like 'image/png', {ID_BYTES_MAX} at most")
    return value


_SEGMENT = re.compile(r".*~t?[0-9]+", re.DOTALL)


def check_session(value: str) -> str:
    """A session's id: any free text that does not look like a segment's (``...~0``, ``...~t0``)."""
    if _SEGMENT.fullmatch(check_id(value, "session id")):
        raise InvalidInput(f"session id {value!r}: an ending like ~0 or ~t0 is kept for segment ids")
    return value


def segment_id(session_id: str, view: str, index: int) -> str:
    """The id of a segment: ``s-17~0`` in the lineage view, ``s-17~t0`` in the timeline view."""
    return f"{session_id}~{'t' if view == 'timeline' else ''}{index}"
