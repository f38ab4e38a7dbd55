"""The embeddable engine: extents, chunk index, catalog, retention."""

from arrow_tq.store.config import EngineConfig
from arrow_tq.store.engine import Engine

__all__ = ["Engine", "EngineConfig"]
