"""The deployment files rendered as their tools would, and what they have to keep to.

``render`` knows the few keys of our kustomizations; where ``kubectl`` is installed a test compares it with
``kubectl kustomize``. Schemas are those of Kubernetes (``kubernetes-validate``) and of the Compose
specification (``compose-spec``).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import yaml

from arrow_tq.client.options import ClientOptions
from arrow_tq_server import http, process
from arrow_tq_server.config import ENV_PREFIX, ServerConfig, load

DEPLOY = Path(__file__).parents[1] / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
KUBERNETES = "1.29"
"""Oldest that the manifests are for."""
KEYS = {"env": "name", "containers": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""What merges the items of a list in a patch."""
UNITS = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "kb": 1 << 10,
    "mb": 1 << 20,
    "gb": 1 << 30,
    "g": 1 << 30,
}
Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def render(folder: Path) -> list[Document]:
    """A kustomization with its base, its patches and its labels."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "patches", "labels"}
    assert set(kustomization) <= known, "this renderer does not know all of it"
    found: list[Document] = []
    for name in kustomization["resources"]:
        at = folder / name
        found += render(at) if at.is_dir() else documents(at)
    for patch in kustomization.get("patches", []):
        for change in documents(folder / patch["path"]):
            index = next(i for i, one in enumerate(found) if _name(one) == _name(change))
            found[index] = _merged(found[index], change)
    for labels in kustomization.get("labels", []):
        assert labels["includeSelectors"] is False
        for one in found:
            one["metadata"].setdefault("labels", {}).update(labels["pairs"])
    return found


def size_bytes(text: object) -> int:
    """``32Gi``, ``8gb`` or a number."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", str(text)).groups()  # type: ignore[union-attr]
    return int(number) * (UNITS[unit] if unit else 1)


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text[:-1])


def config_of(environment: Mapping[str, str]) -> ServerConfig:
    """What the server would make of a container's environment, on top of the image's."""
    image = dict(pair.split("=", 1) for pair in re.findall(r"ARROW_TQ_\w+=\S+", container_file()))
    given = {**image, **environment}
    return load(
        {name.removeprefix(ENV_PREFIX).lower(): value for name, value in given.items() if "ARROW" in name}
    )


def container_file() -> str:
    return (DEPLOY / "Containerfile").read_text()


def environment_of(container: Document, pod: str, namespace: str) -> dict[str, str]:
    """As the kubelet sets it: ``$(NAME)`` stands for what is defined before."""
    fields = {"metadata.name": pod, "metadata.namespace": namespace}
    found: dict[str, str] = {}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            found[one["name"]] = "a-secret"
        else:
            found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), str(one["value"]))
    return found


