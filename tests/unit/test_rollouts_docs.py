"""The page for whoever writes rollouts runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import arrow_tq

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 28) as store:
        monkeypatch.setattr(arrow_tq, "connect", lambda url: store)
        names: dict[str, object] = {"tokens": np.arange(30), "logprobs": -np.ones(10)}
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        (row,) = store.sql("SELECT session_id, reward, status FROM segments").to_pylist()
        assert row == {"session_id": "s-17", "reward": 0.5, "status": "ready"}
        ends = store.sql("SELECT session_id, status FROM sessions ORDER BY 1").to_pylist()
        assert [one["status"] for one in ends] == ["finalized", "aborted"]
