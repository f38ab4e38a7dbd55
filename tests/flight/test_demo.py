"""The demonstration: it passes, it notices a single wrong bit, and it leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

pytest.importorskip("torch", reason="needs the extra demo")
pytest.importorskip("transformers", reason="needs the extra demo")

from arrow_tq.demo.consumer import compare
from arrow_tq.demo.model import RecordedModel
from arrow_tq.demo.rollouts import UNWRITTEN, Canvas, Rollout, RolloutPlan
from arrow_tq.demo.show import run_demo
from arrow_tq.testing.scenes import wait_until

SMALL = RolloutPlan(prompts=1, samples=2, turns=2, prompt_tokens=300, result_tokens=120, answer_tokens=6)
SHM = Path("/dev/shm")


def left_behind(scratch: Path) -> list[str]:
    """Processes and files of demonstrations whose scratch directory is ``scratch``."""
    processes = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if any(str(scratch) in argument for argument in process.info["cmdline"] or [])
    ]
    return processes + [str(path) for path in scratch.glob("arrow-tq-demo-*")]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The demonstration's directory for temporary files; it and /dev/shm must be clean afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(SHM.glob("arrow-tq-demo-*"))
    yield tmp_path
    assert left_behind(tmp_path) == []
    # A demonstration of somebody else's may be among them: that one ends and takes its own along.
    new = set(SHM.glob("arrow-tq-demo-*")) - before
    wait_until(lambda: not any(path.exists() for path in new), 90)


def demo(plan: RolloutPlan) -> tuple[int, str]:
    out = io.StringIO()
    return run_demo(plan, Console(file=out, width=120, highlight=False)), out.getvalue()


def test_a_small_demonstration(scratch: Path) -> None:
    code, text = demo(SMALL)
    assert code == 0, text
    assert "OK: " in text
    assert "2 rollouts, 4 model calls" in text
    assert "routed_experts" in text.split("Where do the bytes go?")[1]
    for line in ("put ", "get ", "reference "):
        assert f"\n{line}" in text


def test_one_wrong_bit_of_each_field_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Canvas.save

    def tampered(self: Canvas, path: Path, length: int) -> None:
        for values in (self.tokens, self.logprobs, self.experts):
            values.reshape(-1).view(np.uint8)[0] ^= 1
        honest(self, path, length)

    monkeypatch.setattr(Canvas, "save", tampered)
    code, text = demo(SMALL)
    assert code == 1
    assert "FAILED: the store gave back other values than the model produced" in text
    for field in ("token_ids", "logprobs", "routed_experts"):
        assert text.count(f"{field}: 1 values differ, from position 0") == 2


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "arrow_tq.cli", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_cleans_up(scratch: Path, number: signal.Signals, code: int) -> None:
    with command("--prompts", "64") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("server ")
        assert process.stdout.readline().startswith("model ")
        time.sleep(0.5)
        process.send_signal(number)
        _, err = process.communicate(timeout=40)
    assert process.returncode == code
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_whole_demonstration_takes_less_than_a_minute(scratch: Path) -> None:
    started = time.monotonic()
    with command() as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "16 segments are bit for bit what the model produced" in " ".join(out.split())
    assert "with replay none" in out
    assert time.monotonic() - started < 60


# -- its parts -------------------------------------------------------------------------------------


def test_steps_and_canvas_agree() -> None:
    rollout = Rollout(RecordedModel(SMALL.model_shape()), SMALL, prompt=0, sample=0)
    steps = list(rollout.steps())
    tokens = np.concatenate([step.ids for step in steps])
    np.testing.assert_array_equal(tokens, rollout.canvas.tokens[: rollout.length])
    experts = np.concatenate([step.experts for step in steps])
    assert experts.shape == (rollout.length - 1, 4, 8)
    assert (experts < 32).all()
    assert (rollout.canvas.experts[rollout.length - 1] == UNWRITTEN).all()
    for step in steps:
        begin, end = step.sampled
        assert end - begin == len(step.logprobs) <= SMALL.answer_tokens
        np.testing.assert_array_equal(step.logprobs, rollout.canvas.logprobs[begin:end])
        assert (step.logprobs < 0).all()


def test_compare_is_about_bits() -> None:
    nan, other_nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    truth = {
        "token_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.array([0.0, nan, -1.0], np.float32),
        "routed_experts": np.zeros((2, 2, 2), np.uint8),
    }
    assert compare("s", truth, truth) == []
    assert compare("s", {**truth, "logprobs": np.array([0.0, other_nan, -1.0], np.float32)}, truth) == [
        "s logprobs: 1 values differ, from position 1"
    ]
    assert compare("s", {**truth, "logprobs": np.array([-0.0, nan, -1.0], np.float32)}, truth) == [
        "s logprobs: 1 values differ, from position 0"
    ]
    assert compare("s", {**truth, "routed_experts": np.zeros((3, 2, 2), np.uint8)}, truth) == [
        "s routed_experts: uint8(3, 2, 2), the model produced uint8(2, 2, 2)"
    ]
    assert compare("s", {**truth, "token_ids": np.arange(3, dtype=np.int64)}, truth) == [
        "s token_ids: int64(3,), the model produced int32(3,)"
    ]
