"""The page for engine authors runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import arrow_tq

PAGE = Path(__file__).parents[2] / "docs" / "engine-authors.md"


def test_the_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.random.default_rng(0).integers(0, 128, (164, 48, 8), dtype=np.int32)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        monkeypatch.setattr(arrow_tq, "connect", lambda url: store)
        names = {
            "url": "grpc://head:8815",
            "tp_rank": 0,
            "prefill_rows": expected[:64],
            "routing_of_this_step": lambda positions: expected[positions],
            "tokens": np.arange(161),
        }
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        run = store.run("qwen3-grpo")
        run.session("s-17").finalize()
        rows = run.claim(1).fetch("routed_experts")["routed_experts"][0]
        np.testing.assert_array_equal(rows, expected[:160])
