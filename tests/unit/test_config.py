"""Deployment files: the shipped files are complete and explained, and every mistake gives one line
that names the field and the fix.
"""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from fleet.cli.deployment import open_deployment
from fleet.config import FleetConfig, StageConfig, load_config
from fleet.config.settings import read_settings
from fleet.config.stage_schema import CACHE_KEYS
from fleet.core.errors import ConfigError
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.support import REPO

CONFIGS = REPO / "configs"
DEFAULT_FILE = CONFIGS / f"{DEFAULT_GRAPH}.yaml"
NOT_OF_A_CODEC = {*CACHE_KEYS, "vllm", "split", "spans", "speculation", "sampling"}
DEPLOYMENT_VARIABLES = ("REDIS_URL", "FLEET_CONFIG", "FLEET_API_KEY", "FLEET_PORT")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEPLOYMENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("graph", GRAPHS)
def test_graph_has_a_shipped_configuration(graph: str) -> None:
    assert load_config(CONFIGS / f"{graph}.yaml").graph == graph


def test_default_file_equals_the_defaults() -> None:
    """The default file equals the defaults. The file writes out stages and edges, so they are
    compared through the values that the runtime reads.
    """
    shown, built_in = load_config(DEFAULT_FILE), load_config(None)
    assert shown.model_copy(update={"stages": {}, "edges": {}}) == built_in
    graph = shown.graph_declaration()
    for stage in graph.stages:
        assert shown.stage(stage.name) == StageConfig()
    for edge in graph.edges:
        assert shown.policy_of(edge) == built_in.policy_of(edge)
        assert shown.credits_of(edge) == built_in.credits_of(edge)


def test_default_file_names_every_key() -> None:
    tree = yaml.safe_load(DEFAULT_FILE.read_text())
    assert set(FleetConfig.model_fields) <= set(tree)
    for section in ("limits", "web", "redis", "lease", "transfer"):
        model = FleetConfig.model_fields[section].annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        assert set(model.model_fields) == set(tree[section]), section
    for stage in GRAPHS[DEFAULT_GRAPH].stages:
        unused: set[str] = set() if stage.default_sampling else NOT_OF_A_CODEC
        named = set(tree["stages"][stage.name])
        assert set(StageConfig.model_fields) - unused == named, stage.name


def test_default_file_explains_every_key() -> None:
    """The default file explains every key where it first appears; a later stage may repeat the key
    without a comment.
    """
    explained: set[str] = set()
    for line in DEFAULT_FILE.read_text().splitlines():
        key, colon, rest = line.partition(":")
        name = key.strip()
        if (
            not colon
            or name.startswith("#")
            or name in {"thinker", "talker", "code2wav", "text", "codes"}
        ):
            continue
        assert "#" in rest or name in explained, f"{name} has no comment"
        explained.add(name)


def test_origins_are_normalised_as_browsers_send_them() -> None:
    given = [
        "https://App.Example.com",
        "http://localhost:3000",
        "http://[::1]:8080",
        "chrome-extension://abcdef",
        "*",
    ]
    config = FleetConfig.model_validate({"web": {"allowed_origins": given}})
    assert config.web.allowed_origins == tuple(origin.lower() for origin in given)


def test_trusted_proxies_are_addresses_or_networks() -> None:
    given = ("127.0.0.1", "10.0.0.0/8", "fd00::/8")
    assert (
        FleetConfig.model_validate({"web": {"trusted_proxies": given}}).web.trusted_proxies == given
    )
    for wrong in ("proxy.example", "10.0.0.1/8", "*", ""):
        with pytest.raises(
            ValidationError, match="such as 127.0.0.1 or 10.0.0.0/8|must not be empty"
        ):
            FleetConfig.model_validate({"web": {"trusted_proxies": [wrong]}})


def test_deployment_named_like_a_default_alias_is_accepted() -> None:
    assert load_config(None, ("web.model_name=tts-1",)).web.model_name == "tts-1"


def test_missing_file_and_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent.yaml: no such configuration file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_empty_mapping_means_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("{}")
    assert load_config(tmp_path / "bare.yaml") == load_config(None)


def test_overrides_change_only_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("web: {host: 0.0.0.0, port: 7000}\n")
    config = load_config(path, ("web.port=7001", "numerics=invariant"))
    assert (config.web.host, config.web.port, config.numerics) == ("0.0.0.0", 7001, "invariant")


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configuration_is_valid_and_survives_yaml_round_trip(
    file: Path, tmp_path: Path
) -> None:
    """A shipped configuration is valid, and is unchanged after it is written as YAML for processes,
    as `fleet up` does, and read again.
    """
    assert load_config(file).roles()
    config = load_config(file, ("web.model_name=m", "async_chunk=false"))
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config(path) == config


def test_override_precedes_environment_and_environment_precedes_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("web: {port: 7000}\n")
    assert open_deployment(path, None).config.web.port == 7000
    monkeypatch.setenv("FLEET_PORT", "7001")
    assert open_deployment(path, None).config.web.port == 7001
    chosen = open_deployment(path, ["web.port=7002"])
    assert (chosen.config.web.port, chosen.settings.port) == (7002, 7002)


def test_configuration_file_is_option_then_environment_then_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_deployment(None, None).settings.config_path is None
    (tmp_path / "configs").mkdir()
    for name in (DEFAULT_GRAPH, "text"):
        (tmp_path / "configs" / f"{name}.yaml").write_text(f"graph: {name}\nretention_s: 1\n")
    assert open_deployment(None, None).config.retention_s == 1
    assert open_deployment(None, ["graph=text"]).config.graph == "text"
    (tmp_path / "env.yaml").write_text("retention_s: 2\n")
    monkeypatch.setenv("FLEET_CONFIG", str(tmp_path / "env.yaml"))
    assert open_deployment(None, None).config.retention_s == 2
    (tmp_path / "option.yaml").write_text("retention_s: 3\n")
    assert open_deployment(tmp_path / "option.yaml", None).config.retention_s == 3


def test_redis_is_embedded_unless_redis_url_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for port in ([], ["redis.port=6500"]):
        assert open_deployment(None, port).redis_url == f"unix://{tmp_path}/.fleet/redis/redis.sock"
    monkeypatch.setenv("REDIS_URL", "redis://:secret@elsewhere:6379/0")
    deployment = open_deployment(None, None)
    assert deployment.redis_url == "redis://:secret@elsewhere:6379/0"
    assert not deployment.embedded_redis


def test_empty_variables_count_as_unset() -> None:
    assert read_settings(dict.fromkeys(DEPLOYMENT_VARIABLES, "")) == read_settings({})


def test_unknown_role_is_refused_with_known_roles() -> None:
    config = load_config(None)
    roles = ", ".join(stage.name for stage in config.graph_declaration().stages)
    with pytest.raises(ConfigError, match=f"this deployment has no role 'nobody'; it has {roles}"):
        config.role("nobody")
