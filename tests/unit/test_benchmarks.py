"""The benchmarks run, in sizes that only show that they do, and write what the documentation says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from benchmarks import docs
from benchmarks.__main__ import SUITES
from benchmarks.curves import EXPONENT, exponent
from benchmarks.goals import GOALS, lines
from benchmarks.peers.driving import fit
from benchmarks.peers.payloads import NAMES, difference, recipe
from benchmarks.report import Row, ceiling, floor, joined, met, read, write

ROOT = Path(__file__).parents[2]
QUICK = [name for name in SUITES if name != "replay"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def _is_svg(path: Path) -> bool:
    return ElementTree.parse(path).getroot().tag.endswith("svg")


def test_smoke(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = _run("benchmarks", *QUICK, "--smoke", "--json", str(report), "--plots", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text())
    assert {"cpu", "cores", "memory_gib", "kernel", "python"} <= set(content["machine"])
    assert content["machine"]["first_touch_fresh_us_a_page"] > 0
    rows = content["rows"]
    assert len(rows) >= 25
    for row in rows:
        assert set(row) == {"name", "value", "unit", "baseline", "ratio", "target"}
        assert row["value"] > 0
        # A long name goes on in the next line of its cell.
        assert row["name"][:20] in done.stdout
        if row["target"] is not None:
            assert row["ratio"] > 0
    assert _is_svg(tmp_path / "bench.svg")
    asked = {name for goal in GOALS if goal.report == "bench.json" for name in goal.rows}
    assert asked - {row["name"] for row in rows} == {"routing replay, to the rest of the step"}
    verdicts = {line[2]: line[-1] for line in lines(tmp_path)}
    assert verdicts["expand handles, to all of them in 1 s"] in {"met", "MISSED"}
    assert verdicts["head: memory saved, references for whole payloads"] == "not measured: make bench-peers"


@pytest.mark.slow
def test_replay_smoke(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = _run("benchmarks", "replay", "--smoke", "--json", str(report))
    assert done.returncode == 0, done.stderr
    replayed, step = read(report)
    assert replayed.name == "routing replay, to the rest of the step"
    assert 0 < replayed.value < 100
    assert step.value > 0


def test_an_unknown_suite_is_named() -> None:
    done = _run("benchmarks", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr


def test_curves(tmp_path: Path) -> None:
    report = tmp_path / "curves.json"
    done = _run("benchmarks.curves", "--smoke", "--json", str(report), "--plots", str(tmp_path))
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text())
    assert list(content["curves"]) == ["chunks", "segments", "bytes", "readers"]
    bounded = [row for row in content["rows"] if row["name"].endswith(", exponent")]
    assert len(bounded) == sum(len(curve["seconds"]) for curve in content["curves"].values())
    assert all(row["baseline"] == EXPONENT and row["ratio"] > 0 for row in bounded)
    assert all(_is_svg(tmp_path / f"{name}.svg") for name in content["curves"])


def test_the_exponent_is_that_of_the_larger_sizes() -> None:
    sizes = [2**power for power in range(8)]
    assert exponent([(size, 3.0 * size) for size in sizes]) == pytest.approx(1)
    assert exponent([(size, 1e-3 * size**2) for size in sizes]) == pytest.approx(2)
    # Linear at first, then quadratic: an average over all would hide it.
    assert exponent([(size, size + size**2 / 16) for size in sizes]) > 1.5


@pytest.mark.parametrize(
    ("system", "payload"),
    [
        ("mooncake", "r3-smoke"),
        pytest.param("ray", "r3-smoke", marks=pytest.mark.slow),
        pytest.param("ray", "r3-trajectories-smoke", marks=pytest.mark.slow),
    ],
)
def test_peers(system: str, payload: str, tmp_path: Path) -> None:
    report = tmp_path / "peers.json"
    done = _run(
        *("benchmarks.peers", "--smoke", "--rounds", "2", "--systems", f"arrow-tq,{system}"),
        *("--json", str(report), "--plots", str(tmp_path), payload),
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(report.read_text())["outcomes"]
    assert [outcome["system"] for outcome in outcomes] == ["arrow-tq", system]
    for outcome in outcomes:
        if importlib.util.find_spec(outcome["system"].replace("-", "_")) is None:
            # What is not installed stands in the table, with what it needs.
            assert "cannot run" in outcome["failed"] and "needs" in outcome["failed"]
            continue
        assert outcome["failed"] is None
        assert len(outcome["times"]["put_s"]) == len(outcome["times"]["get_s"]) == 2
    assert _is_svg(tmp_path / "peers.svg")


@pytest.mark.slow
def test_head_memory(tmp_path: Path) -> None:
    report = tmp_path / "head.json"
    sizes = ("--trajectories", "32", "--tokens", "8192")
    done = _run("benchmarks.peers.head_memory", "--smoke", *sizes, "--json", str(report))
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text())
    whole, reference = content["peaks"]["head"]
    assert whole > reference
    assert {"proxy", "manager", "trainers", "object store", "arrow-tq server"} < set(content["peaks"])


def test_every_payload_has_a_size_before_it_is_built() -> None:
    for name in (*NAMES, "r3-smoke"):
        about = recipe(name)
        payload = about.make(name, 1)
        assert payload.samples == 1
        assert payload.nbytes == pytest.approx(about.sample_bytes, rel=0.15)


def test_a_payload_is_measured_in_the_memory_that_there_is() -> None:
    size = recipe("indexer-topk").nbytes
    roomy, tight, small = (fit("indexer-topk", 4, int(size * copies)) for copies in (20, 9, 4.5))
    assert (roomy.samples, roomy.together) == (8, True)
    assert (tight.samples, tight.together) == (8, False)
    assert (small.samples, small.together) == (4, False)


def test_what_comes_back_wrong_is_named() -> None:
    payload = recipe("r3-smoke").make("r3-smoke", 4)
    rows = {name: [payload.wanted(name, index) for index in range(4)] for name in payload.fields}
    assert difference(payload, rows) is None
    altered = rows["routed_experts"][2].copy()
    altered[5, 1, 3] ^= 1
    assert difference(payload, {**rows, "routed_experts": [*rows["routed_experts"][:2], altered]}) is not None
    rows["routed_experts"][2] = altered
    assert difference(payload, rows) == "routed_experts[2] differs"
    whole = {name: [np.asarray(value) for value in payload.fields[name]] for name in payload.fields}
    assert difference(payload, whole) == "routed_experts[0] differs", "half of the layers was asked for"


def test_a_report_grows_piece_by_piece(tmp_path: Path) -> None:
    slow, fast = ceiling("p99", 20.0, "ms", 10.0), floor("commits", 12.0, "1/s", 10.0)
    assert not met(slow) and met(fast)
    again = Row("p99", 5.0, "ms", 10.0, 2.0, 1.0)
    write(tmp_path / "new" / "rows.json", joined([slow, fast], [again]), {"cores": 2})
    assert read(tmp_path / "new" / "rows.json") == [again, fast]


def test_the_page_of_speeds_says_what_the_reports_say() -> None:
    text = docs.PAGE.read_text()
    assert docs.page(text, docs.PLOTS) == text, "run: make docs-figures"
    linked = re.findall(r"\]\((plots/\w+\.svg)\)", text)
    assert linked
    assert all(_is_svg(docs.PAGE.parent / one) for one in linked)
