"""A REDIS_URL on a network without a password is refused by every command that serves, in one line
that names the setting to permit it.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli.deployment import open_deployment, open_serving_deployment
from fleet.cli.main import app
from fleet.config.settings import check_redis_password
from fleet.control.connect import connect
from fleet.core.errors import ConfigError
from fleet.graphs import DEFAULT_GRAPH, GRAPHS

ROLE = GRAPHS[DEFAULT_GRAPH].stages[0].name
PERMIT = "security.allow_redis_without_password=true"
SERVING = ("up", "conductor", f"worker {ROLE}", "web", "jobs")
COMMANDS = (*SERVING, *(f"{command} --keep" for command in SERVING if command != "up"))
OPEN = (
    "redis://redis:6379",
    "rediss://redis.example.com",
    "redis://10.0.0.7:6379/1",
    "redis://user@redis:6379",
    "redis://:@redis",
    "redis+sentinel://127.0.0.1:26379,10.0.0.7/fleet",
    "redis://[fd00::1]:6379",
    "redis://0.0.0.0",
    "redis://localhost.example.com",
    "rediss://192.168.1.5?ssl_cert_reqs=none",
    "redis+cluster://localhost,10.0.0.7:6379",
)
GUARDED = (
    "redis://localhost:6379",
    "redis://LOCALHOST.",
    "redis://127.0.0.1",
    "redis://127.8.9.10:1",
    "rediss://[::1]:6379",
    "redis+sentinel://localhost,[::1]:26380/fleet/1",
    "rediss+sentinel://u:p@a:1,b/fleet",
    "rediss+cluster://u:p@a:1,b",
    "redis://[::ffff:127.0.0.1]",
    "unix:///run/redis.sock",
    "redis://:p@redis:6379",
    "rediss://user:p@redis",
    "redis://redis?password=p",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_serving_command_refuses_a_redis_on_a_network_without_password(command: str) -> None:
    done = CliRunner().invoke(
        app, command.split(), env={"REDIS_URL": "redis://redis.invalid:6379", "FLEET_API_KEY": None}
    )
    assert isinstance(done.exception, ConfigError), done.output
    message = done.exception.message
    assert message.startswith(
        "REDIS_URL: the Redis at redis.invalid is on a network and REDIS_URL has no password; "
    )
    assert PERMIT in message and "redis://:PASSWORD@HOST:PORT" in message and "\n" not in message


@pytest.mark.parametrize("url", OPEN)
def test_address_on_a_network_needs_a_password_unless_permitted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    with pytest.raises(ConfigError, match=PERMIT):
        open_serving_deployment(None, None)
    assert open_serving_deployment(None, [PERMIT]).redis_url == url
    assert open_deployment(None, None).redis_url == url, "a command that only looks"


@pytest.mark.parametrize("url", [*GUARDED, None])
def test_address_with_a_password_or_on_this_machine_is_accepted(url: str | None) -> None:
    check_redis_password(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:change-me@10.0.0.9",
        "rediss://fleet:Change%2DMe@redis:6379",
        "redis://redis?password=changeme",
    ],
)
def test_password_of_the_examples_is_refused_and_nothing_permits_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    with pytest.raises(ConfigError, match="REDIS_URL: the password is a placeholder"):
        open_serving_deployment(None, [PERMIT])
    assert open_deployment(None, None).redis_url == url, "a command that only looks"


@pytest.mark.parametrize("options", ["socket_timeout=abc", "nonsense=1"])
def test_unreadable_options_of_redis_url_are_refused_in_one_line(options: str) -> None:
    with pytest.raises(
        ConfigError, match=r"REDIS_URL: its options cannot be read \(.*\); correct what follows"
    ):
        connect(f"redis://127.0.0.1:1?{options}", patience_s=0)
