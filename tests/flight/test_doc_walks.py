"""Two pages of the documentation, walked through: what they tell people to type is typed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from arrow_tq_server.memory import sweep
from tests.serving import quiet_ports

ROOT = Path(__file__).parents[2]
NEEDED = ("bash", "curl", "openssl")
WALK_S = 120
PORTS = ("8815", "8816", "8825", "8826", "8835", "8836")
HEAD = {
    "head:": "localhost:",
    "in head me": "in localhost me",
    "head.pem": "localhost.pem",
    "head.key": "localhost.key",
}
"""The machine that pages call ``head`` is this one."""

pytestmark = [
    pytest.mark.skipif(any(shutil.which(one) is None for one in NEEDED), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.timeout(300),
]


def free_ports() -> dict[str, str]:
    """A free port for each that pages name."""
    return dict(zip(PORTS, map(str, quiet_ports(len(PORTS))), strict=True))


def script_of(page: str, replaced: Mapping[str, str], epilogue: str = "") -> str:
    """Every ``sh`` and ``python`` block of a page in its order, as one script; others are not for typing."""
    text = (ROOT / "docs" / page).read_text()
    parts = ["set -eu", "trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT"]
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        parts.append(block if language == "sh" else f"python - <<'END_OF_BLOCK'\n{block}END_OF_BLOCK")
    script = "\n".join([*parts, epilogue])
    for old, new in replaced.items():
        script = script.replace(old, new)
    return script


@contextmanager
def place(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder to walk in, and an environment with the commands that pages use."""
    commands, folder = tmp_path / "bin", tmp_path / "walk"
    commands.mkdir()
    folder.mkdir()
    start = f"#!/bin/sh\nexec {shlex.quote(sys.executable)}"
    for name, arguments in (("arrow-tq", "-m arrow_tq.cli"), ("python", "")):
        (commands / name).write_text(f'{start} {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ARROW_TQ_")}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "schemas", ROOT / "server")))
    try:
        yield folder, {**kept, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": paths}
    finally:
        shutil.rmtree(folder)
        sweep()


def walk(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Standard output of the whole walk, which ends without an error."""
    log = folder.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=WALK_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert process.returncode == 0, f"{output[-2000:]}\n{log.read_text()[-4000:]}"
    return output


def test_from_one_node_to_many(tmp_path: Path) -> None:
    with place(tmp_path) as (folder, environment):
        here = {
            **HEAD,
            **free_ports(),
            "/data/": f"{folder}/several/",
            "/etc/arrow-tq/tokens.toml": f"{folder}/tokens.toml",
        }
        joined = "until curl -fs http://localhost:8826/readyz; do sleep 0.5; done"
        script = script_of("from-one-node-to-many.md", here, joined)
        output = walk(script, folder, environment)
        assert "[0 1 2 3]" in output
        counts = dict(re.findall(r"^\W*([12])\W+(\d+)\W*$", output, re.MULTILINE))
        # Written within a moment, they may all be on one shard.
        assert counts and sum(map(int, counts.values())) == 20


def test_security(tmp_path: Path) -> None:
    with place(tmp_path) as (folder, environment):
        ports = free_ports()
        # There the servers have the default ports, which somebody else may have here.
        environment |= {"ARROW_TQ_PORT": ports["8815"], "ARROW_TQ_HTTP_PORT": ports["8816"]}
        output = walk(script_of("security.md", {**HEAD, **ports}), folder, environment)
        assert output.count("s-17") == 2, "listed without TLS, and with it"
        assert re.search(r"^arrow_tq_\w+", output, re.MULTILINE), "metrics"
        assert "grpc+tls://" in output
