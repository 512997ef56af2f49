"""The `fleet` command as users see it: help, one line per mistake, signals and exit statuses."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from typer.testing import CliRunner

from fleet.cli.checkpoint import write_tiny
from fleet.cli.main import app
from fleet.control.embedded import embedded_url
from fleet.control.server import ServerOptions, find_server, server_command
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.process.free_ports import free_port
from tests.support import (
    Running,
    call_cli,
    cli_env,
    redis_answers,
    run_cli,
    set_options,
    start_cli,
    wait_until,
)

NOWHERE = "redis://127.0.0.1:1"
COMMANDS = (
    ("up",),
    ("redis",),
    ("conductor",),
    ("worker",),
    ("web",),
    ("status",),
    ("config",),
    ("doctor",),
    ("jobs",),
    ("jobs", "submit"),
    ("jobs", "list"),
    ("checkpoint", "tiny"),
    ("spans", "plan"),
)
DURABLE = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "bind": "127.0.0.1",
    "save": "",
}


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def redis_options(folder: Path, port: int | None = None) -> list[str]:
    return [
        "--set",
        f"redis.data_dir={folder}",
        *([] if port is None else ["--set", f"redis.port={port}"]),
    ]


def ping(folder: Path) -> bool:
    return redis_answers(embedded_url(folder))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_help_has_an_example(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0, done.output
    assert "Example" in done.output


def test_usage_mistake_ends_with_status_2(tmp_path: Path) -> None:
    assert run_cli("nonsense", cwd=tmp_path).returncode == 2
    assert call_cli("worker", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("config --config absent.yaml", "absent.yaml: no such configuration file"),
        ("config --config broken.yaml", "broken.yaml: not valid YAML (line "),
        ("config --set web.prot=1", "web.prot: unknown key"),
        ("config --set graph=other", "unknown graph 'other'"),
        ("worker nobody", "role: this deployment has no role 'nobody'; it has "),
        ("redis --set redis.port=0", "redis.port: only `fleet up` chooses a free port"),
        ("checkpoint tiny .", "is not an empty folder"),
        ("checkpoint tiny new --graph other", "unknown graph 'other'"),
        ("up --set checkpoint=absent", "checkpoint: no folder "),
        ("up --set checkpoint=empty", "empty has no config.json"),
        ("up --set checkpoint=unweighted", "unweighted has no weights (*.safetensors)"),
    ],
)
def test_mistake_is_one_line_and_status_1(command: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("graph: [")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unweighted").mkdir()
    (tmp_path / "unweighted" / "config.json").write_text("{}")
    ports = {"FLEET_PORT": str(free_port())}
    free = redis_options(tmp_path / "r") if command.startswith("up") else []
    done = call_cli(*command.split(), *free, cwd=tmp_path, env=ports)
    assert done.returncode == 1
    assert done.stderr.startswith("fleet: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.one_in(2, "damaged checkpoints")
@pytest.mark.parametrize(("graph", "role"), [("text", "lm"), ("qwen3_omni", "thinker")])
def test_worker_with_damaged_checkpoint_ends_with_one_line(
    graph: str, role: str, redis_url: str, tmp_path: Path
) -> None:
    folder = write_tiny(graph, tmp_path / "damaged", 0)
    for shard in folder.glob("*.safetensors"):
        os.truncate(shard, shard.stat().st_size - 100)
    chosen = ("--set", f"graph={graph}", "--set", f"checkpoint={folder}")
    done = run_cli("worker", role, *chosen, cwd=tmp_path, env={"REDIS_URL": redis_url})
    assert done.returncode == 1
    assert re.search(f"{folder}: model.*safetensors cannot be read", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (
            "lm --replica 2",
            ("stages.lm.device=[cuda:70, cuda:71]",),
            r"device: 'cuda:71' does not exist here",
        ),
        (
            "lm.decode",
            ("device=cpu", "stages.lm.split={}", "transfer.request_cap_mib=1"),
            r"transfer.request_cap_mib: 1 MiB holds the keys and values of a prompt of \d+ "
            r"tokens in lm, and "
            r"limits.max_prompt_tokens is 8192; set at least \d+ or null, or "
            r"limits.max_prompt_tokens to at most \d+",
        ),
    ],
    ids=["the GPU of its number", "no room for a hand-off"],
)
def test_worker_that_cannot_serve_its_settings_ends_with_one_line(
    words: str, settings: tuple[str, ...], message: str, redis_url: str, tmp_path: Path
) -> None:
    checkpoint = write_tiny("text", tmp_path / "tiny", 0)
    options = set_options("graph=text", f"checkpoint={checkpoint}", "worker_nice=0", *settings)
    done = run_cli("worker", *words.split(), *options, cwd=tmp_path, env={"REDIS_URL": redis_url})
    assert done.returncode == 1
    assert re.fullmatch(f"fleet: {message}.*", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "jobs list"])
def test_unreachable_redis_is_one_line(command: str, tmp_path: Path) -> None:
    done = call_cli(*command.split(), cwd=tmp_path, env={"REDIS_URL": NOWHERE})
    assert done.returncode == 1
    assert f"no Redis answers at {NOWHERE}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.fixture
def guarded_port(tmp_path: Path) -> Iterator[int]:
    """Port of a Redis server whose password is "right"."""
    port = free_port()
    command = [
        *server_command(find_server(), ServerOptions(data_dir=tmp_path, port=port)),
        "--requirepass",
        "right",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        wait_until(lambda: redis_answers(f"redis://:right@127.0.0.1:{port}"), "Redis to answer")
        yield port
        server.terminate()


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (":wrong@", "refuses the password in REDIS_URL"),
        ("", "asks for a password and REDIS_URL has none"),
    ],
)
def test_wrong_redis_password_is_reported_without_waiting(
    user: str, message: str, guarded_port: int, tmp_path: Path
) -> None:
    """A wrong Redis password is reported without waiting: `worker` waits ten seconds for a Redis
    that does not answer, but not for one that refuses the password.
    """
    for command in (["status"], ["worker", GRAPHS[DEFAULT_GRAPH].stages[0].name]):
        done = call_cli(
            *command, cwd=tmp_path, env={"REDIS_URL": f"redis://{user}127.0.0.1:{guarded_port}"}
        )
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert message in done.stderr and "redis://:PASSWORD@HOST:PORT" in done.stderr
        assert "no Redis answers" not in done.stderr and "wrong" not in done.stderr


def test_unneeded_redis_password_is_reported(redis_url: str, tmp_path: Path) -> None:
    done = call_cli(
        "status", cwd=tmp_path, env={"REDIS_URL": redis_url.replace("//", "//:needless@")}
    )
    assert done.returncode == 1
    assert (
        "has no password set and REDIS_URL gives one" in done.stderr
        and "needless" not in done.stderr
    )


def test_config_output_is_a_valid_equal_configuration(tmp_path: Path) -> None:
    first = call_cli("config", "--set", "web.port=8123", cwd=tmp_path)
    (tmp_path / "resolved.yaml").write_text(first.stdout)
    second = call_cli("config", "--config", "resolved.yaml", cwd=tmp_path)
    assert second.stdout.splitlines()[1:] == first.stdout.splitlines()[1:]
    assert "  port: 8123" in first.stdout


def test_redis_data_survives_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start_cli("redis", *redis_options(Path("data")), cwd=tmp_path) as server:
        server.wait_for(f"unix://{data}/redis.sock, data in {data}")
        wait_until(lambda: ping(data), "Redis to answer")
        with redis.Redis.from_url(embedded_url(data), decode_responses=True) as client:
            settings = {name: client.config_get(name)[name] for name in DURABLE}
            client.set("kept", "yes")
        assert server.stop() == 0
    assert settings == DURABLE
    with start_cli("redis", *redis_options(Path("data")), cwd=tmp_path):
        wait_until(lambda: ping(data), "Redis to answer again")
        with redis.Redis.from_url(embedded_url(data), decode_responses=True) as client:
            assert client.get("kept") == "yes"


def test_redis_returns_the_memory_of_large_values(tmp_path: Path) -> None:
    """Redis returns the memory of large values to the system after they are deleted, although small
    values allocated between them stay.
    """
    data, num_values, large, small = tmp_path / "data", 200, 300_000, 5000
    with start_cli("redis", *redis_options(Path("data")), cwd=tmp_path) as server:
        wait_until(lambda: ping(data), "Redis to answer")
        process = psutil.Process(server.process.pid)
        with redis.Redis.from_url(embedded_url(data)) as client:
            client.set("largest", bytes(100 * large))
            client.delete("largest")
            before = process.memory_info().rss
            for number in range(num_values):
                client.set(f"large {number}", bytes(large))
                client.set(f"small {number}", bytes(small))
            client.delete(*(f"large {number}" for number in range(num_values)))
            unused = num_values * large // 4
            wait_until(
                lambda: process.memory_info().rss < before + num_values * small + unused,
                "the memory to be returned",
            )


def test_redis_reads_append_only_file_of_older_server(tmp_path: Path) -> None:
    """Redis reads the append-only file of an older server: Redis before 7 keeps one file, newer
    servers and Valkey keep a folder.
    """
    data = tmp_path / "data"
    data.mkdir()
    file = data / "appendonly.aof"
    file.write_bytes(
        b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*3\r\n$3\r\nSET\r\n$4\r\nkept\r\n$3\r\nyes\r\n"
    )
    with start_cli("redis", *redis_options(data), cwd=tmp_path):
        wait_until(lambda: ping(data), "Redis to answer")
        with redis.Redis.from_url(embedded_url(data), decode_responses=True) as client:
            assert client.get("kept") == "yes"


def test_second_redis_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start_cli("redis", *redis_options(data), cwd=tmp_path) as server:
        wait_until(lambda: ping(data), "Redis to answer")
        second = call_cli("redis", *redis_options(data, free_port()), cwd=tmp_path)
        assert second.returncode == 1
        assert (
            f"{tmp_path / 'data'} is already served by process {server.process.pid}"
            in second.stderr
        )
        assert ping(data), "the first server is not affected"


def test_port_in_use_is_reported(tmp_path: Path, used_port: int) -> None:
    data = redis_options(tmp_path / "data", used_port)
    for done in (run_cli("redis", *data, cwd=tmp_path), call_cli("up", *data, cwd=tmp_path)):
        assert done.returncode == 1
        assert f"redis.port: 127.0.0.1:{used_port} cannot be listened on" in done.stderr
    done = call_cli(
        "up", *redis_options(tmp_path / "data"), "--set", f"web.port={used_port}", cwd=tmp_path
    )
    assert done.returncode == 1
    assert f"web.port: 127.0.0.1:{used_port} cannot be listened on" in done.stderr


def test_redis_command_idles_if_redis_url_is_set(tmp_path: Path) -> None:
    with start_cli(
        "redis", cwd=tmp_path, env={"REDIS_URL": "redis://:secret@elsewhere:6379"}
    ) as idle:
        idle.wait_for("REDIS_URL names a server; there is nothing to run here")
        assert "secret" not in idle.output()
        assert idle.stop() == 0
    assert not (tmp_path / ".fleet").exists()


def test_kept_redis_is_restarted_after_a_kill_and_stops_with_its_keeper(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start_cli("redis", "--keep", *redis_options(data), cwd=tmp_path) as kept:
        wait_until(lambda: ping(data), "Redis to answer")
        killed = only_child(kept)
        killed.kill()
        kept.wait_for("redis was killed by SIGKILL; restarting it")
        wait_until(lambda: ping(data), "Redis to answer again")
        second = only_child(kept)
        assert second.pid != killed.pid
        assert kept.stop() == 0
    wait_until(lambda: not second.is_running(), "the server to be gone")


def test_kept_command_ends_with_a_killed_keeper(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with start_cli("redis", "--keep", *redis_options(data), cwd=tmp_path) as kept:
        wait_until(lambda: ping(data), "Redis to answer")
        server = only_child(kept)
        kept.stop(signal.SIGKILL)
        wait_until(lambda: not server.is_running(), "the server to be gone")


def test_kept_command_that_cannot_start_is_not_restarted(tmp_path: Path, used_port: int) -> None:
    done = run_cli("redis", "--keep", *redis_options(tmp_path / "data", used_port), cwd=tmp_path)
    assert done.returncode == 1
    assert "redis ended with status 1 and is not restarted" in done.stderr


def only_child(running: Running) -> psutil.Process:
    (child,) = psutil.Process(running.process.pid).children()
    return child


def test_status_of_empty_fleet_lists_missing_roles(redis_url: str, tmp_path: Path) -> None:
    env = {"REDIS_URL": redis_url}
    shown = json.loads(call_cli("status", "--json", cwd=tmp_path, env=env).stdout)
    roles = [stage.name for stage in GRAPHS[DEFAULT_GRAPH].stages]
    counts = (
        "queue_depth",
        "lag",
        "workers",
        "draining",
        "standby",
        "starting",
        "running",
        "capacity",
    )
    unknown = {"oldest_s": 0.0, "loaded_percent": None, "gap": "", "admits": False}
    planned = {"wanted": 1, "placed": 0, "managed": False}
    idle = {**dict.fromkeys(counts, 0), **unknown, **planned}
    assert shown.pop("roles") == [{"role": role, **idle} for role in roles]
    empty = {"workers": [], "refused": {}, "routes": [], "unused_span_workers": []}
    assert shown == {**empty, "missing_roles": roles, "live_requests": 0}
    table = call_cli("status", "--once", cwd=tmp_path, env=env).stdout
    assert "0 live requests; missing: " + ", ".join(roles) in table
    assert all(heading in table for heading in ("queued", "oldest", "lag", "workers", "running"))
    assert table.count("0/0") == len(roles), table


def test_status_on_a_terminal_refreshes_until_interrupted(redis_url: str, tmp_path: Path) -> None:
    reader, terminal = os.openpty()
    env = cli_env({"REDIS_URL": redis_url, "TERM": "xterm"})
    # The tests may be a shell's background job, which ignores Ctrl-C, as would the processes that
    # it starts.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "fleet.cli", "status"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=terminal, stderr=terminal)
    seen = bytearray()

    def shown_twice() -> bool:
        seen.extend(os.read(reader, 4096))
        return seen.count(b"live requests") >= 2

    wait_until(shown_twice, "the table to be drawn again", timeout_s=20)
    process.send_signal(signal.SIGINT)
    os.set_blocking(reader, False)

    def has_ended() -> bool:
        # Keep reading: the process blocks once the terminal's buffer is full.
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(reader, 65_536))
        return process.poll() is not None

    wait_until(has_ended, "the command to end", timeout_s=20)
    assert process.returncode == 0
    os.close(terminal)
    os.close(reader)
    assert b"Traceback" not in seen


def test_worker_without_redis_ends_in_bounded_time(tmp_path: Path) -> None:
    role = GRAPHS[DEFAULT_GRAPH].stages[0].name
    done = run_cli("worker", role, cwd=tmp_path, env={"REDIS_URL": NOWHERE}, timeout_s=30)
    assert done.returncode == 1
    assert "waiting for redis" in done.stderr
    assert f"no Redis answers at {NOWHERE}" in done.stderr.splitlines()[-1]
