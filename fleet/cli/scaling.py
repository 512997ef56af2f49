"""How `fleet up` follows the numbers of workers that persons order: which of its workers it starts,
and which one it lets finish its tasks before it stops it. The script `share_workers` decides how
many of a role's workers this `fleet up` runs.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import redis
from redis.exceptions import RedisError

from fleet.cli.supervise import REDIS_START_S
from fleet.config.roles import Role
from fleet.control import keys, scripts
from fleet.control.connect import connect_for_a_call, exchange, run, text, texts
from fleet.control.outage import Outage
from fleet.control.starting import place_here
from fleet.core.ids import RoleName, WorkerId
from fleet.telemetry.views import MAX_REPLICAS

FOLLOW_S, LEASE_S, TIMEOUT_S = 1.0, 15.0, 1.0
ORDERED_BY = "fleet up"
"""Name under which the journal lists the drain and resume orders of this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWorker:
    """A worker process that this `fleet up` keeps. `number`: number within the role, from 1. `id`:
    worker id; "" until the worker has joined the fleet. `is_standby`: True if it receives no tasks.
    `is_draining`: True if it accepts no more tasks.
    """

    number: int
    id: WorkerId = WorkerId("")
    is_standby: bool = False
    is_draining: bool = False
    num_tasks: int = 0


