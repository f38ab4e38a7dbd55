"""PIL images as their pixels and what belongs to them, without importing PIL before somebody has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from arrow_tq.bundles.plans import Bytes
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage

_RAW_MODES = frozenset(
    {"1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBa", "La", "I;16"}
)


@dataclass(frozen=True, slots=True, eq=False)
class ImageParts:
    """An image taken apart."""

    mode: str
    size: tuple[int, int]
    pixels: Bytes
    palette: tuple[str, bytes] | None
    info: dict[object, object]


def is_image(value: object) -> bool:
    """Whether it is a PIL image. One opened from a file counts, and comes back as a plain image."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def parts(value: Any) -> ImageParts:
    """Raises ``InvalidInput`` for a mode whose pixels PIL does not give as they are."""
    if value.mode not in _RAW_MODES:
        raise InvalidInput(f"an image of mode {value.mode!r} cannot be stored; convert it first")
    value.load()
    palette = None
    if value.palette is not None:
        mode, colors = value.palette.mode, value.getpalette(value.palette.mode)
        palette = mode, bytes(colors or ())
    pixels = np.frombuffer(value.tobytes(), np.uint8)
    return ImageParts(value.mode, tuple(value.size), pixels, palette, dict(value.info))


def image(pixels: Bytes, mode: str, size: list[int], palette: list[str] | None, info: object) -> object:
    """The image of those parts."""
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput("a bundle holds a PIL image, and PIL is not installed here") from None
    if mode not in _RAW_MODES or not isinstance(info, dict):
        raise MalformedMessage(f"bundle image of mode {mode!r}")
    made = Image.frombytes(mode, (int(size[0]), int(size[1])), pixels.tobytes())
    if palette is not None:
        made.putpalette(bytes.fromhex(palette[1]), palette[0])
    made.info = info
    return made
