"""The Redis configuration in `deploy/` with its certificate and users, used by a fleet with a job
worker.
"""

import re
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from fleet.control import jobs
from fleet.control.server import find_server
from fleet.process.free_ports import free_port
from tests.e2e.gateways import Switch
from tests.harness import answer, fake_spec, gateway, thread_fleet
from tests.support import redis_answers, start_cli, wait_until
from tests.unit.test_deploy import DEPLOY, documents

pytestmark = pytest.mark.one_file_in(10, "processes")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port without TLS of a Redis server that has the example's users and an unrestricted user
    `tester`.
    """
    users, port = tmp_path / "users.acl", free_port()
    users.write_text(
        documents("Secret")["fleet-redis-users"]["stringData"]["users.acl"]
        + "user tester on nopass ~* &* +@all\n"
    )
    command = [
        str(find_server()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--aclfile",
        str(users),
        "--dir",
        str(tmp_path),
    ]
    process = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: redis_answers(f"redis://tester:any@127.0.0.1:{port}"),
            "Redis to answer",
            timeout_s=20,
        )
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)


@pytest.fixture
def url(port: int, tmp_path: Path) -> Iterator[str]:
    """The example's REDIS_URL from `deploy/`, changed to reach the test's server over TLS. The
    certificates are made by the commands in deploy/README.md.
    """
    tls = tmp_path / "tls"
    tls.mkdir()
    commands = "\n".join(
        re.findall(r"^(openssl (?:req|x509) .*)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    )
    commands = commands.replace("DNS:redis,", "DNS:localhost,")
    subprocess.run(["bash", "-ec", commands], cwd=tls, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
    with Switch.to(port, context) as switch:
        deployed = documents("Secret")["fleet-redis"]["stringData"]["REDIS_URL"].replace(
            "@redis:6379", f"@localhost:{switch.port}"
        )
        yield deployed.replace("/etc/redis-tls", str(tls))


async def test_fleet_and_job_worker_run_with_the_deployed_redis_user(
    url: str, port: int, tmp_path: Path
) -> None:
    with redis.Redis.from_url(url) as connection, thread_fleet(url) as fleet:
        async with gateway(fleet) as client:
            spec = fake_spec(fleet)
            got = await answer(client, spec)
            assert set(got) == set(spec.outputs) and all(len(array) for array in got.values())
        job = jobs.submit(connection, "bench", {"measure": "serving", "requests": 1})
        with start_cli(
            "jobs", "--url", "http://127.0.0.1:1", cwd=tmp_path, env={"REDIS_URL": url}
        ) as worker:
            wait_until(
                lambda: jobs.jobs(connection)[0].state == "failed",
                "the job to be run",
                timeout_s=60,
            )
            assert worker.stop() == 0
        ended = jobs.job(connection, job.id)
        assert ended is not None and "127.0.0.1:1" in ended.error
    with redis.Redis(port=port, username="tester", password="any") as tester:
        assert tester.acl_log() == []


def test_deployed_redis_user_is_denied_administration_and_other_keys(url: str, port: int) -> None:
    with redis.Redis.from_url(url) as client:
        for command in (
            ("CONFIG", "GET", "*"),
            ("CONFIG", "SET", "dir", "/tmp"),
            ("MODULE", "LIST"),
            ("ACL", "LIST"),
            ("SAVE",),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("REPLICAOF", "127.0.0.1", "1"),
            ("SHUTDOWN",),
            ("MONITOR",),
            ("FUNCTION", "LIST"),
            ("GET", "other"),
            ("SET", "other", "1"),
            ("PUBLISH", "other", "1"),
            ("EVAL", "return redis.call('GET', 'a')", "0"),
        ):
            with pytest.raises(redis.ResponseError, match="(?i)permission|can't run this command"):
                client.execute_command(*command)
    for wrong in (
        "redis://127.0.0.1",
        "redis://:change-me@127.0.0.1",
        "redis://fleet:wrong@127.0.0.1",
    ):
        with (
            redis.Redis.from_url(f"{wrong}:{port}") as client,
            pytest.raises((AuthenticationError, NoPermissionError)),
        ):
            client.ping()


def test_deployed_redis_url_accepts_no_other_certificate(url: str) -> None:
    """The deployed REDIS_URL accepts no other certificate: authority and name are both checked,
    which excludes a man in the middle.
    """
    name = url.replace("@localhost:", "@127.0.0.1:")
    authority = re.sub(r"\?.*", "", url)
    for wrong in (name, authority):
        with (
            redis.Redis.from_url(wrong) as client,
            pytest.raises(redis.ConnectionError, match="(?i)certificate"),
        ):
            client.ping()
