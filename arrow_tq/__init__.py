"""arrow-tq: the trajectory store for agentic reinforcement learning, on Apache Arrow.

``open`` a store in this process or ``connect`` to a server; both give the same ``Store``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from arrow_tq_schemas import errors, presets as fields
from arrow_tq_schemas.blobs import BlobRef
from arrow_tq_schemas.fields import Field, Task
from arrow_tq_schemas.receipts import Receipt

if TYPE_CHECKING:
    from arrow_tq.client import ClientOptions, Tls
    from arrow_tq.interface import Store

__all__ = ["BlobRef", "Field", "Receipt", "Task", "connect", "errors", "fields", "open"]
__version__ = "0.1.0"


def open(
    path: str | os.PathLike[str],
    *,
    capacity_bytes: int | None = None,
    keep_marks: int = 1,
    run_quota_bytes: int | None = None,
) -> Store:
    """Open the store in a folder, in this process, creating it when it is new. No server.

    Args:
        path: the folder. All of the store is in it: deleting the folder deletes the store.
        capacity_bytes: payload bytes at most; four fifths of the free space when left out.
        keep_marks: how many of a run's marks back what was released since is kept for ``run.rewind``.
        run_quota_bytes: payload bytes of one run at most; no bound but the capacity when left out.

    Raises:
        StoreInUse: another process has it open; names its pid, and its URL if it is a server.
    """
    from arrow_tq.interface import Store
    from arrow_tq.store import Engine, EngineConfig

    config = EngineConfig(
        data_dir=Path(path),
        capacity_bytes=capacity_bytes,
        keep_marks=keep_marks,
        run_quota_bytes=run_quota_bytes,
    )
    return Store(Engine(config))


def connect(
    url: str, token: str | None = None, options: ClientOptions | None = None, tls: Tls | None = None
) -> Store:
    """Connect to a server, such as ``grpc://head:8815``.

    Args:
        url: ``grpc://host:port``, ``grpc+tls://host:port`` or ``grpc+unix:///path``.
        token: bearer token, sent with every call.
        options: deadlines and bounds of the client.
        tls: the CA, and the client's own certificate, for ``grpc+tls://``.

    Raises:
        Unauthenticated: the server does not know the token.
        Unreachable: nobody answered there within the connect deadline.
    """
    from arrow_tq.client import ClientOptions, FlightBackend
    from arrow_tq.interface import Store

    return Store(FlightBackend(url, token, options or ClientOptions(), tls))