class KeptProcess(Protocol):
    """A keeper of `fleet up`, as `KeeperProcess` describes it."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def is_retired(self) -> bool: ...


class KeeperTable(Protocol):
    """The keepers of `fleet up`, by process name, as `FleetManager` has them."""

    def find(self, name: str) -> KeptProcess | None: ...
    def retire(self, name: str) -> None: ...
    def say(self, text: str) -> None: ...


def choose_leaving(workers: Sequence[KeptWorker]) -> KeptWorker:
    """Return the worker whose end costs least: first a worker that has not joined yet, then one
    that is not on standby, then the one with the fewest tasks, then the one with the highest
    number.
    """
    return min(workers, key=lambda w: (bool(w.id), w.is_standby, w.num_tasks, -w.number))


class ScaledRole:
    """The workers of one role in this `fleet up`.

    `num_possible`: how many workers that receive tasks can run here: `MAX_REPLICAS` until a worker
    fails to start, then the number that runs. Another order resets it.
    """

    def __init__(
        self, role: Role, keepers: KeeperTable, start: Callable[[RoleName, int], None]
    ) -> None:
        self.role = role
        self.num_possible = MAX_REPLICAS
        self._keepers, self._start = keepers, start
        self._numbers = set(range(1, role.replicas + role.standby + 1))
        self._leaving: set[int] = set()
        self._wanted: int | None = None

    def settle(self, client: redis.Redis, wanted: int | None, share: int) -> None:
        """Start workers, or let some leave, so that `share` of them accept tasks here. `wanted`:
        number ordered for the whole fleet; None if there is no order. Before the first order
        nothing changes, not even after a person has stopped a worker.
        """
        if wanted is None and self._wanted is None:
            return
        if wanted != self._wanted:
            self._wanted, self.num_possible = wanted, MAX_REPLICAS
        self._note_ends()
        kept = {worker.number: worker for worker in self._read_workers(client)}
        staying = {n: worker for n, worker in kept.items() if n not in self._leaving}
        target = share + self.role.standby if share else 0
        for number in sorted(self._leaving & kept.keys())[: max(0, target - len(staying))]:
            self._leaving.remove(number)
            staying[number] = kept[number]
            if kept[number].is_draining:
                run(client, scripts.order(kept[number].id, "resume", ORDERED_BY))
        while len(staying) > target:
            number = choose_leaving(tuple(staying.values())).number
            self._leaving.add(number)
            del staying[number]
            self._say(number, f"finishes its tasks and leaves: {share} wanted here")
        for number in self._leaving & kept.keys():
            self._let_leave(client, kept[number])
        for _ in range(min(target, self.num_possible + self.role.standby) - len(staying)):
            number = min(set(range(1, len(self._numbers) + 2)) - self._numbers)
            self._numbers.add(number)
            self._say(number, f"starts: {share} wanted here")
            self._start(self.role.name, number)

    def _name(self, number: int) -> str:
        return f"{self.role.name}.{number}"

    def _say(self, number: int, text: str) -> None:
        self._keepers.say(f"{self._name(number)} {text}")

    def _let_leave(self, client: redis.Redis, worker: KeptWorker) -> None:
        """Drain a worker; once it is draining and has no tasks, stop it."""
        if worker.id and not worker.is_draining:
            run(client, scripts.order(worker.id, "drain", ORDERED_BY))
        elif worker.num_tasks == 0:
            self._keepers.retire(self._name(worker.number))

    def _note_ends(self) -> None:
        """Forget the workers whose keepers are gone. If such a worker was not leaving, it could not
        start: lower `num_possible`. Retire the keepers of workers that a person stopped.
        """
        for number in sorted(self._numbers):
            keeper = self._keepers.find(self._name(number))
            if keeper is None:
                self._numbers.remove(number)
                if number not in self._leaving:
                    staying = len(self._numbers - self._leaving)
                    self.num_possible = max(0, staying - self.role.standby)
                self._leaving.discard(number)
            elif keeper.has_ended:
                self._leaving.add(number)
                self._keepers.retire(keeper.name)

    def _read_workers(self, client: redis.Redis) -> Iterator[KeptWorker]:
        """Yield the workers whose keepers have not been retired, as they are listed in Redis."""
        found = ((number, self._keepers.find(self._name(number))) for number in self._numbers)
        kept = {n: keeper.pid for n, keeper in found if keeper and not keeper.is_retired}
        places = [("HGET", keys.PLACES, place_here(pid or 0)) for pid in kept.values()]
        for number, raw in zip(kept, exchange(client, (), *places), strict=True):
            worker = WorkerId(text(raw))
            record, num_tasks = exchange(
                client,
                (),
                ("HMGET", keys.worker(worker), "standby", "draining"),
                ("SCARD", keys.worker_tasks(worker)),
            )
            standby, draining = texts(record)
            yield KeptWorker(
                number=number,
                id=worker,
                is_standby=standby == "1",
                is_draining=draining == "1",
                num_tasks=cast(int, num_tasks),
            )


class WorkerScaling:
    """Makes this `fleet up` run its share of the ordered numbers of workers, under a lease as one
    of the fleet's supervisors. `start`: starts a worker, given its role and number, under a keeper.
    While Redis cannot be reached, the workers stay as they are.
    """

    def __init__(
        self,
        redis_url: str,
        roles: Sequence[Role],
        keepers: KeeperTable,
        start: Callable[[RoleName, int], None],
    ) -> None:
        self._redis_url = redis_url
        self._id = place_here(os.getpid())
        self._roles = [
            ScaledRole(role, keepers, start)
            for role in roles
            if not role.optional and not role.hosts_spans
        ]
        self._outage = Outage("the follower of ordered workers", quiet_s=REDIS_START_S)
        self._next_s = 0.0

    def follow(self) -> None:
        """Renew the lease and adjust the workers of each role; do nothing if the last time was less
        than `FOLLOW_S` ago.
        """
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + FOLLOW_S
        figures = [(each.role.name, each.role.replicas, each.num_possible) for each in self._roles]
        renewal = scripts.share_workers(self._id, int(LEASE_S * 1e6), figures)
        with self._connected() as client:
            answers = texts(exchange(client, [renewal])[0])
            for role, wanted, share in zip(self._roles, answers[::2], answers[1::2], strict=True):
                role.settle(client, int(wanted) if wanted else None, int(share))

    def end(self) -> None:
        """Give up the lease, so that other supervisors take over this share at once."""
        with self._connected() as client:
            exchange(client, [scripts.share_workers(self._id, 0)])

    @contextmanager
    def _connected(self) -> Iterator[redis.Redis]:
        try:
            with connect_for_a_call(self._redis_url, TIMEOUT_S) as client:
                yield client
        except RedisError as error:
            self._next_s = time.monotonic() + max(FOLLOW_S, self._outage.add(error))
        else:
            self._outage.end()
