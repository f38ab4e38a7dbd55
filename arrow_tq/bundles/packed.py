"""msgpack, for fields whose schema asks for it: what exactness refuses, at the price of exactness.

Tuples come back as lists, subclasses as what they derive from, numpy values not at all.
"""

from __future__ import annotations

from arrow_tq_schemas.errors import InvalidInput, MalformedMessage


def pack_value(value: object, path: str) -> bytes:
    """Raises ``InvalidInput`` naming the path: not installed, or a value that msgpack does not know."""
    try:
        import msgpack
    except ImportError:
        raise InvalidInput(
            f"{path}: msgpack is asked for and not installed: pip install arrow-tq[msgpack]"
        ) from None
    try:
        return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass", datetime=True))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{path}: msgpack refuses it: {error}", path=path) from None


def unpack_value(raw: bytes) -> object:
    """Raises ``MalformedMessage`` for other bytes."""
    try:
        import msgpack
    except ImportError:
        raise InvalidInput(
            "a bundle holds msgpack, which is not installed: pip install arrow-tq[msgpack]"
        ) from None
    try:
        return msgpack.unpackb(raw, strict_map_key=False, unicode_errors="surrogatepass", timestamp=3)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"bundle msgpack: {error}") from None
