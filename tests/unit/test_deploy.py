"""The deployment examples use real commands, roles and keys, omit no role, and give each process
only what it needs.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.config import load_config
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import REPO

DEPLOY = REPO / "deploy"
ROLES = {stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages}
SINGLE = {"conductor", "web", "jobs"}
WITH_API_KEY = {"web", "jobs"}
Yaml = Mapping[str, Any]


def documents(kind: str) -> dict[str, Yaml]:
    """Return the YAML documents of one kind in the cluster example, by name."""
    every = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {
        document["metadata"]["name"]: document for document in every if document["kind"] == kind
    }


def pods() -> dict[str, Yaml]:
    """Return the pod templates of the cluster example, by deployment name."""
    return {
        name: document["spec"]["template"]
        for name, document in (documents("Deployment") | documents("StatefulSet")).items()
    }


def services() -> dict[str, Yaml]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def kubernetes_commands() -> Iterator[list[str]]:
    for document in (documents("Deployment") | documents("StatefulSet")).values():
        spec = document["spec"]
        assert (
            spec["selector"]["matchLabels"].items()
            <= spec["template"]["metadata"]["labels"].items()
        )
        volumes = {volume["name"] for volume in spec["template"]["spec"].get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for container in spec["template"]["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            yield container["args"]


def compose_commands() -> Iterator[list[str]]:
    for service in services().values():
        yield service["command"].split()


def procfile_commands() -> Iterator[list[str]]:
    for line in (REPO / "Procfile").read_text().splitlines():
        name, _, command = line.partition(": ")
        program, *words = command.split()
        assert program == "fleet" and name in {words[0], words[1]}
        yield words


@pytest.mark.parametrize("commands", [kubernetes_commands, compose_commands, procfile_commands])
def test_deployment_example_runs_every_process(commands: Callable[[], Iterator[list[str]]]) -> None:
    given = list(commands())
    assert sum("redis" in words[0] for words in given) == 1
    ours = [words for words in given if "redis" not in words[0]]
    assert sorted(words[1] for words in ours if words[0] == "worker") == sorted(ROLES)
    assert {words[0] for words in ours} == {"worker", *SINGLE}


@pytest.mark.parametrize("commands", [kubernetes_commands, compose_commands, procfile_commands])
def test_deployment_example_uses_existing_options(
    commands: Callable[[], Iterator[list[str]]],
) -> None:
    for words in commands():
        if words[0] == "redis-server":
            continue
        shown = (
            CliRunner()
            .invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
            .output
        )
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{words[0]} has no {option}"
        overrides = [
            value for option, value in zip(words, words[1:], strict=False) if option == "--set"
        ]
        load_config(REPO / "configs" / f"{DEFAULT_GRAPH}.yaml", tuple(overrides))


def test_cluster_example_configuration_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(documents("ConfigMap")["fleet"]["data"]["fleet.yaml"])
    config = load_config(path)
    assert config.graph == DEFAULT_GRAPH and config.transfer.interface == "eth0"


def test_deployment_example_variables_are_read() -> None:
    known = {"REDIS_URL", "FLEET_CONFIG", "FLEET_API_KEY", "FLEET_PORT"}
    for path in filter(Path.is_file, DEPLOY.rglob("*")):
        assert set(re.findall(r"\b(?:FLEET_[A-Z_]+|REDIS_URL)\b", path.read_text())) <= known, (
            path.name
        )


def test_cluster_example_refuses_privileged_pods_and_needs_none() -> None:
    assert (
        documents("Namespace")["fleet"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    for name, pod in pods().items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert (
            spec["securityContext"]["runAsNonRoot"] is True
            and spec["securityContext"]["runAsUser"] > 0
        ), name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {
                "drop": ["ALL"]
            }, name
            assert context["readOnlyRootFilesystem"] is True and "privileged" not in context, name
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]) and "memory" in resources[
                "limits"
            ], name


def test_cluster_example_gives_the_api_key_to_gateways_and_job_workers_only() -> None:
    for name, pod in pods().items():
        spec = pod["spec"]
        given = {
            source["secretRef"]["name"]
            for container in spec["containers"]
            for source in container.get("envFrom", [])
        }
        mounted = {
            volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume
        }
        if name == "redis":
            assert given == set() and mounted == {"redis-tls", "fleet-redis-users"}
            continue
        assert given == {"fleet-redis"} | ({"fleet-api-key"} if name in WITH_API_KEY else set()), (
            name
        )
        assert mounted == {"redis-tls"}, name
        (certificates,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert [item["key"] for item in certificates["items"]] == ["ca.crt"], (
            f"{name} needs no private key"
        )
    values = [
        value for secret in documents("Secret").values() for value in secret["stringData"].values()
    ]
    assert all("change-me" in value for value in values)


def test_cluster_example_admits_only_the_connections_that_a_fleet_needs() -> None:
    policies = {name: policy["spec"] for name, policy in documents("NetworkPolicy").items()}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

    def admitted(labels: Mapping[str, str], way: str) -> list[Yaml]:
        """Return the network rules that apply to a pod with these labels."""
        chosen = [
            spec
            for spec in policies.values()
            if spec["podSelector"].get("matchLabels", {}).items() <= labels.items()
        ]
        return [rule for spec in chosen for rule in spec.get(way, [])]

    for name, pod in pods().items():
        labels = pod["metadata"]["labels"]
        worker, fleet = {"component": "worker"}, {"part-of": "fleet"}
        assert (worker.items() <= labels.items()) == (name in ROLES) and (
            fleet.items() <= labels.items()
        ) == (name != "redis")
        ingress = {"redis": [fleet], "web": [None]} | {role: [worker] for role in ROLES}
        sources = [rule.get("from") for rule in admitted(labels, "ingress")]
        assert [
            found and found[0]["podSelector"]["matchLabels"] for found in sources
        ] == ingress.get(name, []), name
        egress = [destination for rule in admitted(labels, "egress") for destination in rule["to"]]
        inside = [
            to["podSelector"]["matchLabels"] for to in egress if "namespaceSelector" not in to
        ]
        also = [worker] if name in ROLES else [{"app": "web"}] if name == "jobs" else []
        assert inside == ([] if name == "redis" else [{"app": "redis"}, *also]), name


def test_cluster_redis_speaks_tls_only_and_has_no_open_user() -> None:
    (redis,) = pods()["redis"]["spec"]["containers"]
    given = dict(zip(redis["args"][1::2], redis["args"][2::2], strict=True))
    assert (
        given["--port"] == "0"
        and given["--tls-port"] == "6379"
        and given["--aclfile"] == "/etc/redis/users.acl"
    )
    assert documents("Secret")["fleet-redis"]["stringData"]["REDIS_URL"].startswith(
        "rediss://fleet:change-me@redis:6379?ssl_ca_certs="
    )
    users = documents("Secret")["fleet-redis-users"]["stringData"]["users.acl"].splitlines()
    assert users[0] == "user default off" and len(users) == 2


def test_container_example_gives_no_container_more_than_it_needs() -> None:
    for name, service in services().items():
        # Compose writes inline configs into the container, and cannot where it is read-only
        assert service["read_only"] is ("configs" not in service), name
        assert service["cap_drop"] == ["ALL"] and service["mem_limit"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service), name
        assert ("ports" in service) == (name == "web"), name
        assert ("FLEET_API_KEY" in service.get("environment", {})) == (name in WITH_API_KEY), name
        wanted = {"control"} | (
            {"tensors"} if name in ROLES else {"public"} if name == "web" else set()
        )
        assert set(service["networks"]) == wanted, name
    assert all(port.startswith("127.0.0.1:") for port in services()["web"]["ports"])


def test_container_example_keeps_redis_and_tensors_inside_and_requires_secrets() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["networks"]["control"]["internal"] and compose["networks"]["tensors"]["internal"]
    (subnet,) = compose["networks"]["tensors"]["ipam"]["config"]
    for role in ROLES:
        assert (
            f"transfer.interface={subnet['subnet']}" in compose["services"][role]["command"].split()
        )
    secrets = re.findall(r"\$\{([A-Z_]+)(:\?)?", (DEPLOY / "compose.yaml").read_text())
    assert {name for name, _ in secrets} == {"REDIS_PASSWORD", "FLEET_API_KEY"} and all(
        required for _, required in secrets
    )
    users = compose["configs"]["redis-users"]["content"]
    cluster = documents("Secret")["fleet-redis-users"]["stringData"]["users.acl"]
    assert re.sub(r">\$\{.*?\}", ">change-me", users) == cluster, (
        "one set of permissions for both examples"
    )


def test_systemd_unit_is_confined_and_permits_needed_access() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(DEPLOY / "fleet.service")
    service = unit["Service"]
    on = (
        "NoNewPrivileges",
        "PrivateTmp",
        "ProtectHome",
        "ProtectControlGroups",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "RestrictNamespaces",
        "RestrictSUIDSGID",
        "LockPersonality",
    )
    assert {key for key in on if service.get(key) != "yes"} == set()
    assert (
        service["ProtectSystem"] == "strict"
        and service["UMask"] == "0077"
        and service["StateDirectoryMode"] == "0700"
    )
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == ""
    assert set(service["RestrictAddressFamilies"].split()) == {
        "AF_UNIX",
        "AF_INET",
        "AF_INET6",
        "AF_NETLINK",
    }
    assert service["SystemCallArchitectures"] == "native"
    breaking = {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateNetwork", "ProcSubset"}
    assert not breaking & set(service), (
        "compilers, GPUs, or reading the machine's memory would fail"
    )


def locked() -> dict[str, list[tuple[Requirement, int]]]:
    """Return the packages of the lock file, each with its number of hashes."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    text = re.sub(r"^\s*#.*\n?", "", (DEPLOY / "requirements.lock").read_text(), flags=re.MULTILINE)
    for entry in text.replace("\\\n", " ").splitlines():
        line, *hashes = re.split(r"\s+--hash=", entry)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", one) for one in hashes), entry
        requirement = Requirement(line)
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return found


