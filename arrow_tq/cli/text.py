"""What a terminal is given: text without escape sequences of others, sizes and rates for people."""

from __future__ import annotations

import re

from arrow_tq_schemas.errors import InvalidInput

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = ("B", "KB", "MB", "GB", "TB")


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates as escapes; tabs and line ends stay."""
    return _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def clip(text: str, characters: int | None) -> str:
    """The first ``characters`` of ``text`` and how many more there are."""
    if characters is None or len(text) <= characters:
        return text
    return f"{text[:characters]}... (+{len(text) - characters:,} characters)"


def size(count_bytes: float) -> str:
    """``12.3 MB``, decimal units."""
    step = 0
    while count_bytes >= 1000 and step < len(_UNITS) - 1:
        count_bytes, step = count_bytes / 1000, step + 1
    return f"{count_bytes:.0f} B" if step == 0 else f"{count_bytes:.1f} {_UNITS[step]}"


def binary_size(count_bytes: float) -> str:
    """``2.34 TiB``, binary units, as memory is counted."""
    step = 0
    while count_bytes >= 1024 and step < len(_BINARY_UNITS) - 1:
        count_bytes, step = count_bytes / 1024, step + 1
    return f"{count_bytes:.0f} B" if step == 0 else f"{count_bytes:.2f} {_BINARY_UNITS[step]}"


def quote(value: str) -> str:
    """``value`` as a SQL string literal."""
    if "\x00" in value or re.search("[\ud800-\udfff]", value):
        raise InvalidInput(f"{value!r}: not a text that SQL can hold")
    return "'" + value.replace("'", "''") + "'"
