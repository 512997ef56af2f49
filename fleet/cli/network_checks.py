"""Network checks of `fleet doctor`, each with a time limit: Redis, NIXL, reads from listed workers,
and listening sockets. A listed worker is one registered in Redis.
"""

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

import psutil
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.config.safety import Check, Finding
from fleet.config.settings import EnvironmentSettings
from fleet.control import keys
from fleet.control.connect import connect_for_a_call, number, text, worker_ids
from fleet.control.embedded import embedded_url
from fleet.control.server import find_server
from fleet.control.server_checks import TIMEOUT_S, check_server
from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId, place_of, role_of
from fleet.transfer.probe import LIMIT_S, SELF, ProbeOrder, ProbePeer, ProbeResult, run_probe
from fleet.worker.process.peers import NETWORK_REACH, PeerAccess, read_peer_access

REDIS_LIMIT_S, NIXL_LIMIT_S = 20.0, LIMIT_S + 5.0
MAX_PEERS = 64
"""Largest number of listed workers from which a NIXL read is tried; each read needs an agent."""
NIXL_FIX = (
    "install nixl (`pip install nixl`; its libraries need Linux), or set transfer.kind: redis"
)
READ_FIX = (
    "open the ports between the two hosts in both directions, and give `transfer.interface` the "
    "network that both are on, "
    "on every worker"
)


