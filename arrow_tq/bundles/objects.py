"""The tagged encoding: any value of the supported kinds as JSON, with large parts beside it.

JSON's own values stand for themselves: None, bool, int, finite float, str, list, and dict with str keys.
Everything else is an object with the one key ``~``, whose value is a list: a tag and what follows it.

=========  ==========================================  ====================================
tag        what follows                                stands for
=========  ==========================================  ====================================
``t``      list of values                              tuple
``d``      list of [key, value]                        dict with other keys, or a key ``~``
``f``      16 hex digits, big-endian bits              a float that is not finite
``i``      hex digits, with sign                       an int of more than 8,192 bits
``s``      base64 of UTF-8 with surrogates             str with lone surrogates
``c``      32 hex digits                               complex
``b``      attachment                                  bytes
``B``      attachment                                  bytearray
``n``      dtype, hex digits of its bytes              numpy scalar
``a``      attachment, dtype, shape                    numpy array
``T``      attachment, dtype, shape                    torch tensor
``I``      attachment, mode, size, palette, info       PIL image
=========  ==========================================  ====================================

An attachment is the number of a byte string that is stored beside the JSON.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from arrow_tq.bundles import images, tensors_io
from arrow_tq.bundles.dtypes import dtype_json, json_dtype
from arrow_tq.bundles.plans import Bytes, as_bytes
from arrow_tq_schemas.errors import InvalidInput, MalformedMessage

TAG = "~"
DEPTH_MAX = 128
INT_BITS_MAX = 8192
"""Larger ints are hexadecimal: Python bounds the digits of decimal ones."""
_JSON_ATOMS = frozenset({type(None), bool, str, float, int})


class Encoder:
    """Encodes values of one field; collects their attachments.

    Attributes:
        attachments: byte strings (views of the values' own memory) in the order of their numbers.
    """

    def __init__(self) -> None:
        self.attachments: list[Bytes] = []

    def text(self, value: object, path: str) -> bytes:
        """Compact ASCII JSON of a value.

        Raises:
            InvalidInput: something in it cannot be represented; names its path.
        """
        return dumps(self.plain(value, path))

    def plain(self, value: object, path: str, depth: int = 0) -> object:
        """The value as JSON has it. Parts that are JSON already are taken as they are."""
        kind = type(value)
        if kind in _JSON_ATOMS:
            return _atom(value)
        if depth > DEPTH_MAX:
            raise InvalidInput(
                f"{path[:200]}: nested more than {DEPTH_MAX} deep, or in itself", path=path[:200]
            )
        if kind is list or kind is tuple:
            assert isinstance(value, list | tuple)
            parts = self._items(value, path, depth)
            return parts if kind is list else _tagged("t", parts)
        if kind is dict:
            assert isinstance(value, dict)
            return self._dict(value, path, depth)
        if kind is bytes or kind is bytearray:
            number = self._attach(np.frombuffer(value, np.uint8))  # type: ignore[call-overload]
            return _tagged("b" if kind is bytes else "B", number)
        if kind is complex:
            return _tagged("c", struct.pack(">dd", value.real, value.imag).hex())  # type: ignore[attr-defined]
        return self._other(value, path)

    def _items(self, values: Sequence[object], path: str, depth: int) -> list[object]:
        return [
            # A path is text that is only made where it may be needed.
            _atom(one) if type(one) in _JSON_ATOMS else self.plain(one, f"{path}[{index}]", depth + 1)
            for index, one in enumerate(values)
        ]

    def _dict(self, value: dict[object, object], path: str, depth: int) -> object:
        if all(type(key) is str and key != TAG and _is_text(key) for key in value):
            return {
                key: _atom(one) if type(one) in _JSON_ATOMS else self.plain(one, f"{path}.{key}", depth + 1)
                for key, one in value.items()
            }
        pairs = []
        for key, one in value.items():
            if type(key) not in _JSON_ATOMS and type(key) not in (tuple, bytes, complex):
                raise _refused(key, f"{path}: key {key!r}")
            name = self.plain(key, f"{path}: key {key!r}", depth + 1)
            pairs.append([name, self.plain(one, f"{path}[{key!r}]", depth + 1)])
        return _tagged("d", pairs)

    def _other(self, value: object, path: str) -> object:
        kind = type(value)
        try:
            if kind is np.ndarray:
                assert isinstance(value, np.ndarray)
                described = dtype_json(value.dtype)
                return _tagged("a", self._attach(as_bytes(value)), described, list(value.shape))
            if isinstance(value, np.generic) and kind.__module__ == "numpy":
                return _tagged("n", dtype_json(value.dtype), value.tobytes().hex())
            if tensors_io.is_tensor(value):
                tensor = tensors_io.described(value)
                return _tagged(
                    "T", self._attach(tensors_io.as_bytes(value)), tensor.dtype, list(tensor.shape)
                )
            if images.is_image(value):
                parts = images.parts(value)
                info = self.plain(parts.info, f"{path}.info")
                palette = None if parts.palette is None else [parts.palette[0], parts.palette[1].hex()]
                return _tagged("I", self._attach(parts.pixels), parts.mode, list(parts.size), palette, info)
        except InvalidInput as error:
            if "path" in error.details:
                raise
            raise InvalidInput(f"{path}: {error.message}", path=path) from None
        raise _refused(value, path)

    def _attach(self, memory: Bytes) -> int:
        self.attachments.append(memory)
        return len(self.attachments) - 1


class Decoder:
    """Decodes what an ``Encoder`` encoded. Attachments are ``Bytes``, read-only, numbered as they were."""

    def __init__(self, attachments: Sequence[Bytes] | dict[int, Bytes]) -> None:
        self._attachments = attachments

    def value(self, raw: bytes | memoryview) -> object:
        """Raises ``MalformedMessage`` for what no encoder made."""
        text = bytes(raw)
        try:
            plain = json.loads(text)
            return self.restore(plain) if b'"~"' in text else plain
        except MalformedMessage:
            raise
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error) as error:
            raise MalformedMessage(f"bundle object: {type(error).__name__}: {error}") from None

    def restore(self, plain: object) -> object:
        if isinstance(plain, list):
            return [self.restore(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        if TAG not in plain:
            return {key: self.restore(one) for key, one in plain.items()}
        tag, *rest = plain[TAG]
        return self._tagged(tag, rest)

    def _tagged(self, tag: str, rest: list[Any]) -> object:
        match tag:
            case "t":
                return tuple(self.restore(one) for one in rest[0])
            case "d":
                return {self.restore(key): self.restore(one) for key, one in rest[0]}
            case "f":
                return struct.unpack(">d", bytes.fromhex(rest[0]))[0]
            case "i":
                return int(rest[0], 16)
            case "s":
                return base64.b64decode(rest[0]).decode("utf-8", "surrogatepass")
            case "c":
                return complex(*struct.unpack(">dd", bytes.fromhex(rest[0])))
            case "b":
                return self._attachments[rest[0]].tobytes()
            case "B":
                return bytearray(self._attachments[rest[0]].tobytes())
            case "n":
                return np.frombuffer(bytes.fromhex(rest[1]), json_dtype(rest[0]), 1)[0]
            case "a":
                return self._attachments[rest[0]].view(json_dtype(rest[1])).reshape(rest[2])
            case "T":
                return tensors_io.tensor(self._attachments[rest[0]].copy(), rest[1], rest[2])
            case "I":
                mode, size, palette, info = rest[1:]
                return images.image(self._attachments[rest[0]], mode, size, palette, self.restore(info))
        raise MalformedMessage(f"bundle object: unknown tag {tag!r}")


def dumps(plain: object) -> bytes:
    """Compact JSON, ASCII; NaN and infinities have tags of their own."""
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


def _atom(value: object) -> object:
    if isinstance(value, str):
        if _is_text(value):
            return value
        return _tagged("s", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode())
    if isinstance(value, float) and value - value != 0:
        return _tagged("f", struct.pack(">d", value).hex())
    if isinstance(value, int) and value.bit_length() > INT_BITS_MAX:
        return _tagged("i", hex(value))
    return value


def _is_text(value: str) -> bool:
    """Whether JSON gives a str back as it is: two lone surrogates would become one character."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tagged(*parts: object) -> object:
    return {TAG: list(parts)}


def _refused(value: object, path: str) -> InvalidInput:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return InvalidInput(
        f"{path}: a {name} cannot be stored exactly; store plain values, arrays, tensors or images, or "
        "ask for msgpack for this field in the schema",
        path=path,
        type=name,
    )


def field_name(key: object) -> str:
    """What people call a field: its key where that is text."""
    return sys.intern(key) if isinstance(key, str) and _is_text(key) else ascii(key)
