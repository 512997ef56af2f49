"""Unsafe gateway configurations are refused at the start in one line that names the setting, and
shown by `fleet doctor`.
"""

import re
import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.config import FleetConfig
from fleet.config.safety import MIN_KEY_CHARS, is_loopback, refuse_unsafe
from fleet.config.settings import EnvironmentSettings, read_settings
from fleet.core.errors import ConfigError
from tests.support import run_cli, set_options
from tests.unit.test_deploy import documents

STRONG = "kJ3v_9Qd7xTz0aWmR2bE5c"
NETWORK_REDIS, PERMIT_REDIS = "redis://10.0.0.5:6379", "security.allow_redis_without_password=true"
MAKE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
NOT_LOOPBACK = (
    "0.0.0.0",
    "::",
    "192.168.1.7",
    "10.0.0.1",
    "8.8.8.8",
    "fleet.example",
    "localhost.example",
    "0",
)
LOOPBACK = (
    "127.0.0.1",
    "127.9.9.9",
    "::1",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "fleet.localhost",
)
PLACEHOLDERS = (
    "change-me",
    "changeme",
    "CHANGE_ME",
    "<change-me>",
    "...",
    "secret",
    "password",
    "example",
    "your-api-key",
    "<API key>",
    "change-me-before-use-0123456789",
    "x" * 40,
    "   ",
    "\t",
)


def config(host: str, **others: object) -> FleetConfig:
    security = {name: value for name, value in others.items() if name.startswith("allow_")}
    web = {name: value for name, value in others.items() if name not in security}
    # not validated: an address that the schema does not take today must not become one that slips
    # through
    config = FleetConfig.model_validate({"web": web, "security": security})
    return config.model_copy(update={"web": config.web.model_copy(update={"host": host})})


def settings(api_key: str | None) -> EnvironmentSettings:
    return EnvironmentSettings(redis_url=None, config_path=None, api_key=api_key, port=None)


@pytest.mark.parametrize("host", NOT_LOOPBACK)
def test_gateway_beyond_loopback_without_a_key_is_refused_unless_permitted(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_unsafe(config(host), settings(None))
    message = refused.value.message
    assert refused.value.param == "FLEET_API_KEY" and "\n" not in message
    assert (
        host in message
        and "FLEET_API_KEY" in message
        and "security.allow_no_key=true" in message
        and MAKE in message
    )
    refuse_unsafe(config(host, allow_no_key=True), settings(None))
    refuse_unsafe(config(host), settings(STRONG))


def test_file_of_keys_is_as_good_as_a_key() -> None:
    listed = config("0.0.0.0", keys_file="keys.json", allowed_origins=["*"])
    refuse_unsafe(listed, settings(None))
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        refuse_unsafe(listed, settings("weak"))


@pytest.mark.parametrize("host", LOOPBACK)
def test_gateway_on_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    refuse_unsafe(config(host), settings(None))
    refuse_unsafe(config(host), settings("short"))


@pytest.mark.parametrize("key", [*PLACEHOLDERS, STRONG[: MIN_KEY_CHARS - 1], "abab" * 10])
def test_weak_key_beyond_loopback_is_refused_with_the_remedy(key: str) -> None:
    with pytest.raises(ConfigError, match="FLEET_API_KEY") as refused:
        refuse_unsafe(config("0.0.0.0"), settings(key))
    assert MAKE in refused.value.message and "\n" not in refused.value.message
    assert key not in refused.value.message.replace(MAKE, "") or not key.strip(), (
        "the key is not shown"
    )


def test_short_key_is_accepted_where_no_key_is_permitted() -> None:
    refuse_unsafe(config("0.0.0.0", allow_no_key=True), settings("hunter2"))


def test_short_key_is_refused_behind_a_named_proxy() -> None:
    behind = config("127.0.0.1", allowed_hosts=["fleet.example.com"])
    with pytest.raises(ConfigError, match=r"web\.allowed_hosts names a proxy"):
        refuse_unsafe(behind, settings("0473"))
    refuse_unsafe(behind, settings(None))  # it answers to these names without a key, as before
    refuse_unsafe(behind, settings(STRONG))


def test_key_that_looks_like_a_client_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="FLEET_API_KEY: keys that begin with ek_"):
        refuse_unsafe(config("127.0.0.1"), settings("ek_" + STRONG))


def test_key_is_read_without_the_line_end_of_its_file() -> None:
    assert read_settings({"FLEET_API_KEY": STRONG + "\n"}).api_key == STRONG
    assert (read_settings({"FLEET_API_KEY": " \n"}).api_key or "").isspace(), (
        "a blank key is not taken for none"
    )


@pytest.mark.parametrize("key", ["change-me", "changeme", "...", "  "])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_placeholder_of_the_examples_is_refused_everywhere(host: str, key: str) -> None:
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        refuse_unsafe(config(host, allow_no_key=True), settings(key))


def test_keys_in_the_deployment_examples_are_refused() -> None:
    key = documents("Secret")["fleet-api-key"]["stringData"]["FLEET_API_KEY"]
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        refuse_unsafe(config("127.0.0.1"), settings(key))


def test_generated_keys_are_strong() -> None:
    for _ in range(200):
        for key in (
            secrets.token_urlsafe(32),
            secrets.token_hex(16),
            secrets.token_hex(32),
            f"sk-{secrets.token_urlsafe(12)}",
        ):
            refuse_unsafe(config("0.0.0.0"), settings(key))


def test_empty_key_counts_as_none() -> None:
    with pytest.raises(ConfigError, match="FLEET_API_KEY is not set"):
        refuse_unsafe(config("0.0.0.0"), read_settings({"FLEET_API_KEY": ""}))


