"""Checks of Redis at the start: a server that would lose or delete the fleet's data is refused with
the remedy, or a warning names the risk.
"""

import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from fleet.config import load_config
from fleet.config.safety import Finding
from fleet.control import server_checks
from fleet.control.connect import connect
from fleet.control.scripts import SCRIPTS, source
from fleet.control.server_checks import check_server, compare_clocks
from fleet.control.undeclared_keys import UNDECLARED_FLAG, explain_script_refusal
from fleet.core.errors import ConfigError
from tests.support import REPO, RedisProcess, wait_until
from tests.unit.test_deploy import documents


def findings(url: str, *settings: str) -> dict[str, Finding]:
    return {found.subject: found for found in check_server(url, load_config(None, settings))}


@pytest.fixture
def admin(server: RedisProcess) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


def test_server_as_fleet_starts_it_is_accepted_and_left_empty(
    server: RedisProcess, admin: redis.Redis
) -> None:
    admin.config_set("maxmemory", "1gb")
    found = findings(server.url)
    verdicts = {
        subject: finding.text for subject, finding in found.items() if finding.verdict != "OK"
    }
    verdicts.pop("Redis latency", None)  # depends on what else the machine does
    assert verdicts == {} and len(found) == 1 + len(server_checks.CHECKS)
    assert re.fullmatch(
        r"(Redis|Valkey) \d+\.\d+.* at redis://127\.0\.0\.1:\d+", found["Redis server"].text
    )
    assert admin.keys("*") == []


