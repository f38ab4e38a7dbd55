"""Bundles: a finished ``dict`` as columns of bytes and a description of them, and back, exactly.

Pure code: it knows no store. ``plan`` looks at a dict and says what is to be written where; ``rebuild``
makes the dict from what was written. ``docs/bundles.md`` describes layouts and encoding.
"""

from arrow_tq.bundles.infer import plan_fields
from arrow_tq.bundles.packing import ChunkPlan, pack
from arrow_tq.bundles.plans import FieldPlan, LayoutMiss
from arrow_tq.bundles.structure import Structure

__all__ = ["ChunkPlan", "FieldPlan", "LayoutMiss", "Structure", "pack", "plan_fields"]
