"""Importing the library is quick and light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "duckdb", "transformers", "sqlglot", "ray", "pyarrow.flight", "arrow_tq_server")


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, arrow_tq; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_put_loads_no_pandas() -> None:
    """pyarrow does by itself wherever it makes a scalar: half a second of the first put."""
    code = (
        "import sys, tempfile, numpy as np, arrow_tq\n"
        "from arrow_tq import fields\n"
        "with tempfile.TemporaryDirectory() as folder, arrow_tq.open(folder) as store:\n"
        "    run = store.run('r', fields=[fields.token_ids(), fields.routed_experts(4, 2, 200)])\n"
        "    with run.session('s').step() as step:\n"
        "        step.put('token_ids', np.arange(17), start=0)\n"
        "        step.put('routed_experts', np.zeros((16, 4, 2), np.uint8), start=0)\n"
        "print('pandas' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