@pytest.mark.parametrize(
    ("settings", "subject", "verdict", "remedy"),
    [
        ({"appendonly": "no"}, "Redis durability", "WARNING", "set `appendonly yes`"),
        ({"appendfsync": "no"}, "Redis durability", "WARNING", "set `appendfsync everysec`"),
        ({"appendfsync": "always"}, "Redis durability", "WARNING", "set `appendfsync everysec`"),
        (
            {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"},
            "Redis memory",
            "REFUSED",
            "maxmemory-policy noeviction",
        ),
        (
            {"maxmemory": "1gb", "maxmemory-policy": "volatile-ttl"},
            "Redis memory",
            "REFUSED",
            "maxmemory-policy noeviction",
        ),
        (
            {"maxmemory": "0", "maxmemory-policy": "allkeys-lru"},
            "Redis memory",
            "WARNING",
            "maxmemory-policy noeviction",
        ),
        ({"maxmemory": "8mb"}, "Redis memory", "REFUSED", "set at least 282 MiB"),
        (
            {"maxmemory": "100mb"},
            "Redis memory",
            "WARNING",
            "set at least 282 MiB, or lower limits.max_requests",
        ),
        ({"maxmemory": "0"}, "Redis memory", "WARNING", "set at least 282 MiB"),
    ],
)
def test_setting_that_risks_data_is_reported_with_the_remedy(
    server: RedisProcess,
    admin: redis.Redis,
    settings: dict[str, str],
    subject: str,
    verdict: str,
    remedy: str,
) -> None:
    admin.config_set("maxmemory", "1gb")
    for name, value in settings.items():
        admin.config_set(name, value)
    finding = findings(server.url)[subject]
    assert finding.verdict == verdict and remedy in finding.text


def test_full_memory_is_a_warning_so_that_a_fleet_can_start_and_free_it(
    server: RedisProcess, admin: redis.Redis
) -> None:
    admin.set("other", b"x" * 20 * 2**20)
    admin.config_set("maxmemory", "20mb")
    finding = findings(server.url, "limits.max_requests=1")["Redis memory"]
    assert finding.verdict == "WARNING" and "limits.max_redis_memory_percent" in finding.text


def test_replica_is_refused_and_one_that_lags_is_reported(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    replica = RedisProcess(folder)
    replica.start()
    with (
        redis.Redis.from_url(own_redis.url) as primary,
        redis.Redis.from_url(replica.url) as follower,
    ):
        primary.config_set("repl-diskless-sync-delay", 0)
        follower.replicaof("127.0.0.1", str(own_redis.port))
        wait_until(
            lambda: findings(own_redis.url)["Redis replicas"].text.startswith("1 in step"),
            "the replica to follow",
        )
        assert "point REDIS_URL at the primary" in findings(replica.url)["Redis server"].refusal
    replica.kill()  # which ignores SIGTERM while it writes its first append-only file


def test_denied_commands_of_the_user_are_named(server: RedisProcess, admin: redis.Redis) -> None:
    example = (
        documents("Secret")["fleet-redis-users"]["stringData"]["users.acl"].splitlines()[1].split()
    )
    rules = [rule for rule in example[2:] if rule != "-function"]  # which Redis 6.2 does not have
    admin.execute_command("ACL", "SETUSER", "fleet", "resetchannels", *rules)
    url = server.url.replace("//", "//fleet:change-me@")
    allowed = findings(url)
    assert (
        allowed["Redis user"].verdict == "OK"
        and "may not read appendfsync" in allowed["Redis durability"].text
    )
    admin.execute_command(
        "ACL", "SETUSER", "fleet", "-xadd", "-hset", "-xreadgroup", "resetkeys", "~{fleet}:*"
    )
    denied = findings(url)["Redis user"]
    assert denied.verdict == "REFUSED" and re.search(
        r"may not run HSET, XADD, XREADGROUP, EXISTS of rq:\*: grant", denied.text
    )
    admin.execute_command("ACL", "SETUSER", "fleet", "-eval")
    assert "may not run EVAL" in findings(url)["Redis user"].refusal
    admin.execute_command("ACL", "SETUSER", "fleet", "-info")
    assert "its user may not do what Fleet needs" in findings(url)["Redis server"].refusal


def test_rights_are_checked_for_every_command_of_the_scripts() -> None:
    used = {
        name
        for path in (REPO / "fleet/control/lua").glob("*.lua")
        for name in re.findall(r"call\('(\w+)'", path.read_text())
    }
    checked = {line.split()[0] for line in re.split(r"[|\n]", server_checks.COMMANDS.strip())}
    assert used - checked == set()


def test_server_that_is_away_is_one_refusal() -> None:
    (finding,) = check_server("redis://127.0.0.1:1", load_config(None, ()))
    assert (
        finding.verdict == "REFUSED" and "no Redis answers at redis://127.0.0.1:1" in finding.text
    )


@pytest.mark.parametrize(
    ("redis_s", "verdict"), [(99.8, "OK"), (98.5, "WARNING"), (101.9, "OK"), (102.5, "WARNING")]
)
def test_difference_of_clocks_excludes_the_round_trip(redis_s: float, verdict: str) -> None:
    finding = compare_clocks(redis_s, before_s=100.0, after_s=101.0)
    assert finding.verdict == verdict
    assert (
        verdict == "OK" or ("1.5 s behind" if redis_s < 100 else "1.5 s ahead of") in finding.text
    )


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "Error running script (call to 7d): @user_script:2: script tried accessing "
            "undeclared key, key: {fleet}:undeclared",
            "--default_lua_flags=allow-undeclared-keys",
        ),
        (
            "bad lua script for redis cluster, all the keys that the script uses should be "
            "passed using the KEYS array",
            "script_check_enable to 0",
        ),
    ],
)
def test_server_that_refuses_undeclared_keys_is_refused_with_its_remedy(
    message: str, remedy: str
) -> None:
    """A server that refuses undeclared keys is refused with its remedy. The error messages are
    quoted from the documentation of Dragonfly and Tair; neither can be installed here.
    """
    assert remedy in explain_script_refusal(message)
    assert explain_script_refusal("OOM command not allowed when used memory > 'maxmemory'") == ""


def test_every_script_has_the_flag_for_undeclared_keys_in_its_first_line() -> None:
    assert {source(name).partition("\n")[0] + "\n" for name in SCRIPTS} == {UNDECLARED_FLAG}


class RefusingHandler(socketserver.StreamRequestHandler):
    """Fake server that accepts connections and scripts but refuses undeclared keys; no real server
    of this kind is installed here.
    """

    def handle(self) -> None:
        while head := self.rfile.readline():
            words: list[bytes] = []
            for _ in range(int(head[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2).strip())
            refusal = (
                b"-ERR Error running script: script tried accessing undeclared key, key: "
                b"{fleet}:undeclared\r\n"
            )
            self.wfile.write(refusal if words[0] == b"EVAL" else b"+OK\r\n")


def test_command_that_uses_a_server_which_refuses_undeclared_keys_ends_with_the_remedy() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), RefusingHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises(
                ConfigError,
                match=r"refuses scripts with undeclared keys \(.*\): start Dragonfly with",
            ):
                connect(f"redis://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            thread.join()
