"""The recorder: for inside an inference engine. Rows go from its scheduler straight to the store.

Imports numpy and pyarrow, no framework.
"""

from arrow_tq.recorder.recorder import Recorder
from arrow_tq.recorder.request import Request
from arrow_tq.recorder.stats import RecorderStats

__all__ = ["Recorder", "RecorderStats", "Request"]
