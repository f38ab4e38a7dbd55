"""A client of another language, with none of our code, reads every shard by what Flight alone says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import arrow_tq
from arrow_tq import Field, fields
from arrow_tq.runs import Run
from tests.clusters import Cluster

SOURCE = Path(__file__).with_name("node")
INSTALL_S, READ_S = 150, 100
SHARDS, STEPS, TURN = 4, 12, 25
GROUPED = Field("grouped", "int16", shape=(3, 2), layer_axis=0, layer_groups=((0,), (1, 2)))
LABELS = ["token_ids", "logprobs", "routed_experts", "grouped:0", "grouped:1"]
SESSIONS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def reader() -> Path:
    """The program with what it needs, installed once and kept in the temporary folder."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no node or no npm on this machine")
    digest = hashlib.sha256((SOURCE / "package-lock.json").read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"arrow-tq-node-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(SOURCE / name, fresh)
            command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", f"{fresh}/cache"]
            try:
                done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=INSTALL_S)
            except subprocess.TimeoutExpired:
                pytest.skip(f"npm ci took longer than {INSTALL_S} s")
            if done.returncode:
                pytest.skip(f"npm ci failed: {done.stderr.strip()[-300:]}")
            shutil.rmtree(f"{fresh}/cache", ignore_errors=True)
            # Whole or not at all, whoever else installs it.
            part = folder.with_name(f"{folder.name}.{os.getpid()}")
            shutil.copytree(fresh, part, symlinks=True)
            try:
                part.rename(folder)
            except OSError:
                shutil.rmtree(part)
    for name in ("read.mjs", "flight.proto"):
        shutil.copy(SOURCE / name, folder)
    return folder / "read.mjs"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("foreign"), SHARDS) as running:
        yield running


def values_of(session: str) -> dict[str, npt.NDArray[np.generic]]:
    """Every field of a session, a row a token."""
    random = np.random.default_rng(list(session.encode()))
    tokens = STEPS * TURN
    return {
        "token_ids": random.integers(0, 1 << 20, tokens, dtype=np.int32),
        "logprobs": random.random(tokens, np.float32),
        "routed_experts": random.integers(0, 256, (tokens, 4, 2), dtype=np.uint8),
        "grouped": random.integers(-900, 900, (tokens, 3, 2)).astype(np.int16),
    }


def write(run: Run, name: str) -> None:
    """A session whose steps are on one shard after the other."""
    session, values = run.session(name), values_of(name)
    for index in range(STEPS):
        session.pin_shard(1 + index % SHARDS)
        first, end = index * TURN, (index + 1) * TURN
        with session.step(id=str(index), sampled=(first, end)) as step:
            for field, rows in values.items():
                last = end - (field == "routed_experts" and index == STEPS - 1)
                step.put(field, rows[first:last], start=first)
    session.finalize()


def expected(run: Run, label: str, segment: str) -> str:
    """The digest of what we read ourselves."""
    field, _, group = label.partition(":")
    column = run.table([segment], fields=[field])[field].combine_chunks()
    declared = run.field(field)
    dtype = np.dtype(declared.dtype)
    rows = np.asarray(column.to_pylist()[0], dtype).reshape(-1, *declared.shape)
    np.testing.assert_array_equal(rows, values_of(segment.split("~")[0])[field][: len(rows)])
    if group:
        rows = rows[:, list(declared.groups[int(group)])]
    digest = hashlib.sha256()
    for position, row in enumerate(np.ascontiguousarray(rows)):
        digest.update(position.to_bytes(8, "little"))
        digest.update(row.tobytes())
    return digest.hexdigest()


@pytest.mark.timeout(300)
def test_node_follows_every_endpoint_and_reads_the_same_bits(cluster: Cluster, reader: Path) -> None:
    with arrow_tq.connect(cluster.url) as store:
        declared = [fields.token_ids(), fields.logprobs(), fields.routed_experts(4, 2), GROUPED]
        run = store.run("foreign", fields=declared)
        for name in SESSIONS:
            write(run, name)
        done = subprocess.run(
            ["node", str(reader), cluster.url, run.name, *LABELS],
            capture_output=True,
            text=True,
            timeout=READ_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        urls = {server.url for server in cluster.shards}
        for label in LABELS:
            read = found["fields"][label]
            assert {one["uri"] for one in read["endpoints"]} == urls
            assert all(one["rows"] for one in read["endpoints"])
            digests = {f"{name}~0": expected(run, label, f"{name}~0") for name in SESSIONS}
            assert read["segments"] == digests
            for segment, digest in digests.items():
                assert [run.name, label, segment] in found["listed"]
                assert found["alone"][f"{label} {segment}"] == digest