def links_of(services: list[Document]) -> dict[str, str]:
    """Variables that Kubernetes gives a pod for each service with an address, unless it is told not to."""
    found = {}
    for one in services:
        if one["spec"].get("clusterIP") != "None":
            name = one["metadata"]["name"].upper().replace("-", "_")
            port = one["spec"]["ports"][0]["port"]
            found |= {f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_PORT": f"tcp://10.0.0.1:{port}"}
    return found


def check_kubernetes(rendered: list[Document]) -> None:
    """Raises ``AssertionError``, or the schema's error, for manifests that would not run well."""
    for one in rendered:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    by_kind: dict[str, dict[str, Document]] = {}
    for one in rendered:
        by_kind.setdefault(one["kind"], {})[one["metadata"]["name"]] = one
    services, sets = by_kind["Service"], by_kind["StatefulSet"]
    assert set(by_kind) == {"Service", "StatefulSet", "PodDisruptionBudget"}
    roles = [check_set(one, services) for one in sets.values()]
    assert sorted(one.role for one in roles) == ["catalog", "shard"]
    shard, catalog = sorted(roles, key=lambda one: one.role, reverse=True)
    assert shard.join == catalog.advertise_url
    assert (shard.tls_cert is None) == (catalog.tls_cert is None)
    # Only shards may be held back: with one catalog its node could never be drained.
    (budget,) = by_kind["PodDisruptionBudget"].values()
    assert budget["spec"]["selector"] == sets["arrow-tq-shard"]["spec"]["selector"]


def check_set(workload: Document, services: dict[str, Document]) -> ServerConfig:
    spec = workload["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    name, namespace = f"{workload['metadata']['name']}-0", "rl"
    environment = environment_of(container, name, namespace)
    if pod.get("enableServiceLinks", True):
        environment |= links_of(list(services.values()))
    config = config_of(environment)
    assert config.tokens_file is not None and config.cluster_token == "a-secret"
    check_services(spec, container, services, config, f"{namespace}.svc", name)
    check_probes(container, "HTTP" if config.tls_cert is None else "HTTPS")
    check_security(pod, container)
    check_files(spec, config)
    ends_s = config.drain_s + process.CLOSE_S + http.STOP_S
    assert pod["terminationGracePeriodSeconds"] > ends_s, "it would be killed before it closed its store"
    # Clients wait for a catalog that restarts; a shard has to be seen as away before its node is given up.
    assert config.drain_s + config.lease_s < ClientOptions().catalog_wait_s
    assert config.lease_s < pod["terminationGracePeriodSeconds"]
    if config.role == "catalog":
        assert spec["replicas"] == 1
    return config


def check_services(
    spec: Document,
    container: Document,
    services: dict[str, Document],
    config: ServerConfig,
    domain: str,
    pod: str,
) -> None:
    """Names that servers are told to others by belong to services of theirs."""
    own = services[spec["serviceName"]]["spec"]
    assert own["clusterIP"] == "None" and own["selector"] == spec["selector"]["matchLabels"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"flight": config.port, "http": config.http_port}
    scheme = "grpc" if config.tls_cert is None else "grpc+tls"
    if config.role == "catalog":
        (door,) = [
            one
            for one in services.values()
            if one["spec"]["selector"] == spec["selector"]["matchLabels"]
            and one["spec"].get("clusterIP") != "None"
        ]
        host = f"{door['metadata']['name']}.{domain}"
        assert {one["name"]: one["port"] for one in door["spec"]["ports"]} == ports
    else:
        host = f"{pod}.{spec['serviceName']}.{domain}"
        # It joins before it is ready, and the catalog calls it back.
        assert own["publishNotReadyAddresses"] is True
    assert config.advertise_url == f"{scheme}://{host}:{ports['flight']}"


def check_probes(container: Document, scheme: str) -> None:
    """Right pages on the right port, and patience with a process that is busy."""
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        asked = container[probe]["httpGet"]
        assert (asked["path"], asked["port"], asked.get("scheme", "HTTP")) == (path, "http", scheme)
        assert container[probe]["timeoutSeconds"] >= 2
    patience_s = {one: container[one]["periodSeconds"] * container[one]["failureThreshold"] for one in paths}
    assert patience_s["startupProbe"] >= 60 and patience_s["livenessProbe"] >= 30
    assert patience_s["readinessProbe"] <= 10


def check_security(pod: Document, container: Document) -> None:
    user = pod["securityContext"]
    assert user["runAsNonRoot"] and user["runAsUser"] == user["fsGroup"] == 10001
    assert f"--uid {user['runAsUser']} " in container_file()
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def check_files(spec: Document, config: ServerConfig) -> None:
    """Every path of the settings is on a volume that is right for it, and the sizes go together."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    claims = {one["metadata"]["name"]: one["spec"] for one in spec.get("volumeClaimTemplates", [])}
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {Path(one["mountPath"]): one for one in container["volumeMounts"]}
    assert {one["name"] for one in mounts.values()} == {*claims, *volumes}

    def volume(path: Path) -> str:
        at = next((one for one in (path, *path.parents) if one in mounts), None)
        assert at is not None, f"{path} is on no volume"
        return str(mounts[at]["name"])

    data = claims[volume(config.data_dir)]
    assert data["accessModes"] == ["ReadWriteOnce"] and spec["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    assert "emptyDir" in volumes[volume(Path("/tmp"))], "the root file system cannot be written"
    for file in (config.tokens_file, config.tls_cert, config.tls_key, config.cluster_ca):
        if file is not None:
            secret = volumes[volume(file)]["secret"]
            # Readable by the user's group, and by nobody else.
            assert secret["defaultMode"] == 0o440
            assert file.name in {
                "tls.crt",
                "tls.key",
                "ca.crt",
                *(i["path"] for i in secret.get("items", [])),
            }
    resources = container["resources"]
    limit = size_bytes(resources["limits"]["memory"])
    assert size_bytes(resources["requests"]["memory"]) == limit, "memory is not given back under pressure"
    assert resources["requests"]["cpu"]
    if config.role == "shard":
        assert config.memory_dir is not None and config.capacity_bytes is not None
        memory = volumes[volume(config.memory_dir)]["emptyDir"]
        assert memory["medium"] == "Memory"
        room = size_bytes(memory["sizeLimit"])
        assert config.capacity_bytes <= 0.9 * room, "extents are made ready ahead of what is counted"
        assert room + (2 << 30) <= limit, "what is in the volume counts as the pod's memory"
        assert size_bytes(data["resources"]["requests"]["storage"]) > config.capacity_bytes
    else:
        assert limit >= 4 * config.sql_memory_bytes


def check_compose(compose: Document) -> None:
    """Raises ``AssertionError``, or the schema's error, for a file that would not run well."""
    compose_spec.PyCompose.from_json(json.dumps(compose))
    roles = {}
    for name, service in compose["services"].items():
        config = config_of({key: str(value) for key, value in service["environment"].items()})
        roles[name] = config.role
        assert config.tokens_file == Path("/run/secrets/tokens") and service["secrets"] == ["tokens"]
        assert config.cluster_token
        assert service["restart"] == "always" and service["hostname"] == name
        assert service["volumes"] == [f"{name}:{config.data_dir}"] and name in compose["volumes"]
        assert seconds(service["stop_grace_period"]) > config.drain_s + process.CLOSE_S + http.STOP_S
        assert service["read_only"] and service["tmpfs"] and service["cap_drop"] == ["ALL"]
        assert f":{config.http_port}/readyz" in service["healthcheck"]["test"][-1]
        if config.role == "shard":
            assert config.join == f"grpc://catalog:{config.port}" and config.capacity_bytes is not None
            room = size_bytes(service["shm_size"])
            assert config.capacity_bytes <= 0.9 * room < room < size_bytes(service["mem_limit"])
    assert sorted(roles.values()) == ["catalog", "shard", "shard"]
    build = compose["services"]["catalog"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()


def _name(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _merged(base: Any, change: Any, key: str = "") -> Any:
    """A strategic merge: items of a patched list come first, the others after them."""
    if isinstance(change, dict) and isinstance(base, dict):
        names = [*base, *(one for one in change if one not in base)]
        return {one: _merged(base[one], change[one], one) if one in base and one in change
                else copy.deepcopy(change[one] if one in change else base[one]) for one in names}  # fmt: skip
    if isinstance(change, list) and key in KEYS:
        by = KEYS[key]
        old = {one[by]: one for one in base}
        new = [_merged(old[one[by]], one) if one[by] in old else one for one in change]
        return new + [one for one in base if one[by] not in {item[by] for item in change}]
    return copy.deepcopy(change)
