"""Isolation of a fleet on its machine: other users reach neither its Redis nor its files, and a
process has only the secrets that it uses.
"""

import os
import pwd
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.connect import pairs, text
from fleet.control.embedded import embedded_url, read_password
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.process.free_ports import free_port
from tests.e2e.fleets import FAKE, ProcessFleet, fleet_up, worker_ids
from tests.support import command_line, redis_answers, run_cli, set_options, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

ADDRESSES = ("session_address", "span_address")
ROLE = GRAPHS[DEFAULT_GRAPH].stages[0].name
SECRETS = {
    "FLEET_API_KEY": "key-of-the-api",
    "HF_TOKEN": "token-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "key-of-a-cloud",
    "DATABASE_URL": "postgres://user:word-of-a-database@db/x",
}
PASSED_ON = {
    "HF_HOME": "/tmp/no-hub",
    "UCX_TLS": "tcp",
    "CUDA_VISIBLE_DEVICES": "",
    "HTTPS_PROXY": "http://proxy:3128",
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory(prefix="fleet-private-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[ProcessFleet]:
    """A fleet of `fleet up` with default settings, in a data folder that an older version left open
    to other users.
    """
    redis_folder = folder / ".fleet" / "redis"
    redis_folder.mkdir(parents=True)
    (redis_folder / "server.lock").write_text("")
    os.chmod(redis_folder / "server.lock", 0o644)
    (folder / ".fleet" / "resolved.yaml").write_text("")
    for path in (folder / ".fleet", redis_folder):
        path.chmod(0o755)
    with fleet_up(folder, *FAKE, env=SECRETS | PASSED_ON) as fleet:
        yield fleet


@contextmanager
def another_user() -> Iterator[None]:
    """Run the block as user `nobody` if this process is root; otherwise as the same user, where
    tests check only file modes.
    """
    if os.geteuid() != 0:
        yield
        return
    user, groups = pwd.getpwnam("nobody"), os.getgroups()
    os.setgroups([])
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def test_fleet_listens_only_with_its_gateway_on_loopback(fleet: ProcessFleet) -> None:
    found = [
        one
        for process in fleet.family()
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert [f"http://{one.laddr.ip}:{one.laddr.port}" for one in found] == [fleet.url]


@pytest.mark.one_in(6, "private fleets")
def test_fleet_on_torch_listens_only_with_its_gateway(tmp_path: Path) -> None:
    """A fleet on torch listens only with its gateway. Workers that save conversations, and workers
    with a span of the layers, accept connections only on Unix sockets.
    """
    spans = "stages.thinker.spans={anchor: '0:0', workers: ['1:output']}"
    with fleet_up(tmp_path, "device=cpu", "web.port=0", spans) as fleet:
        found = [one for process in fleet.family() for one in process.net_connections("inet")]
        listening = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
        assert [f"http://{address.ip}:{address.port}" for address in listening] == [fleet.url]
        with redis.Redis.from_url(fleet.redis_url) as control:
            records = [
                pairs(control.hgetall(keys.worker(worker))) for worker in worker_ids(control)
            ]
        addresses = [
            text(record[name]) for record in records for name in ADDRESSES if name in record
        ]
        sockets = fleet.folder / ".fleet" / "sockets"
        assert len(addresses) == 3 and all(
            address.startswith(f"unix:{sockets}/") for address in addresses
        ), addresses
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in sockets.iterdir()} == {0o600}
        refused = run_cli(
            "session",
            "save",
            "unknown",
            "s.safetensors",
            "--stage",
            "thinker",
            cwd=tmp_path,
            env=fleet.env,
        )
        assert "caches a conversation" in refused.stderr
        doctor = run_cli("doctor", cwd=tmp_path, env=fleet.env)
        assert re.search(r"^OK +listeners +.*no network socket", doctor.stdout, re.M), doctor.stdout


def test_data_folder_is_closed_to_other_users(fleet: ProcessFleet, folder: Path) -> None:
    assert fleet.running.process.poll() is None
    found = [folder / ".fleet", *(folder / ".fleet").rglob("*")]
    assert {"redis", "redis.sock", "server.lock", "resolved.yaml", "appendonlydir"} <= {
        path.name for path in found
    }
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in found}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_redis_socket_refuses_another_user(fleet: ProcessFleet, folder: Path) -> None:
    """The Redis socket refuses another user, even if both folders above it are open."""
    data, path = folder / ".fleet", folder / ".fleet" / "redis" / "redis.sock"
    assert fleet.running.process.poll() is None and stat.S_IMODE(path.stat().st_mode) == 0o600
    with another_user(), socket.socket(socket.AF_UNIX) as client:
        refused = client.connect_ex(str(path))
    assert refused != 0 or os.geteuid() != 0, "by its folder"
    for opened in (data, path.parent):
        opened.chmod(0o755)
    with another_user(), socket.socket(socket.AF_UNIX) as client:
        refused = client.connect_ex(str(path))
    for opened in (data, path.parent):
        opened.chmod(0o700)
    assert refused != 0 or os.geteuid() != 0, "by its own mode"
    assert redis_answers(embedded_url(path.parent)), "its owner is admitted"


def test_processes_have_only_the_secrets_they_use(fleet: ProcessFleet) -> None:
    commands = fleet.commands()
    assert set(commands) >= {"redis", "conductor", "web", "jobs", f"worker {ROLE}"}
    environments = {name: process.environ() for name, process in commands.items()}
    held = {name: set(env) & set(SECRETS) for name, env in environments.items()}
    uses_the_key = {"web", "jobs"}
    assert held == {name: {"FLEET_API_KEY"} if name in uses_the_key else set() for name in commands}
    del environments["redis"]  # the server writes its title over them
    assert all(env.items() >= PASSED_ON.items() and env["PATH"] for env in environments.values())


@pytest.mark.one_in(6, "private fleets")
@pytest.mark.parametrize(
    ("command", "keepers"), [("conductor", 0), (f"worker {ROLE}", 0), (f"worker {ROLE}", 1)]
)
def test_command_started_by_hand_drops_the_secrets_it_does_not_use(
    redis_url: str, tmp_path: Path, command: str, keepers: int
) -> None:
    env = {"REDIS_URL": redis_url, **SECRETS, **PASSED_ON}
    arguments = [*command.split(), *(["--keep"] if keepers else []), *set_options(*FAKE)]
    with start_cli(*arguments, cwd=tmp_path, env=env) as running:
        running.wait_for("is ready|is up", timeout_s=60)
        started = psutil.Process(running.process.pid)
        processes = [started, *started.children()]
        assert len(processes) == 1 + keepers
        for process in processes:
            assert not set(process.environ()) & set(SECRETS)
            assert process.environ().items() >= (PASSED_ON | {"REDIS_URL": redis_url}).items()
        assert running.stop() == 0


def test_command_in_another_folder_names_the_searched_folder(
    fleet: ProcessFleet, tmp_path: Path
) -> None:
    assert fleet.running.process.poll() is None
    done = run_cli("status", "--once", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert f"looked for in {tmp_path}/.fleet/redis" in error
    assert all(
        remedy in error
        for remedy in ("the folder where it was started", "--set data_dir=DIR", "REDIS_URL")
    )


@pytest.mark.one_in(6, "private fleets")
def test_redis_with_a_port_requires_the_password_of_its_private_file(tmp_path: Path) -> None:
    port, data = free_port(), tmp_path / ".fleet" / "redis"
    options = ["--set", f"redis.port={port}"]

    def serve() -> str | None:
        with start_cli("redis", *options, cwd=tmp_path) as server:
            with redis.Redis(port=port) as stranger:
                wait_until(
                    lambda: is_refused(stranger), "a client without the password to be refused"
                )
            password = read_password(data)
            assert password and redis_answers(f"redis://:{password}@127.0.0.1:{port}")
            line = psutil.Process(server.process.pid).cmdline()
            assert f"127.0.0.1:{port}" in " ".join(line) and password not in " ".join(line)
            assert run_cli("status", "--once", cwd=tmp_path).returncode == 0, (
                "a command without --set finds server and password"
            )
            assert server.stop() == 0 and password not in server.output()
        assert stat.S_IMODE((data / "password").stat().st_mode) == 0o600
        return password

    assert serve() == serve(), "it is generated once"


def is_refused(client: redis.Redis) -> bool:
    """Return True once the server answers a command with NOAUTH."""
    try:
        client.ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False
    raise AssertionError("the server admitted a client without a password")


def test_redis_is_found_in_a_folder_with_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    """Redis is found in a folder whose path is too long for a Unix socket. The path contains every
    character that a URL must quote; the TCP port is tested as well.
    """
    deep = tmp_path / ("deep" * 20) / "a b%25@c#d?e"
    deep.mkdir(parents=True)
    options = ["--set", f"redis.port={free_port()}"]
    with start_cli("redis", *options, cwd=deep) as server:
        wait_until(
            lambda: (deep / ".fleet" / "redis" / "redis.sock").exists(), "the server to listen"
        )
        for _ in range(2):
            assert run_cli("status", "--once", cwd=deep).returncode == 0
        assert server.stop() == 0


@pytest.mark.one_in(6, "private fleets")
def test_fleet_with_a_port_stores_no_password(tmp_path: Path) -> None:
    with fleet_up(tmp_path, *FAKE, "redis.port=0") as fleet:
        password, port = read_password(tmp_path / ".fleet" / "redis"), fleet.config.redis.port
        assert password and redis_answers(f"redis://:{password}@127.0.0.1:{port}")
        assert not redis_answers(f"redis://127.0.0.1:{port}")
        lines, resolved = (
            [" ".join(command_line(process)) for process in fleet.family()],
            fleet.resolved.read_text(),
        )
        assert fleet.running.stop(timeout_s=30) == 0
    assert not [text for text in (resolved, fleet.running.output(), *lines) if password in text]
    assert sys.executable in " ".join(lines)