def version_of(requirement: Requirement) -> Version:
    (pin,) = requirement.specifier
    assert pin.operator == "==" and requirement.url is None, (
        f"{requirement} is not one exact version"
    )
    return Version(pin.version)


def test_lock_file_satisfies_the_ranges_and_has_hashes_for_each_package() -> None:
    packages = locked()
    for entries in packages.values():
        for requirement, hashes in entries:
            assert hashes and version_of(requirement), f"{requirement} has no hash"
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    for platform in ("x86_64", "aarch64"):
        image = {
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": platform,
            "python_version": "3.11",
            "python_full_version": "3.11.9",
            "implementation_name": "cpython",
            "extra": "",
        }
        for wanted in map(
            Requirement, (*project["project"]["dependencies"], *project["build-system"]["requires"])
        ):
            if wanted.marker is not None and not wanted.marker.evaluate(image):
                continue
            entries = packages.get(canonicalize_name(wanted.name), [])
            chosen = [
                entry
                for entry, _ in entries
                if entry.marker is None or entry.marker.evaluate(image)
            ]
            assert len(chosen) == 1, (
                f"{wanted} is not in deploy/requirements.lock; deploy/README.md says how to "
                "refresh it"
            )
            assert wanted.specifier.contains(version_of(chosen[0])), (
                f"{chosen[0]} in the lock file is not within {wanted}"
            )


def test_image_installs_only_locked_packages_and_runs_as_an_unprivileged_user() -> None:
    lines = [
        line
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if not line.startswith("#")
    ]
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2 and all("--no-deps" in line for line in installs)
    assert (
        "--require-hashes -r requirements.lock" in installs[0]
        and "--no-build-isolation" in installs[1]
    )
    assert re.search(r"-m 0700 -o fleet -g fleet /data\b", "\n".join(lines))
    assert lines.index("USER 1000:1000") < lines.index('ENTRYPOINT ["fleet"]')