def limited(check: Check, subject: str, limit_s: float) -> Check:
    """Return `check` with a time limit of `limit_s`: a check that exceeds it yields a refusal,
    since a name server or a firewall may never answer. `subject`: name of the check in that
    refusal.
    """

    def run(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
        found: list[Finding] = []
        failed: list[Exception] = []

        def collect() -> None:
            try:
                found.extend(check(config, settings))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(limit_s)
        yield from list(found)
        if failed:
            raise failed[0]
        if thread.is_alive():
            refusal = (
                f"{subject}: no result within {limit_s:g} s; look for a firewall that "
                "drops packets, or a name server"
            )
            yield Finding(subject, "", refusal=refusal)

    return run


def redis_url(config: FleetConfig, settings: EnvironmentSettings) -> str:
    return settings.redis_url or embedded_url(config.redis_data_dir)


def is_started(config: FleetConfig, settings: EnvironmentSettings) -> bool:
    """Return True if the deployment's Redis may be running; False if the embedded Redis has no
    socket.
    """
    return (
        settings.redis_url is not None
        or Path(unquote(urlsplit(redis_url(config, settings)).path)).exists()
    )


def check_redis(
    config: FleetConfig, settings: EnvironmentSettings, *, measured: bool = True
) -> Iterator[Finding]:
    """Check the deployment's Redis; an embedded Redis may not be running yet. `measured`: whether
    to measure latency too.
    """
    if is_started(config, settings):
        url = redis_url(config, settings)
        yield from check_server(
            url, config, is_embedded=settings.redis_url is None, measured=measured
        )
        return
    try:
        value, refusal = f"not running; `fleet up` and `honcho start` start {find_server()}", ""
    except ConfigError as error:
        value, refusal = "", error.message
    yield Finding("Redis server", value, refusal=refusal, param="redis")


def check_nixl(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    """Check that NIXL can read memory on this host, and the memory of the listed workers that this
    host may read.
    """
    if config.transfer.kind == "redis":
        return
    try:
        access = read_peer_access(config)
    except ConfigError:
        return  # the checks of the configuration show it
    if access.reach.devices:
        yield _check_bind(access.reach.address)
    peers, hosts = _read_peers(config, settings, access)
    order = ProbeOrder(config.transfer.interface, config.security.allow_public_transfer, peers)
    result = run_probe(order)
    yield _describe_own_read(result, config)
    if SELF not in result.failures and peers:
        yield from _describe_peers(result, hosts)


def _describe_own_read(result: ProbeResult, config: FleetConfig) -> Finding:
    failure = result.failures.get(SELF)
    if failure is None:
        return Finding(
            "NIXL",
            f"an agent of this host reads from another one in {result.read_us / 1000:.1f} ms",
        )
    if config.transfer.kind == "nixl":
        return Finding(
            "NIXL",
            "",
            refusal=f"transfer.kind: {failure}; {NIXL_FIX}",
            param="transfer.kind",
        )
    warning = f"workers would send tensors through Redis, which is slower: {failure}; {NIXL_FIX}"
    return Finding("NIXL", "", warning=warning)


def _describe_peers(result: ProbeResult, hosts: dict[str, str]) -> Iterator[Finding]:
    for worker, failure in result.failures.items():
        yield Finding(
            f"worker {worker}",
            "",
            warning=f"this host cannot read its tensors at {hosts[worker]}: {failure}; {READ_FIX}",
        )
    num_read = len(hosts) - len(result.failures)
    if num_read:
        yield Finding("workers", f"this host reads the tensors of {num_read} listed workers")


def _check_bind(address: str) -> Finding:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        refusal = (
            f"transfer.interface: {address} cannot be listened on ({error.strerror}); "
            "name another interface of this host"
        )
        return Finding("transfer address", "", refusal=refusal, param="transfer.interface")
    return Finding("transfer address", f"workers of this host listen at {address}")


def _read_peers(
    config: FleetConfig, settings: EnvironmentSettings, access: PeerAccess
) -> tuple[dict[str, ProbePeer], dict[str, str]]:
    """Return the NIXL address of each listed worker that this host may read, by worker id, and the
    workers' hosts. Returns {} and {} if Redis is unreachable, which `check_redis` reports.
    """
    if not is_started(config, settings):
        return {}, {}
    try:
        with connect_for_a_call(redis_url(config, settings), TIMEOUT_S) as client:
            listed = worker_ids(client.zrange(keys.WORKERS, 0, MAX_PEERS - 1))
            pipe = client.pipeline(transaction=False)
            for worker in listed:
                pipe.hgetall(keys.worker(worker))
            records = cast("list[dict[bytes, bytes]]", pipe.execute())
    except RedisError:
        return {}, {}
    peers: dict[str, ProbePeer] = {}
    hosts: dict[str, str] = {}
    for worker, raw in zip(listed, records, strict=True):
        record = {text(name): value for name, value in raw.items()}
        if _may_read(worker, record, access):
            peers[worker] = ProbePeer(record["transfer"], number(record, "registered_address"))
            hosts[worker] = text(record.get("host"))
    return peers, hosts


def check_listeners(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    """List the network sockets on which workers and gateways of this host, as listed in Redis,
    accept connections.
    """
    if not is_started(config, settings):
        return
    try:
        with connect_for_a_call(redis_url(config, settings), TIMEOUT_S) as client:
            members = worker_ids(client.zrange(keys.WORKERS, 0, -1))
    except RedisError:
        return  # its own check shows it
    num_silent, host = 0, socket.gethostname()
    for worker in members:
        of_host, pid = place_of(worker)
        addresses = _addresses_of(pid) if of_host == host else None
        num_silent += addresses == []
        if addresses:
            who = f"{role_of(worker)} (process {pid})"
            yield Finding("listeners", f"{who}: {', '.join(addresses)}")
    if num_silent:
        yield Finding(
            "listeners",
            f"{num_silent} listed processes of this host: no network socket",
        )


def _addresses_of(pid: int) -> list[str] | None:
    """Return the addresses at which a process listens; None if the process has ended or belongs to
    another user.
    """
    try:
        found = psutil.Process(pid).net_connections("inet")
    except psutil.Error:
        return None
    listening = [one.laddr for one in found if one.laddr and one.status == psutil.CONN_LISTEN]
    return sorted(f"{address[0]}:{address[1]}" for address in listening)


def _may_read(worker: WorkerId, record: dict[str, bytes], access: PeerAccess) -> bool:
    """Return True if a worker on this host would read the memory of this listed worker. `record`:
    the worker's registration in Redis.
    """
    if not record.get("transfer") or not number(record, "registered_address"):
        return False
    if access.secret is not None and not access.secret.verifies(worker, record):
        return False
    if text(record.get("reach")) == NETWORK_REACH:
        return bool(access.reach.devices)
    return not access.reach.devices and text(record.get("place")) == access.reach.place


NETWORK_CHECKS: tuple[Check, ...] = (
    limited(check_redis, "Redis server", REDIS_LIMIT_S),
    limited(check_nixl, "NIXL", NIXL_LIMIT_S),
    limited(check_listeners, "listeners", REDIS_LIMIT_S),
)
QUICK_REDIS_CHECK: Check = limited(
    partial(check_redis, measured=False), "Redis server", REDIS_LIMIT_S
)
"""Check, without latency measurement, of a Redis that runs before the fleet is started."""
