"""The page for trainers runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import arrow_tq
from arrow_tq import Task, fields

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    with arrow_tq.open(tmp_path / "store", capacity_bytes=1 << 30) as store:
        monkeypatch.setattr(arrow_tq, "connect", lambda url: store)
        experts = fields.routed_experts(layers=20, topk=8, num_experts=128)
        run = store.run(
            "qwen3-grpo",
            fields=[fields.token_ids(), fields.logprobs(), experts],
            tasks=[Task("actor"), Task("critic")],
        )
        for number in range(2):
            with run.session(f"s-{number}").step(sampled=(10, 30)) as step:
                step.put("token_ids", random.integers(0, 99, 30), start=0)
                step.put("logprobs", -random.random(20), start=10)
                step.put("routed_experts", random.integers(0, 128, (29, 20, 8)), start=0)
            run.session(f"s-{number}").finalize(reward=1.0)
        names: dict[str, object] = {}
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        assert store.stats()["chunks"] == 0
        assert names["experts"].shape == (32, 20, 8)  # type: ignore[attr-defined]
