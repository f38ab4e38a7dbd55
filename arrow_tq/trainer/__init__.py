"""The consuming side: claimed batches, and how their payload is fetched."""

from arrow_tq.trainer.packing import PlanPolicy

__all__ = ["PlanPolicy"]
