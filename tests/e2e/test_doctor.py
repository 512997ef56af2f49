"""`fleet doctor` with running workers, and the part of its checks that `fleet up` runs before it
starts anything.
"""

import re
import signal
import socket
from pathlib import Path

import pytest
import redis

from fleet.control import keys, server_checks
from fleet.core.ids import WorkerId
from fleet.transfer import probe
from fleet.transfer.probe import SELF, ProbeOrder, run_probe
from tests.support import RedisProcess, call_cli, set_options, start_cli

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("engine=fake", "device=cpu", "web.port=0")


@pytest.mark.parametrize("interface", ["null", "127.0.0.0/8"])
def test_doctor_reads_the_memory_of_listed_workers(
    interface: str, redis_url: str, tmp_path: Path
) -> None:
    settings = set_options(
        *SETTINGS, "transfer.kind=nixl", f"transfer.interface={interface}", "lease.worker_ttl_s=600"
    )
    env = {"REDIS_URL": redis_url}
    with start_cli("worker", "thinker", *settings, cwd=tmp_path, env=env) as worker:
        worker.wait_for("is ready")
        read = call_cli("doctor", *settings, cwd=tmp_path, env=env)
        assert read.returncode == 0 and re.search(
            r"^OK +workers +this host reads the tensors of 1 listed worker", read.stdout, re.M
        )
        assert re.search(
            r"^OK +NIXL +an agent of this host reads from another one in [\d.]+ ms",
            read.stdout,
            re.M,
        )
        listeners = (
            "no network socket"
            if interface == "null"
            else rf"thinker \(process {worker.process.pid}\): 127\.\S+:\d+"
        )
        assert re.search(rf"^OK +listeners +.*{listeners}", read.stdout, re.M), read.stdout
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
    lost = call_cli("doctor", *settings, cwd=tmp_path, env=env)
    assert re.search(
        r"^WARNING +worker thinker\S+ +this host cannot read its tensors at \S+: "
        r".*`transfer\.interface`",
        lost.stdout,
        re.M,
    )
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        (listed,) = client.zrange(keys.WORKERS, 0, -1)
        assert client.hget(keys.worker(WorkerId(str(listed))), "host") == socket.gethostname()


def test_probe_that_does_not_end_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_probe(ProbeOrder(None, False), limit_s=0.01)
    assert result.failures == {SELF: "the read did not end within 0.01 s"}
    monkeypatch.setattr(probe.sys, "executable", "false")
    assert (
        result.read_us == 0.0
        and "ended with status 1" in run_probe(ProbeOrder(None, False)).failures[SELF]
    )


def test_redis_that_never_answers_is_refused_and_the_other_checks_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        done = call_cli(
            "doctor",
            *set_options(*SETTINGS, "transfer.kind=redis"),
            cwd=tmp_path,
            env={"REDIS_URL": url},
        )
    assert done.returncode == 1 and re.search(
        rf"^REFUSED +Redis server +no Redis answers at {url} \(Timeout", done.stdout, re.M
    )
    assert "API key" in done.stdout and "gateway address" in done.stdout


def test_redis_of_an_unsafe_address_is_not_contacted(tmp_path: Path) -> None:
    done = call_cli(
        "doctor",
        *set_options(*SETTINGS),
        cwd=tmp_path,
        env={"REDIS_URL": "redis://redis.invalid:6379"},
    )
    assert done.returncode == 1 and "Redis server" not in done.stdout and "NIXL" not in done.stdout


def test_up_refuses_a_redis_that_evicts_and_warns_of_one_without_append_only_file(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    command = ("up", *set_options(*SETTINGS, "transfer.kind=redis"))
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        done = call_cli(*command, cwd=tmp_path, env={"REDIS_URL": own_redis.url})
    warning, refusal = done.stderr.splitlines()
    assert done.returncode == 1
    assert (
        warning.startswith("fleet: warning: Redis durability: the append-only file is off")
        and "set `appendonly yes`" in warning
    )
    assert (
        refusal.startswith("fleet: Redis: maxmemory-policy is allkeys-lru")
        and "noeviction" in refusal
    )
    assert not (tmp_path / ".fleet" / "resolved.yaml").exists()


def test_conductor_logs_refused_settings_and_leads(own_redis: RedisProcess, tmp_path: Path) -> None:
    """A conductor logs refused Redis settings and leads nevertheless: a restarted conductor must
    not end a fleet whose Redis settings were changed while it served.
    """
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    with start_cli(
        "conductor", *set_options(*SETTINGS), cwd=tmp_path, env={"REDIS_URL": own_redis.url}
    ) as conductor:
        conductor.wait_for("ERROR .*Redis memory: .*noeviction")
        conductor.wait_for("leads now")
        assert conductor.stop() == 0
