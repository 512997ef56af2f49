"""The fleet's state read from Redis: its members, its leader, and what remains without requests.
Writes nothing.
"""

import asyncio
from dataclasses import dataclass
from typing import cast

import msgspec

from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, text
from fleet.core.ids import CLIENT, RequestId, WorkerId, place_of, role_of
from fleet.lab.faults.patience import patiently
from fleet.lab.faults.processes import find_processes, is_connected
from fleet.lab.faults.schedule import CONDUCTOR, GATEWAY
from fleet.telemetry.views import WorkerView

NUM_CONDUCTORS = 2
NAMED_KEYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of the fleet: a worker, a gateway or the leading conductor. `requests`: ids of the
    requests of which the member owns a task or computes layers.
    """

    id: str
    role: str
    pid: int
    requests: tuple[str, ...] = ()

    @staticmethod
    def of(worker: str) -> "Member":
        """Return the worker with the id `worker` as a member, without its requests."""
        return Member(id=worker, role=role_of(WorkerId(worker)), pid=place_of(WorkerId(worker))[1])


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """State that remains after every request has ended: requests (`live`), grants (`queued`), tasks
    (`running`), slots and pages, as the workers last reported them.

    `num_keys`: number of Redis keys that never expire; `keys`: names and lifetimes of the first
    ones. `busy`: a line for each worker that reports tasks, with the ids of the requests whose
    tasks it owns according to Redis.
    """

    live: int = 0
    queued: int = 0
    running: int = 0
    arena_slots: int = 0
    kv_pages: int = 0
    num_keys: int = 0
    keys: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (
            self.live
            or self.queued
            or self.running
            or self.arena_slots
            or self.kv_pages
            or self.num_keys
        )


class FleetWatch:
    """Reader of one fleet's state. Its calls block, retry while Redis is unreachable, and must come
    from one thread.

    Raises: RedisUnreachable, redis's errors.
    """

    def __init__(self, config: FleetConfig, num_gateways: int, redis_url: str) -> None:
        self._config, self._num_gateways = config, num_gateways
        self._runner = asyncio.Runner()
        self._client: FleetClient = self._runner.run(FleetClient.connect(redis_url, config))
        self._redis = connect(redis_url)

    def close(self) -> None:
        self._runner.run(self._client.stop())
        self._redis.close()
        self._runner.close()

    @patiently
    def members(self, role: str) -> list[Member]:
        """Return the members of a role: workers that take tasks, gateways, or the leading
        conductor.
        """
        if role == CONDUCTOR:
            leader = text(self._redis.get(keys.CONDUCTOR)).partition("|")[0]
            return [Member(id=leader, role=role, pid=int(leader.split(":")[1]))] if leader else []
        registered = "" if role == GATEWAY else role
        views = [view for view in self._workers() if view.role == registered and view.takes_tasks]
        return [
            Member(id=view.id, role=role, pid=view.pid, requests=self._requests(view.id))
            for view in views
        ]

    def _workers(self) -> list[WorkerView]:
        return self._runner.run(self._client.telemetry.workers())

    def _requests(self, worker: WorkerId) -> tuple[str, ...]:
        anchor = WorkerId(text(self._redis.hget(keys.worker(worker), "anchor")))
        owned = cast("set[bytes]", self._redis.smembers(keys.worker_tasks(anchor or worker)))
        return tuple(sorted(text(task).partition("|")[0] for task in owned))

    @patiently
    def live_requests(self) -> tuple[str, ...]:
        """Return the ids of all requests that have not ended."""
        return tuple(
            sorted(text(one) for one in cast("set[bytes]", self._redis.smembers(keys.LIVE)))
        )

    def lease_s(self, role: str) -> float:
        """Return the duration of the lease of a role's processes."""
        lease = self._config.lease
        return lease.conductor_ttl_s if role == CONDUCTOR else lease.worker_ttl_s

    def hands_off(self, role: str) -> bool:
        """Return True if the role's workers are the source of hand-offs (prefill), False if the
        destination.
        """
        return self._config.role(role).next is not None

    @patiently
    def is_registered(self, member: Member) -> bool:
        """Return True while a worker or gateway has its lease, or a conductor the leadership."""
        if member.role == CONDUCTOR:
            return any(leader.id == member.id for leader in self.members(CONDUCTOR))
        return self._redis.zscore(keys.WORKERS, member.id) is not None

    @patiently
    def is_complete(self) -> bool:
        """Return True if the fleet is complete: every role has its workers and standbys, with all
        layers; all gateways serve; and one of two conductors leads.
        """
        if self._runner.run(self._client.telemetry.missing_roles()):
            return False
        for role in self._config.roles():
            if (
                len(self.members(role.name)) < role.replicas
                or self._num_standbys(role.name) < role.standby
            ):
                return False
        if len(self.members(GATEWAY)) < self._num_gateways:
            return False
        conductors = find_processes(CONDUCTOR)
        connected = {pid for pid, process in conductors.items() if is_connected(process)}
        return len(connected) >= NUM_CONDUCTORS and any(
            leader.pid in connected for leader in self.members(CONDUCTOR)
        )

    def _num_standbys(self, role: str) -> int:
        return sum(view.role == role and view.standby for view in self._workers())

    @patiently
    def has_unassigned_consumers(self) -> bool:
        """Return True if an answer has lost its gateway and has not been resumed at another
        gateway.
        """
        live = [
            RequestId(text(request))
            for request in cast("set[bytes]", self._redis.smembers(keys.LIVE))
        ]
        return any(
            not text(self._redis.hget(keys.task(request, CLIENT), "owner")) for request in live
        )

    @patiently
    def residue(self) -> Residue:
        workers = self._workers()
        roles = self._runner.run(self._client.telemetry.roles())
        left = self._unexpiring_keys({str(view.id) for view in workers})
        return Residue(
            live=self._runner.run(self._client.telemetry.num_live()),
            queued=sum(role.queue_depth for role in roles),
            running=sum(view.running for view in workers),
            arena_slots=sum(view.slots_used for view in workers),
            kv_pages=sum(view.pages_used - view.pages_kept for view in workers),
            num_keys=len(left),
            keys=tuple(left[:NAMED_KEYS]),
            busy=tuple(
                f"{view.id} reports {view.running} running tasks; by Redis it owns "
                f"{self._requests(view.id) or 'none'}"
                for view in workers
                if view.running
            ),
        )

    def _unexpiring_keys(self, workers: set[str]) -> list[str]:
        """Return Redis keys that have no row in the key table, or have no time to live though their
        request or worker has ended.
        """
        left: list[str] = []
        for raw in self._redis.scan_iter(match=f"{keys.PREFIX}*", count=1000):
            key = text(raw)
            row = keys.row_of(key)
            if row is not None and row.life in ("forever", "index"):
                continue
            if row is not None and row.life == "lease" and any(worker in key for worker in workers):
                continue
            if row is None or self._redis.ttl(key) == -1:
                left.append(f"{key} ({'no row' if row is None else row.life})")
        return sorted(left)
