"""The deployment files say what the server understands, and agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from arrow_tq_server.config import ENV_PREFIX, ServerConfig, load

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kustomize" / "base"
FLAGS = {"--role": "role", "--join": "join", "--memory-dir": "memory_dir"}


def settings_of(arguments: list[str], environment: dict[str, str]) -> ServerConfig:
    """What the server would make of a container's arguments and environment."""
    flags: dict[str, object] = {"data_dir": "/data", "host": "0.0.0.0"}
    for name, value in environment.items():
        if name.startswith(ENV_PREFIX):
            flags[name.removeprefix(ENV_PREFIX).lower()] = value
    for option, value in zip(arguments[::2], arguments[1::2], strict=True):
        if option == "--set":
            name, _, value = value.partition("=")
            flags[name] = value
        else:
            flags[FLAGS[option]] = value
    return load(flags)


def documents(path: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def test_compose_is_a_catalog_and_shards_that_join_it() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    roles = {}
    for name, service in services.items():
        environment = {key: str(value) for key, value in service["environment"].items()}
        config = settings_of(service["command"], environment)
        roles[name] = config.role
        assert config.tokens_file is not None and config.cluster_token
        assert service["restart"] == "always"
        mounted = [one.split(":")[0] for one in service["volumes"]]
        assert name in mounted and name in compose["volumes"]
        if config.role == "shard":
            assert config.join == f"grpc://{services['catalog']['hostname']}:8815"
    assert sorted(roles.values()) == ["catalog", "shard", "shard"]
    assert (
        DEPLOY / services["catalog"]["build"]["context"] / services["catalog"]["build"]["dockerfile"]
    ).exists()


def test_the_image_installs_what_the_server_needs_and_copies_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    root = DEPLOY.parent
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (root / source).exists(), source
    environment = dict(pair.split("=") for pair in re.findall(r"ARROW_TQ_\w+=\S+", text))
    for name in environment:
        assert name.removeprefix(ENV_PREFIX).lower() in ServerConfig.model_fields
    assert "'.[server]'" in text and 'ENTRYPOINT ["arrow-tq", "serve"]' in text


def test_every_resource_of_the_base_is_there() -> None:
    (kustomization,) = documents(BASE / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(
        path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml"
    )


@pytest.mark.parametrize(("file", "role"), [("catalog.yaml", "catalog"), ("shards.yaml", "shard")])
def test_a_stateful_set_runs_a_server_that_starts(file: str, role: str) -> None:
    service, workload = documents(BASE / file)
    assert (service["kind"], workload["kind"]) == ("Service", "StatefulSet")
    spec = workload["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: str(one.get("value", "from elsewhere")) for one in container["env"]}
    config = settings_of(container["args"], environment)
    assert config.role == role and config.tokens_file is not None and config.cluster_token
    # The parts find each other.
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    assert spec["serviceName"] == service["metadata"]["name"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert {port["containerPort"] for port in container["ports"]} == {8815, 8816}
    volumes = {one["name"] for one in pod["volumes"]} | {
        one["metadata"]["name"] for one in spec["volumeClaimTemplates"]
    }
    assert {one["name"] for one in container["volumeMounts"]} <= volumes
    assert str(config.data_dir) in {one["mountPath"] for one in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] > config.drain_s + 30
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    if role == "catalog":
        assert spec["replicas"] == 1
        assert config.advertise_url == f"grpc://{service['metadata']['name']}:8815"
    else:
        (catalog, _) = documents(BASE / "catalog.yaml")
        assert config.join == f"grpc://{catalog['metadata']['name']}:8815"
        assert config.advertise_url == f"grpc://$(POD_NAME).{service['metadata']['name']}:8815"
        assert "POD_NAME" in environment
