"""The conformance suite: subclass ``StoreConformance`` and give a ``store`` fixture (an empty store).

Every test looks at the reply *and* at what the store holds afterwards.
"""

from arrow_tq.testing.conformance.blobs import BlobConformance
from arrow_tq.testing.conformance.bundles import BundleConformance
from arrow_tq.testing.conformance.checkpoints import CheckpointConformance
from arrow_tq.testing.conformance.claims import ClaimConformance
from arrow_tq.testing.conformance.concurrency import ConcurrencyConformance
from arrow_tq.testing.conformance.late_values import LateValueConformance
from arrow_tq.testing.conformance.people import PeopleConformance
from arrow_tq.testing.conformance.runs import RunConformance
from arrow_tq.testing.conformance.segments import SegmentConformance
from arrow_tq.testing.conformance.steps import StepConformance
from arrow_tq.testing.conformance.trainers import TrainerConformance
from arrow_tq.testing.conformance.trees import TreeConformance
from arrow_tq.testing.conformance.writing import WritingConformance

__all__ = ["StoreConformance"]


class StoreConformance(
    RunConformance,
    StepConformance,
    TreeConformance,
    SegmentConformance,
    ClaimConformance,
    TrainerConformance,
    LateValueConformance,
    CheckpointConformance,
    PeopleConformance,
    ConcurrencyConformance,
    WritingConformance,
    BlobConformance,
    BundleConformance,
):
    """All of it."""
