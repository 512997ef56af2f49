"""What the fleet says of itself in Redis: who serves, who leads, and what is left when nobody asks any more. Writes nothing."""

import asyncio
from dataclasses import dataclass

import msgspec

from fleet.chaos.processes import find, is_connected
from fleet.chaos.schedule import CONDUCTOR
from fleet.config import FleetConfig
from fleet.control import keys
from fleet.control.client import FleetClient, WorkerView
from fleet.control.connect import connect_async, text
from fleet.core.ids import WorkerId

NUM_CONDUCTORS = 2
NAMED_KEYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker, or the conductor that leads. `num_tasks` are those it owns now."""

    id: str
    role: str
    pid: int
    num_tasks: int = 0


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

    def __init__(self, config: FleetConfig) -> None:
        self._config, self._port = config, config.redis.port
        url = f"redis://127.0.0.1:{self._port}"
        self._runner = asyncio.Runner()
        self._client: FleetClient = self._runner.run(FleetClient.connect(url, config))
        self._redis = connect_async(url)

    def close(self) -> None:
        self._runner.run(self._client.stop())
        self._runner.run(self._redis.aclose())
        self._runner.close()

    def members(self, role: str) -> list[Member]:
        """Who serves a role: workers that take tasks, or the leader among the conductors."""
        return self._runner.run(self._members(role))

    async def _members(self, role: str) -> list[Member]:
        if role == CONDUCTOR:
            leader = text(await self._redis.get(keys.CONDUCTOR)).partition("|")[0]
            return [Member(id=leader, role=role, pid=int(leader.split(":")[1]))] if leader else []
        views = [view for view in await self._client.workers() if view.role == role and view.takes_tasks]
        return [Member(id=view.id, role=role, pid=view.pid, num_tasks=await self._num_tasks(view.id)) for view in views]

    async def _num_tasks(self, worker: WorkerId) -> int:
        return int(text(await self._redis.execute_command("SCARD", keys.worker_tasks(worker))))

    def is_listed(self, member: Member) -> bool:
        """Whether it has its right still: its lease, or the leadership."""
        if member.role == CONDUCTOR:
            return any(leader.id == member.id for leader in self.members(CONDUCTOR))
        return self._runner.run(self._score(member)) is not None

    async def _score(self, member: Member) -> object:
        return await self._redis.execute_command("ZSCORE", keys.WORKERS, member.id)

    def is_whole(self) -> bool:
        """Every role has the workers it is meant to have, two conductors are at work, and one of them leads."""
        for stage in self._config.graph_declaration().stages:
            if len(self.members(stage.name)) < self._config.stage(stage.name).replicas:
                return False
        conductors = find("conductor")
        at_work = {pid for pid, process in conductors.items() if is_connected(process, self._port)}
        return len(at_work) >= NUM_CONDUCTORS and any(leader.pid in at_work for leader in self.members(CONDUCTOR))

    def residue(self) -> Residue:
        return self._runner.run(self._residue())

    async def _residue(self) -> Residue:
        workers: list[WorkerView] = await self._client.workers()
        roles = await self._client.roles()
        left = await self._keys_without_end({str(view.id) for view in workers})
        return Residue(
            live=await self._client.live_count(),
            queued=sum(role.queue_depth for role in roles),
            running=sum(view.running for view in workers),
            arena_slots=sum(view.slots_used for view in workers),
            kv_pages=sum(view.pages_used for view in workers),
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
