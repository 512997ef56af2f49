"""Checks of a running Redis: version, durability, memory, replicas, clock, latency, scripts and the
user's rights.

Every check yields a finding with the remedy, leaves no key behind, and has a time limit for each
call. Starts no server.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from redis import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from fleet.config import FleetConfig
from fleet.config.safety import Finding
from fleet.config.settings import is_cluster
from fleet.control import keys
from fleet.control.connect import connect_for_a_call, describe_failure, exchange_each, safe_url
from fleet.control.redis_status import memory_of
from fleet.control.scripts import AUDIO_RETENTION_S
from fleet.control.server import MIN_VERSION
from fleet.control.undeclared_keys import PROBE, UNDECLARED_FLAG, find_script_refusal

Info = Mapping[str, str | int]

TIMEOUT_S = 5.0
TESTED = {"Redis": (8, 0), "Valkey": (9, 1)}
"""Newest version of each server with which tests/control was run."""
AUDIO_BYTES_PER_S = 48_000
"""Audio bytes per second in the log of an answer: 16-bit samples at 24 kHz."""
MIN_MEMORY_BYTES = 16 * 2**20
"""Least useful memory in bytes. Less memory does not hold one long answer beside the scripts and
the fleet's log.
"""
MAX_CLOCK_DIFFERENCE_S = 1.0
MAX_P50_MS = 5.0
MAX_P99_MS = 50.0
NUM_CALLS = 100
CALLS_S = 1.0
MAX_LAG_S = 10
RIGHTS_TO_KEYS = f"the keys {keys.PREFIX}* and rq:* and the channels rq:pubsub:*"
COMMANDS = """
EXISTS k|GET k|HGET k f|HEXISTS k f|HGETALL k|HMGET k f|PTTL k|SCARD k|SISMEMBER k m|SMEMBERS k
XLEN k|XRANGE k - +|XREVRANGE k + -|ZCARD k|ZCOUNT k 0 1|ZRANGE k 0 -1|ZRANGEBYSCORE k 0 1
ZREVRANGE k 0 -1|ZREVRANGEBYSCORE k 1 0|ZSCORE k m|TIME|XINFO STREAM k|SET k v|GETSET k v
EXPIRE k 1|PEXPIRE k 1|RENAME k k|UNLINK k|DEL k|HSET k f v|HSETNX k f v|HINCRBY k f 1|HDEL k f
HVALS k|RPUSH k v|LTRIM k 0 0|SADD k m|SREM k m|SPOP k|XADD k * f v|XDEL k 0-1
XGROUP CREATE k g 0 MKSTREAM|ZADD k 0 m|ZREM k m|ZREMRANGEBYRANK k 0 0|ZREMRANGEBYSCORE k 0 1
"""
"""Commands that the scripts use, on a key `k`."""
RIGHTS = f"""{UNDECLARED_FLAG}
local denied = {{}}
for _, line in ipairs(ARGV) do
  local words = {{}}
  for word in string.gmatch(line, '%S+') do
    words[#words + 1] = word == 'k' and '{keys.NONE}' or word
  end
  local reply = redis.pcall(unpack(words))
  local message = type(reply) == 'table' and reply.err and string.lower(reply.err) or ''
  if string.find(message, 'noperm') or string.find(message, 'permission')
    or string.find(message, "can't ") then
    denied[#denied + 1] = words[1]
  end
  redis.pcall('DEL', '{keys.NONE}')
end
return denied
"""
_NOT_PERMITTED = re.compile("(?i)noperm|no permissions|can't (?:run|access)")


class CheckedServer(NamedTuple):
    """The Redis server under check: a connection and its INFO. `is_embedded`: True for Fleet's own
    server, whose settings are fixed.
    """

    client: Redis
    info: Info
    config: FleetConfig
    url: str
    is_embedded: bool


def check_server(
    url: str, config: FleetConfig, *, is_embedded: bool = False, measured: bool = True
) -> Iterator[Finding]:
    """Check a Redis server; yield one finding per check. `measured`: also measure the latency,
    which takes up to `CALLS_S` seconds.
    """
    checks = [check for check in CHECKS if measured or check is not check_latency]
    try:
        with connect_for_a_call(url, TIMEOUT_S) as client:
            server = CheckedServer(client, cast(Info, client.info()), config, url, is_embedded)
            version = check_version(server)
            yield version
            # On a server of the wrong kind the other checks would fail for the same reason.
            for check in () if version.refused else checks:
                yield check(server)
    except RedisError as error:
        yield Finding(
            "Redis server",
            "",
            refusal=describe_failure(url, error),
            param="REDIS_URL",
        )


def version_of(info: Info) -> tuple[str, str]:
    """Return the kind of server (Redis, Valkey or Dragonfly) and its version."""
    for kind in ("Dragonfly", "Valkey"):
        if version := info.get(f"{kind.lower()}_version"):
            return kind, str(version).lstrip("df-v")
    return ("Valkey" if info.get("server_name") == "valkey" else "Redis"), str(
        info.get("redis_version", "0")
    )


def check_version(server: CheckedServer) -> Finding:
    kind, version = version_of(server.info)
    role, has_cluster_mode = server.info.get("role"), bool(server.info.get("cluster_enabled"))
    refusal = warning = ""
    needed = ".".join(map(str, MIN_VERSION))
    if _numbers(str(server.info.get("redis_version", "0"))) < MIN_VERSION:
        refusal = f"{kind} {version} is too old; install Redis {needed} or newer, or Valkey"
    elif has_cluster_mode and not is_cluster(server.url):
        refusal = (
            "it is a node of a cluster, of which one server owns the fleet's keys: write "
            "redis+cluster://HOST:PORT,HOST:PORT"
        )
    elif role not in ("master", None):
        refusal = (
            "it is a replica, which accepts no writes: point REDIS_URL at the primary, or "
            "promote it"
        )
    elif kind not in TESTED:
        warning = (
            f"{kind} {version}: tests/control was not run with it; run it, see the "
            "map (fleet/README.md)"
        )
    elif _numbers(version)[0] > TESTED[kind][0]:
        warning = (
            f"{kind} {version} is newer than the tested versions, up to "
            f"{'.'.join(map(str, TESTED[kind]))}"
        )
    return Finding(
        "Redis server",
        f"{kind} {version} at {safe_url(server.url)}",
        param="REDIS_URL",
        refusal=refusal and f"REDIS_URL: {refusal}",
        warning=warning,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (0,)


def check_durability(server: CheckedServer) -> Finding:
    """Check that the append-only file is on. Without it, a restart of Redis loses every request,
    answers in progress included.
    """
    subject = "Redis durability"
    if not server.info.get("aof_enabled"):
        fix = "set `appendonly yes` and `appendfsync everysec`"
        return Finding(
            subject,
            "",
            warning="the append-only file is off, so a restart of Redis loses every request: "
            f"{fix}",
        )
    fsync, warning = _fsync(server.client), ""
    if server.info.get("aof_last_write_status") != "ok":
        warning = (
            "Redis could not write its append-only file: free disk space on its host, and "
            "read its log"
        )
    elif fsync == "no":
        warning = (
            "appendfsync is no, so a crash of Redis's host may lose half a minute of "
            "requests: set `appendfsync everysec`"
        )
    elif fsync == "always":
        warning = (
            "appendfsync is always, so every chunk waits for the disk: set `appendfsync everysec`"
        )
    shown = (
        f"appendfsync {fsync}"
        if fsync
        else "this user may not read appendfsync; it should be everysec"
    )
    return Finding(subject, f"append-only file on, {shown}", warning=warning)


def _fsync(client: Redis) -> str:
    try:
        return str(cast("dict[str, str]", client.config_get("appendfsync")).get("appendfsync", ""))
    except ResponseError:  # no right to it, or a managed server without the command
        return ""


def check_memory(server: CheckedServer) -> Finding:
    """Check that Redis never evicts keys, and that a fully loaded fleet fits into its memory."""
    used, most = memory_of(cast("dict[str, int]", server.info))
    policy = str(server.info.get("maxmemory_policy", ""))
    percent, needed = server.config.limits.max_redis_memory_percent, full_fleet_bytes(server.config)
    refusal = warning = ""
    evicts = "Redis would delete keys by which the fleet decides: set `maxmemory-policy noeviction`"
    if most and policy != "noeviction":
        refusal = f"maxmemory-policy is {policy}, so with a full memory {evicts}"
    elif most and most < MIN_MEMORY_BYTES:
        refusal = (
            f"maxmemory is {_mib(most)}, too little for one long answer: set at least "
            f"{_mib(needed * 100 / percent)}"
        )
    elif policy != "noeviction":
        warning = f"maxmemory-policy is {policy}; once there is a maxmemory, {evicts}"
    elif most and used > most * percent / 100:
        share = (
            f"{_mib(used)} of {_mib(most)} are used, more than "
            f"limits.max_redis_memory_percent ({percent:g} %)"
        )
        warning = (
            f"{share}, so new requests are answered with 503: raise maxmemory, or wait "
            "until ended requests expire"
        )
    elif most and most * percent / 100 < needed:
        warning = (
            f"maxmemory is {_mib(most)}, and limits.max_requests "
            f"({server.config.limits.max_requests}) spoken answers take up to "
            f"{_mib(needed)}: set at least {_mib(needed * 100 / percent)}, or lower "
            "limits.max_requests"
        )
    elif not most and not server.is_embedded:
        warning = (
            "no maxmemory, so Redis grows until its host's memory is full: set at least "
            f"{_mib(needed * 100 / percent)}"
        )
    value = f"{_mib(used)} used, " + (
        f"maxmemory {_mib(most)}, {policy}" if most else f"no maxmemory, {policy}"
    )
    refusal = refusal and f"Redis: {refusal}"
    return Finding("Redis memory", value, refusal=refusal, warning=warning, param="REDIS_URL")


def full_fleet_bytes(config: FleetConfig) -> int:
    """Return an estimate of the Redis memory in bytes that a fully loaded fleet needs: the audio of
    the maximum number of answers, and the dead letters.
    """
    return config.limits.max_requests * AUDIO_RETENTION_S * AUDIO_BYTES_PER_S + 64 * 2**20


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def check_replicas(server: CheckedServer) -> Finding:
    info, warning = server.info, ""
    replicas = [
        cast("dict[str, str | int]", info[name]) for name in info if re.fullmatch(r"slave\d+", name)
    ]
    behind = [
        one
        for one in replicas
        if one.get("state") != "online" or int(one.get("lag", 0)) > MAX_LAG_S
    ]
    if behind:
        one = behind[0]
        warning = (
            f"the replica {one.get('ip')}:{one.get('port')} does not follow (state "
            f"{one.get('state')}, {one.get('lag')} s "
            "behind): check its link and its log; until then a failover to it loses requests"
        )
    num_following = len(replicas) - len(behind)
    needed = server.config.redis.wait_replicas
    refusal = ""
    if num_following < needed:
        refusal = (
            f"redis.wait_replicas is {needed}, and {num_following} replicas follow, so every "
            "request would be refused: start the "
            "replicas, or lower the setting"
        )
    value = (
        f"{num_following} in step with the primary"
        if replicas
        else "none; a lost server loses what its disk lost"
    )
    return Finding(
        "Redis replicas",
        value,
        refusal=refusal,
        warning=warning,
        param="redis.wait_replicas",
    )


def check_clock(server: CheckedServer) -> Finding:
    before_s = time.time()
    seconds, microseconds = server.client.time()
    return compare_clocks(seconds + microseconds / 1e6, before_s, time.time())


def compare_clocks(redis_s: float, before_s: float, after_s: float) -> Finding:
    """Compare Redis's clock with this host's. `before_s`, `after_s`: the host's time before and
    after `redis_s` was read, so the round trip does not count as a difference.
    """
    ahead_s = redis_s - after_s if redis_s > after_s else min(redis_s - before_s, 0.0)
    shown = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    warning = (
        f"Redis's clock is {shown}, so times in traces and logs are wrong: synchronize "
        "both with NTP (chrony)"
    )
    within = f"less than {MAX_CLOCK_DIFFERENCE_S:g} s from this host's"
    return Finding(
        "Redis clock",
        within,
        warning=warning if abs(ahead_s) > MAX_CLOCK_DIFFERENCE_S else "",
    )


def check_latency(server: CheckedServer) -> Finding:
    """Measure the latency of calls of a small script, for `CALLS_S` seconds at most."""
    times_ms: list[float] = []
    until = time.perf_counter() + CALLS_S
    while len(times_ms) < NUM_CALLS and time.perf_counter() < until:
        began = time.perf_counter()
        try:
            server.client.eval(PROBE, *keys.DECLARED)
        except ResponseError:
            return Finding("Redis latency", "not measured, since Redis refuses the script")
        times_ms.append((time.perf_counter() - began) * 1000)
    p50, p99 = statistics.median(times_ms), sorted(times_ms)[int(len(times_ms) * 0.99) - 1]
    value = f"a small script takes {p50:.2f} ms (p50), {p99:.2f} ms (p99)"
    slow = (
        f"{value}, and each chunk waits for several: run Redis near the fleet, on a host "
        "with idle cores and a fast disk"
    )
    return Finding(
        "Redis latency",
        value,
        warning=slow if p50 > MAX_P50_MS or p99 > MAX_P99_MS else "",
    )


def check_scripts(server: CheckedServer) -> Finding:
    refusal = find_script_refusal(server.client)
    value = "scripts may use keys whose names they compute"
    return Finding("Redis scripts", value, refusal=refusal, param="REDIS_URL")


def check_rights(server: CheckedServer) -> Finding:
    """Check the user's rights by running the fleet's commands on an unused key. Unlike ACL DRYRUN,
    this needs no administrator's right.
    """
    waits, has_jobs = server.config.redis.wait_replicas > 0, not is_cluster(server.url)
    denied = find_denied_commands(server.client, waits=waits, has_jobs=has_jobs)
    user = _user(server.client)
    grant = f"grant them, with {RIGHTS_TO_KEYS}, as the example in deploy/kubernetes.yaml does"
    refusal = f"REDIS_URL: user {user} may not run {', '.join(denied)}: {grant}" if denied else ""
    return Finding(
        "Redis user",
        f"{user} may run what the fleet needs",
        refusal=refusal,
        param="REDIS_URL",
    )


def find_denied_commands(client: Redis, *, waits: bool, has_jobs: bool) -> list[str]:
    commands: list[tuple[str | int, ...]] = [
        ("EVAL", RIGHTS, *keys.DECLARED, *COMMANDS.strip().replace("\n", "|").split("|")),
        ("SCRIPT", "EXISTS", "0" * 40),
        ("XREAD", "COUNT", 1, "STREAMS", keys.NONE, "0"),
        ("XREADGROUP", "GROUP", keys.GROUP, "doctor", "COUNT", 1, "STREAMS", keys.NONE, ">"),
    ]
    if has_jobs:
        commands += [("EXISTS", "rq:none"), ("PUBLISH", "rq:pubsub:none", "")]
    if waits:
        commands.append(("WAIT", 0, 1))
    inner, *outer = exchange_each(client, (), *commands)
    denied = [
        f"{command[0]} of rq:*" if "rq:" in str(command[1]) else str(command[0])
        for command, reply in zip(commands[1:], outer, strict=True)
        if _is_denial(reply)
    ]
    if _is_denial(inner):
        return ["EVAL", *denied]
    names = cast("list[bytes]", inner) if isinstance(inner, list) else []
    return [*(name.decode() for name in names), *denied]


def _is_denial(reply: object) -> bool:
    return isinstance(reply, NoPermissionError) or (
        isinstance(reply, Exception) and bool(_NOT_PERMITTED.search(str(reply)))
    )


def _user(client: Redis) -> str:
    try:
        return str(client.acl_whoami())
    except ResponseError:
        return "of REDIS_URL"


CHECKS: tuple[Callable[[CheckedServer], Finding], ...] = (
    check_durability,
    check_memory,
    check_replicas,
    check_clock,
    check_latency,
    check_scripts,
    check_rights,
)
"""All checks except the check of the version, in the order of the output."""
