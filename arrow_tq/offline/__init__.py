"""Working offline: a claimed batch as a folder of plain Arrow files, and back into a store.

``export_segments`` writes one, ``import_export`` reads it; docs/offline.md describes the files, which any
Arrow library reads.
"""

from arrow_tq.offline.exporting import Selection, export_segments
from arrow_tq.offline.importing import import_export
from arrow_tq.offline.layout import is_export

__all__ = ["Selection", "export_segments", "import_export", "is_export"]
