"""The catalog: metadata tables on SQLite, and the owner of each chunk's state."""

from arrow_tq.store.catalog.catalog import Catalog
from arrow_tq.store.catalog.config import CatalogConfig, CatalogGauges, ChunkPins

__all__ = ["Catalog", "CatalogConfig", "CatalogGauges", "ChunkPins"]