def test_pages_of_any_origin_without_a_key_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="allowed_origins.*FLEET_API_KEY"):
        refuse_unsafe(config("127.0.0.1", allowed_origins=["*"]), settings(None))
    refuse_unsafe(config("127.0.0.1", allowed_origins=["*"]), settings(STRONG))


@pytest.mark.parametrize("command", ["web", "up", "web --keep"])
def test_command_refuses_an_unsafe_gateway_before_it_starts_anything(
    command: str, tmp_path: Path
) -> None:
    words = [*command.split(), *set_options("web.host=0.0.0.0", f"data_dir={tmp_path}/data")]
    for key in ("", "change-me"):
        done = run_cli(
            *words, cwd=tmp_path, env={"FLEET_API_KEY": key, "REDIS_URL": "redis://127.0.0.1:1"}
        )
        (line,) = done.stderr.splitlines()
        assert done.returncode == 1 and "FLEET_API_KEY" in line and not (tmp_path / "data").exists()


def doctor(
    *settings: str, key: str | None = None, redis_url: str | None = None
) -> tuple[int, dict[str, str]]:
    """Run `fleet doctor`; return its exit status, and the line of each check by subject."""
    env = {"FLEET_API_KEY": key, "FLEET_CONFIG": None, "FLEET_PORT": None, "REDIS_URL": redis_url}
    done = CliRunner().invoke(app, ["doctor", "--offline", *set_options(*settings)], env=env)
    lines = [line.split("  ") for line in done.output.splitlines()]
    found = {
        next(part for part in line[1:] if part).strip(): " ".join([line[0], line[-1].strip()])
        for line in lines
    }
    assert len(found) == len(lines), done.output
    return done.exit_code, found


def test_doctor_finds_the_defaults_safe(tmp_path: Path) -> None:
    status, lines = doctor(f"data_dir={tmp_path}")
    assert status == 0 and all(line.startswith("OK ") for line in lines.values())
    assert (
        "127.0.0.1:8000" in lines["gateway address"]
        and str(tmp_path) in lines["data folder"]
        and "fleet secret" in lines
    )
    assert "Unix socket" in lines["Redis"] and "this host only" in lines["transfers"]


@pytest.mark.parametrize(
    ("settings", "environment", "subject", "line"),
    [
        ("web.host=0.0.0.0", {}, "API key", r"REFUSED .*security\.allow_no_key=true"),
        (
            "web.host=0.0.0.0 security.allow_no_key=true",
            {},
            "API key",
            r"PERMITTED by security\.allow_no_key ",
        ),
        ("web.host=0.0.0.0 web.open_metrics=true", {"key": STRONG}, "API key", "OK "),
        (
            "web.host=0.0.0.0 web.open_metrics=true",
            {"key": STRONG},
            "metrics",
            r"PERMITTED by web\.open_metrics ",
        ),
        ("", {"redis_url": NETWORK_REDIS}, "Redis", "REFUSED .*allow_redis_without_password"),
        (
            PERMIT_REDIS,
            {"redis_url": NETWORK_REDIS},
            "Redis",
            r"PERMITTED by security\.allow_redis_without_password ",
        ),
        ("", {"redis_url": f"redis://:{STRONG}@10.0.0.5:6379"}, "Redis", "OK "),
        (
            "",
            {"redis_url": "rediss://fleet:change-me@10.0.0.5:6379"},
            "Redis",
            "REFUSED .*placeholder",
        ),
        ("transfer.interface=nowhere7", {}, "transfers", "REFUSED .*nowhere7"),
        ("transfer.kind=redis transfer.interface=nowhere7", {}, "transfers", "OK .*Redis"),
    ],
)
def test_doctor_prints_ok_refused_or_permitted(
    settings: str, environment: dict[str, str], subject: str, line: str, tmp_path: Path
) -> None:
    status, lines = doctor(f"data_dir={tmp_path}", *settings.split(), **environment)
    assert re.match(line, lines[subject]) and status == line.startswith("REFUSED")
    assert STRONG not in str(lines)


@pytest.mark.parametrize(
    ("settings", "installed", "status", "line"),
    [
        (
            "device=cuda",
            True,
            0,
            "OK keys and values on a GPU are read there by NIXL, where it can register its memory",
        ),
        (
            "device=cuda",
            False,
            0,
            "OK keys and values on a GPU are copied through host memory: no installed NIXL has "
            "UCX's "
            "transports for CUDA",
        ),
        (
            "transfer.buffer_device=cpu",
            True,
            0,
            "OK keys and values on a GPU are copied through host memory: "
            "transfer.buffer_device is cpu",
        ),
        (
            "transfer.buffer_device=cuda",
            False,
            1,
            "REFUSED transfer.buffer_device: no installed NIXL has UCX's transports for "
            "CUDA; install nixl with them, or set auto",
        ),
        ("device=cpu", True, 0, ""),
        ("transfer.kind=redis", True, 0, ""),
    ],
)
def test_doctor_shows_where_keys_and_values_are_read(
    settings: str,
    installed: bool,
    status: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fleet.cli.doctor.has_cuda_transports", lambda: installed)
    found, lines = doctor(f"data_dir={tmp_path}", "stages.talker.split={}", settings)
    assert (found, lines.get("hand-offs", "")) == (status, line)


def test_doctor_checks_secret_and_data_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    (tmp_path / "secret").chmod(0o600)
    status, lines = doctor(f"data_dir={tmp_path}", f"security.fleet_secret={tmp_path}/secret")
    assert status == 1 and lines["fleet secret"].startswith("REFUSED security.fleet_secret: ")
    tmp_path.chmod(0o777)
    status, lines = doctor(f"data_dir={tmp_path}")
    assert (
        status == 1
        and lines["data folder"].startswith("REFUSED ")
        and "chmod go-w" in lines["data folder"]
    )
