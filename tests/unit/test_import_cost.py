"""Importing the library is quick and light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "duckdb", "transformers", "sqlglot", "ray", "pyarrow.flight", "arrow_tq_server")


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, arrow_tq; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_pinned() -> None:
    import arrow_tq

    assert sorted(arrow_tq.__all__) == [
        "BlobRef",
        "Field",
        "Receipt",
        "Task",
        "connect",
        "errors",
        "fields",
        "open",
    ]
    assert all(hasattr(arrow_tq, name) for name in arrow_tq.__all__)
