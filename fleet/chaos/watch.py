"""What the fleet says of itself in Redis: who serves, who leads, and what is left when nobody asks any more. Writes nothing."""

import asyncio
from dataclasses import dataclass
from typing import cast

import msgspec

from fleet.chaos.processes import find, is_connected
from fleet.chaos.schedule import CONDUCTOR, GATEWAY
from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect_async, text
from fleet.control.embedded import embedded_url
from fleet.core.ids import CLIENT, RequestId, WorkerId, place_of, role_of
from fleet.core.telemetry import WorkerView

NUM_CONDUCTORS = 2
NAMED_KEYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker or gateway, or the conductor that leads. `requests` are those of whose tasks it owns one now."""

    id: str
    role: str
    pid: int
    requests: tuple[str, ...] = ()

    @staticmethod
    def of(worker: str) -> "Member":
        """As its id says."""
        return Member(id=worker, role=role_of(WorkerId(worker)), pid=place_of(WorkerId(worker))[1])


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """What is still held when every request has ended. `keys` are those that nothing will ever delete, the first of them named.

    Units: `live`, `running` requests and tasks; `queued` grants; slots of transfer arenas; KV pages, as workers last reported.
    """

    live: int = 0
    queued: int = 0
    running: int = 0
    arena_slots: int = 0
    kv_pages: int = 0
    num_keys: int = 0
    keys: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        return not (self.live or self.queued or self.running or self.arena_slots or self.kv_pages or self.num_keys)


class Watch:
    """Reads of one fleet, each a blocking call from one thread. Raises: RedisUnreachable."""

    def __init__(self, config: FleetConfig, num_gateways: int) -> None:
        self._config, self._num_gateways = config, num_gateways
        url = embedded_url(config.redis_data_dir)
        self._runner = asyncio.Runner()
        self._client: FleetClient = self._runner.run(FleetClient.connect(url, config))
        self._redis = connect_async(url)

    def close(self) -> None:
        self._runner.run(self._client.stop())
        self._runner.run(self._redis.aclose())
        self._runner.close()

    def members(self, role: str) -> list[Member]:
        """Who serves a role: workers that take tasks, gateways, or the leader among the conductors."""
        return self._runner.run(self._members(role))

    async def _members(self, role: str) -> list[Member]:
        if role == CONDUCTOR:
            leader = text(await self._redis.get(keys.CONDUCTOR)).partition("|")[0]
            return [Member(id=leader, role=role, pid=int(leader.split(":")[1]))] if leader else []
        registered = "" if role == GATEWAY else role
        views = [view for view in await self._client.telemetry.workers() if view.role == registered and view.takes_tasks]
        return [Member(id=view.id, role=role, pid=view.pid, requests=await self._requests(view.id)) for view in views]

    async def _requests(self, worker: WorkerId) -> tuple[str, ...]:
        owned = cast("set[bytes]", await self._redis.execute_command("SMEMBERS", keys.worker_tasks(worker)))
        return tuple(sorted(text(task).partition("|")[0] for task in owned))

    def gives_away(self, role: str) -> bool:
        """Whether the role's workers hand their tasks on, rather than take them over."""
        return self._config.role(role).next is not None

    def is_listed(self, member: Member) -> bool:
        """Whether it has its right still: its lease, or the leadership."""
        if member.role == CONDUCTOR:
            return any(leader.id == member.id for leader in self.members(CONDUCTOR))
        return self._runner.run(self._score(member)) is not None

    async def _score(self, member: Member) -> object:
        return await self._redis.execute_command("ZSCORE", keys.WORKERS, member.id)

    def is_whole(self) -> bool:
        """Every role has the workers it is meant to have, every gateway is there, two conductors are at work, and one leads."""
        for role in self._config.roles():
            if len(self.members(role.name)) < role.replicas or self._num_standing_by(role.name) < role.standby:
                return False
        if len(self.members(GATEWAY)) < self._num_gateways:
            return False
        conductors = find(CONDUCTOR)
        at_work = {pid for pid, process in conductors.items() if is_connected(process)}
        return len(at_work) >= NUM_CONDUCTORS and any(leader.pid in at_work for leader in self.members(CONDUCTOR))

    def _num_standing_by(self, role: str) -> int:
        return sum(view.role == role and view.standby for view in self._runner.run(self._client.telemetry.workers()))

    def has_unheard(self) -> bool:
        """Whether some answer's gateway is lost, and no other has taken it over."""
        return self._runner.run(self._has_unheard())

    async def _has_unheard(self) -> bool:
        members = cast("set[bytes]", await self._redis.execute_command("SMEMBERS", keys.LIVE))
        live = [RequestId(text(request)) for request in members]
        owners = [await self._redis.execute_command("HGET", keys.task(request, CLIENT), "owner") for request in live]
        return any(not text(owner) for owner in owners)

    def residue(self) -> Residue:
        return self._runner.run(self._residue())

    async def _residue(self) -> Residue:
        workers: list[WorkerView] = await self._client.telemetry.workers()
        roles = await self._client.telemetry.roles()
        left = await self._keys_without_end({str(view.id) for view in workers})
        return Residue(
            live=await self._client.telemetry.num_live(),
            queued=sum(role.queue_depth for role in roles),
            running=sum(view.running for view in workers),
            arena_slots=sum(view.slots_used for view in workers),
            kv_pages=sum(view.pages_used - view.pages_kept for view in workers),
            num_keys=len(left),
            keys=tuple(left[:NAMED_KEYS]),
        )

    async def _keys_without_end(self, workers: set[str]) -> list[str]:
        """Keys with no row in the key table, of a request that has ended, or of a worker that is gone, and no time to live."""
        left: list[str] = []
        async for raw in self._redis.scan_iter(match=f"{keys.PREFIX}*", count=1000):
            key = text(raw)
            row = keys.row_of(key)
            if row is not None and row.life == "forever":
                continue
            if row is not None and row.life == "lease" and any(worker in key for worker in workers):
                continue
            if row is None or await self._redis.ttl(key) == -1:
                left.append(f"{key} ({'no row' if row is None else row.life})")
        return sorted(left)
