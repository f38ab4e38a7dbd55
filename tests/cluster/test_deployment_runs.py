"""Servers started as the Kubernetes manifests say: their environment, their probes, a read-only root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import arrow_tq
from arrow_tq import fields
from arrow_tq.testing.scenes import wait_until
from arrow_tq.tokens import check_rights, new_token, token_line
from tests.deployment import KUSTOMIZE, environment_of, links_of, render
from tests.serving import Server, quiet_ports

READ_ONLY = """
mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,bind,ro / || exit 9
shift; exec "$@"
"""
"""Runs a command in a mount namespace in which only one folder can be written."""


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        return False
    return subprocess.run([unshare, "--mount", "true"], capture_output=True).returncode == 0


def container(patch: pytest.MonkeyPatch, workload: Any, services: list[Any], given: Mapping[str, str]) -> Any:
    """Set a container's environment, its names and secrets replaced by ours; gives the container."""
    pod = workload["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    environment = environment_of(found, f"{workload['metadata']['name']}-0", "rl")
    if pod.get("enableServiceLinks", True):
        environment |= links_of(services)
    for name, value in environment.items():
        for old, new in given.items():
            value = value.replace(old, new)
        patch.setenv(name, value)
    return found


def asked(server: Server, probe: Mapping[str, Any]) -> int:
    """Status of a probe's page."""
    try:
        with urllib.request.urlopen(server.http_url + probe["httpGet"]["path"], timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_manifests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(KUSTOMIZE / "base")
    sets = {one["metadata"]["name"]: one for one in rendered if one["kind"] == "StatefulSet"}
    services = [one for one in rendered if one["kind"] == "Service"]
    catalog_port, shard_port = quiet_ports(2)
    tokens = tmp_path / "tokens.toml"
    token = new_token()
    tokens.write_text("[tokens]\n" + token_line(token, "cluster", [], check_rights("admin")))
    given = {
        "arrow-tq.rl.svc:8815": f"127.0.0.1:{catalog_port}",
        "arrow-tq-shard-0.arrow-tq-shards.rl.svc:8815": f"127.0.0.1:{shard_port}",
        "/etc/arrow-tq/tokens.toml": str(tokens),
        "a-secret": token,
    }

    def serve(name: str, port: int) -> tuple[Server, Any]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        prefix = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(folder)] if may_mount() else []
        with monkeypatch.context() as patch:
            found = container(patch, sets[name], services, given)
            arguments = ("--port", str(port))
            return Server(folder / "data", folder / "memory", *arguments, prefix=prefix), found

    shard, pod = serve("arrow-tq-shard", shard_port)
    with shard:
        # Alive, and not ready: its catalog is not there yet.
        assert asked(shard, pod["startupProbe"]) == asked(shard, pod["livenessProbe"]) == 200
        assert asked(shard, pod["readinessProbe"]) == 503
        catalog, catalog_pod = serve("arrow-tq-catalog", catalog_port)
        with catalog:
            assert asked(catalog, catalog_pod["livenessProbe"]) == 200
            assert asked(catalog, catalog_pod["readinessProbe"]) == 200
            wait_until(lambda: asked(shard, pod["readinessProbe"]) == 200, 30)
            with arrow_tq.connect(catalog.url, token) as store:
                session = store.run("r", fields=[fields.token_ids()]).session("s")
                with session.step(id="0", sampled=(0, 2)) as step:
                    step.put("token_ids", [1, 2], start=0)
                assert session.finalize()[0].num_tokens == 2
                # SQL has a process of its own, which must do without a disk to write to as well.
                rows = store.run("r").sql("SELECT shard FROM chunks").to_pylist()
                assert rows == [{"shard": 1}]
            assert not may_mount() or "ro" in root_mount(catalog.pid)
            assert catalog.stop() == 0
        assert shard.stop() == 0


def root_mount(pid: int) -> list[str]:
    """Options with which a process sees its root."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return next(re.split(r"[ ,]", line.split(" ", 5)[5]) for line in lines if line.split()[4] == "/")
