"""The deployment examples name real commands, real roles and real keys, and forget no role."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.config import load_config
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import REPO

DEPLOY = REPO / "deploy"
ROLES = {stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages}
SINGLE = {"conductor", "web", "jobs"}


def kubernetes_commands() -> Iterator[list[str]]:
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        if document["kind"] in {"Deployment", "StatefulSet"}:
            spec = document["spec"]
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
            volumes = {volume["name"] for volume in spec["template"]["spec"].get("volumes", [])}
            volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
            for container in spec["template"]["spec"]["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes
                yield container["args"]


def compose_commands() -> Iterator[list[str]]:
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values():
        yield service["command"].split()


def procfile_commands() -> Iterator[list[str]]:
    for line in (REPO / "Procfile").read_text().splitlines():
        name, _, command = line.partition(": ")
        program, *words = command.split()
        assert program == "fleet" and name in {words[0], words[1]}
        yield words


@pytest.mark.parametrize("commands", [kubernetes_commands, compose_commands, procfile_commands])
def test_an_example_runs_redis_every_role_and_one_of_each_other_process(commands: Callable[[], Iterator[list[str]]]) -> None:
    given = list(commands())
    assert sum("redis" in words[0] for words in given) == 1
    ours = [words for words in given if "redis" not in words[0]]
    assert sorted(words[1] for words in ours if words[0] == "worker") == sorted(ROLES)
    assert {words[0] for words in ours} == {"worker", *SINGLE}


@pytest.mark.parametrize("commands", [kubernetes_commands, compose_commands, procfile_commands])
def test_an_example_uses_options_that_exist(commands: Callable[[], Iterator[list[str]]]) -> None:
    for words in commands():
        if words[0] == "redis-server":
            continue
        shown = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{words[0]} has no {option}"
        overrides = [value for option, value in zip(words, words[1:], strict=False) if option == "--set"]
        load_config(REPO / "configs" / f"{DEFAULT_GRAPH}.yaml", tuple(overrides))


def test_the_configuration_in_the_cluster_example_is_valid(tmp_path: Path) -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (config_map,) = [document for document in documents if document["kind"] == "ConfigMap"]
    path = tmp_path / "fleet.yaml"
    path.write_text(config_map["data"]["fleet.yaml"])
    assert load_config(path).graph == DEFAULT_GRAPH


def test_the_environment_in_the_examples_is_read_by_us() -> None:
    known = {"REDIS_URL", "FLEET_CONFIG", "FLEET_API_KEY", "FLEET_PORT"}
    for path in DEPLOY.iterdir():
        assert set(re.findall(r"\b(?:FLEET_[A-Z_]+|REDIS_URL)\b", path.read_text())) <= known, path.name
