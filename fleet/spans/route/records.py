"""Reader of span workers' records in Redis, for anchors and neighbours: address, key, loaded span,
anchor.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import redis

from fleet.control import keys
from fleet.control.connect import exchange, pairs, text
from fleet.core.ids import RoleName, WorkerId
from fleet.process.fleet_secret import FleetSecret
from fleet.spans.route.division import RouteWorker
from fleet.worker.process.endpoints import endpoint_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMembers:
    """Whether a route's workers are still there. `are_listed`: False if a worker has left or was
    fenced. `leaving`: workers that drain and are about to leave.
    """

    are_listed: bool
    leaving: tuple[WorkerId, ...]


class SpanRecords:
    """Reads the records of span workers in Redis. If the fleet has a secret, unsigned records are
    ignored with a warning.
    """

    def __init__(self, client: redis.Redis, secret: FleetSecret | None) -> None:
        self._client, self._secret = client, secret
        self._refused: set[WorkerId] = set()

    def read(self, workers: Sequence[WorkerId]) -> list[RouteWorker]:
        """Return the records of `workers`, leaving out workers without a valid record."""
        replies = exchange(
            self._client, (), *(("HGETALL", keys.worker(worker)) for worker in workers)
        )
        found = [
            self._parse(worker, pairs(reply))
            for worker, reply in zip(workers, replies, strict=True)
        ]
        return [record for record in found if record is not None]

    def find(self, role: RoleName) -> list[RouteWorker]:
        """Return the records of a role's workers that accept work or stand by."""
        statuses = ("accepting", "standby")
        replies = exchange(
            self._client,
            (),
            *(("ZRANGE", keys.role_workers(role, status), 0, -1) for status in statuses),
        )
        names = [WorkerId(text(name)) for reply in replies for name in cast("list[bytes]", reply)]
        return self.read(names) if names else []

    def all_listed(self, workers: Sequence[WorkerId]) -> bool:
        """Return True if none of these workers has left or was fenced."""
        return self.read_members(workers).are_listed

    def read_members(self, workers: Sequence[WorkerId]) -> "RouteMembers":
        """Return whether a route's workers are still listed, and which of them are leaving."""
        drains = (("HGET", keys.worker(worker), "draining") for worker in workers)
        deadlines, *draining = exchange(
            self._client, (), ("ZMSCORE", keys.WORKERS, *workers), *drains
        )
        leaving = [worker for worker, flag in zip(workers, draining, strict=True) if flag == b"1"]
        return RouteMembers(
            are_listed=None not in cast("list[object]", deadlines), leaving=tuple(leaving)
        )

    def another_serves(self, role: RoleName, anchor: WorkerId) -> bool:
        """Return True if another worker of the anchor's role accepts tasks and has a complete
        route.
        """
        (reply,) = exchange(
            self._client, (), ("ZRANGE", keys.role_workers(role, "accepting"), 0, -1)
        )
        others = [
            name for raw in cast("list[bytes]", reply) if (name := WorkerId(text(raw))) != anchor
        ]
        gaps = (
            exchange(self._client, (), *(("HGET", keys.worker(other), "gap") for other in others))
            if others
            else []
        )
        return b"" in gaps

    def num_accepting(self, role: RoleName) -> int:
        """Return how many workers of a role accept tasks."""
        (reply,) = exchange(self._client, (), ("ZCARD", keys.role_workers(role, "accepting")))
        return cast(int, reply)

    def num_tasks(self, worker: WorkerId) -> int:
        (reply,) = exchange(self._client, (), ("SCARD", keys.worker_tasks(worker)))
        return cast(int, reply)

    def _parse(self, worker: WorkerId, fields: Mapping[str, bytes]) -> RouteWorker | None:
        endpoint = endpoint_of("span", fields, self._secret)
        if endpoint is None:
            return None
        if self._secret is not None and not self._secret.verifies(worker, fields):
            if worker not in self._refused:
                self._refused.add(worker)
                log.warning(
                    "span worker %s is not used: its record in Redis is not signed with "
                    "security.fleet_secret",
                    worker,
                )
            return None
        return RouteWorker(
            worker=worker,
            address=endpoint.address,
            key=endpoint.key,
            span=text(fields.get("span")),
            anchor=text(fields.get("anchor")),
            stands_by=text(fields.get("standby")) == "1",
            memory=int(text(fields.get("memory")) or "0"),
        )
