"""The deployment files: schemas, and rules that say no to a file that would not run well."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from arrow_tq_server.config import ENV_PREFIX, ServerConfig
from tests.deployment import (
    DEPLOY,
    KUSTOMIZE,
    Document,
    check_compose,
    check_kubernetes,
    container_file,
    documents,
    render,
)

OVERLAYS = ["base", "tls"]


def test_compose() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    check_compose(compose)


def test_the_image_installs_what_the_server_needs_and_copies_what_there_is() -> None:
    text = container_file()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (DEPLOY.parent / source).exists(), source
    for name in re.findall(r"(ARROW_TQ_\w+)=\S+", text):
        assert name.removeprefix(ENV_PREFIX).lower() in ServerConfig.model_fields
    assert "'.[server]'" in text and 'ENTRYPOINT ["arrow-tq", "serve"]' in text
    assert "USER 10001" in text and "STOPSIGNAL SIGTERM" in text


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes(overlay: str) -> None:
    rendered = render(KUSTOMIZE / overlay)
    check_kubernetes(rendered)
    for one in rendered:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs the kubectl command")
def test_rendering_is_what_kustomize_does(overlay: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUSTOMIZE / overlay)], capture_output=True, text=True, check=True
    )
    theirs = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}
    ours = {(one["kind"], one["metadata"]["name"]): one for one in render(KUSTOMIZE / overlay)}
    assert ours == theirs


def shard(rendered: list[Document]) -> Any:
    return one_of(rendered, "StatefulSet", "arrow-tq-shard")


def catalog(rendered: list[Document]) -> Any:
    return one_of(rendered, "StatefulSet", "arrow-tq-catalog")


def one_of(rendered: list[Document], kind: str, name: str) -> Any:
    return next(one for one in rendered if (one["kind"], one["metadata"]["name"]) == (kind, name))


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def box(workload: Any) -> Any:
    return pod(workload)["containers"][0]


def set_env(workload: Any, name: str, value: str) -> None:
    next(one for one in box(workload)["env"] if one["name"] == name)["value"] = value


MISTAKES: dict[str, Callable[[list[Document]], object]] = {
    "a key that Kubernetes does not know": lambda d: box(shard(d)).update(livenesProbe={}),
    "a value of the wrong type": lambda d: shard(d)["spec"].update(replicas="four"),
    "service links become settings": lambda d: pod(catalog(d)).pop("enableServiceLinks"),
    "two catalogs": lambda d: catalog(d)["spec"].update(replicas=2),
    "killed before the store is closed": lambda d: pod(shard(d)).update(terminationGracePeriodSeconds=30),
    "ready without having joined": lambda d: box(shard(d))["readinessProbe"]["httpGet"].update(path="/livez"),
    "a probe on the Flight port": lambda d: box(shard(d))["livenessProbe"]["httpGet"].update(port="flight"),
    "killed while busy": lambda d: box(shard(d))["livenessProbe"].update(failureThreshold=1),
    "memory that is not sized": lambda d: pod(shard(d))["volumes"][0]["emptyDir"].pop("sizeLimit"),
    "memory that is a disk": lambda d: pod(shard(d))["volumes"][0]["emptyDir"].pop("medium"),
    "more capacity than memory": lambda d: set_env(shard(d), "ARROW_TQ_CAPACITY_BYTES", str(64 << 30)),
    "a limit below the memory volume": lambda d: box(shard(d))["resources"].update(limits={"memory": "32Gi"}),
    "no limit": lambda d: box(catalog(d))["resources"].pop("limits"),
    "root": lambda d: pod(shard(d))["securityContext"].update(runAsUser=0),
    "a writable root": lambda d: box(shard(d))["securityContext"].pop("readOnlyRootFilesystem"),
    "no /tmp": lambda d: box(shard(d))["volumeMounts"].pop(2),
    "data that goes with the pod": lambda d: shard(d)["spec"].pop("volumeClaimTemplates"),
    "tokens that all may read": lambda d: pod(shard(d))["volumes"][-1]["secret"].update(defaultMode=0o444),
    "no tokens": lambda d: set_env(shard(d), "ARROW_TQ_TOKENS_FILE", "/nowhere/tokens.toml"),
    "another catalog": lambda d: set_env(shard(d), "ARROW_TQ_JOIN", "grpc://arrow-tq.other.svc:8815"),
    "a variable before it is defined": lambda d: box(shard(d))["env"].reverse(),
    "a setting that does not exist": lambda d: box(shard(d))["env"].append(
        {"name": "ARROW_TQ_X", "value": "1"}
    ),
    "a shard that cannot be called back": lambda d: one_of(d, "Service", "arrow-tq-shards")["spec"].pop(
        "publishNotReadyAddresses"
    ),
    "a selector that finds nothing": lambda d: d[0]["spec"].update(selector={"app": "else"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_manifest_is_found(mistake: str) -> None:
    rendered = render(KUSTOMIZE / "base")
    before = copy.deepcopy(rendered)
    MISTAKES[mistake](rendered)
    assert rendered != before
    with pytest.raises((AssertionError, jsonschema.ValidationError, ValueError, LookupError)):
        check_kubernetes(rendered)


def test_plain_probes_of_a_server_with_tls_are_found() -> None:
    rendered = render(KUSTOMIZE / "tls")
    box(shard(rendered))["readinessProbe"]["httpGet"].pop("scheme")
    with pytest.raises(AssertionError):
        check_kubernetes(rendered)


COMPOSE_MISTAKES: dict[str, Callable[[Any], object]] = {
    "a key that Compose does not know": lambda s: s["shard-1"].update(helthcheck={}),
    "a size that is none": lambda s: s["shard-1"].update(shm_size="much"),
    "more capacity than memory": lambda s: s["shard-1"].update(shm_size="4gb"),
    "killed before the store is closed": lambda s: s["shard-2"].update(stop_grace_period="10s"),
    "one directory for two shards": lambda s: s["shard-2"].update(volumes=["shard-1:/data"]),
    "no tokens": lambda s: s["catalog"].pop("secrets"),
}


@pytest.mark.parametrize("mistake", COMPOSE_MISTAKES)
def test_a_mistake_in_the_compose_file_is_found(mistake: str) -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    COMPOSE_MISTAKES[mistake](compose["services"])
    with pytest.raises((AssertionError, ValueError, LookupError)):
        check_compose(compose)
