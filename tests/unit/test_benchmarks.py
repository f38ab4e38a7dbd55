"""The benchmarks run, in sizes that only show that they do, and write what the documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_smoke(tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", "--json", str(report)],
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text())
    assert {"cpu", "cores", "memory_gib", "kernel", "python"} <= set(content["machine"])
    rows = content["rows"]
    assert len(rows) >= 26
    for row in rows:
        assert set(row) == {"name", "value", "unit", "baseline", "ratio", "target"}
        assert row["value"] > 0
        # A long name goes on in the next line of its cell.
        assert row["name"][:20] in done.stdout
        if row["target"] is not None:
            assert row["ratio"] > 0


def test_an_unknown_suite_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr
