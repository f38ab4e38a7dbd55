"""Store URLs."""

from __future__ import annotations

from urllib.parse import urlsplit

from arrow_tq_schemas.errors import InvalidInput

SCHEMES = ("grpc", "grpc+tcp", "grpc+tls", "grpc+unix")


def check_url(url: str) -> str:
    """The URL, if it is one that a client can connect to.

    Raises:
        InvalidInput: another scheme, no host or port, or a path where none belongs.
    """
    expected = "expected grpc://HOST:PORT, grpc+tls://HOST:PORT or grpc+unix:///PATH"
    try:
        parts = urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInput(f"store URL {url!r}: {error}; {expected}") from None
    if parts.scheme not in SCHEMES or parts.query or parts.fragment:
        raise InvalidInput(f"store URL {url!r}: {expected}")
    if parts.scheme == "grpc+unix":
        if parts.netloc or not parts.path.strip("/"):
            raise InvalidInput(f"store URL {url!r}: {expected}")
        return url
    if not parts.hostname or not port or parts.path.strip("/") or parts.username is not None:
        raise InvalidInput(f"store URL {url!r}: {expected}")
    return url.rstrip("/")


def check_token(token: str | None) -> str | None:
    """The token, if it can travel in a header; raises ``InvalidInput`` without showing it."""
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise InvalidInput("token: expected printable ASCII without spaces")
    return token
