"""A process that is registered in Redis under a lease, as one incarnation after another. Knows no
task and no engine.
"""

import logging
import os
import socket
import threading

import redis
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import connect, run
from fleet.control.outage import Outage, is_away
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import RoleName, WorkerId, new_worker_id
from fleet.core.log_labels import Labels
from fleet.process.beat import LEAVING_S, START_S, beat

log = logging.getLogger(__name__)


class RegisteredProcess:
    """A process that is registered in Redis: a sequence of incarnations, each with its own id and
    lease. What the process has loaded outlives them.

    A subclass defines `live`, which runs one incarnation, and `drop_work`, which drops all that
    belongs to an incarnation.
    """

    def __init__(
        self, config: FleetConfig, role: RoleName, redis_url: str, labels: Labels | None = None
    ) -> None:
        self.config = config
        self.role = role
        self.redis_url = redis_url
        self.labels = labels or Labels("worker")
        self.stop, self.outage = threading.Event(), Outage(f"worker {role}")
        self.last_id: WorkerId | None = None

    @property
    def has_joined(self) -> bool:
        """True once the first incarnation has begun (in `WorkerProcess`, once one has registered).
        From then on, an error of Redis ends the incarnation and begins another, instead of ending
        the process.
        """
        return self.last_id is not None

    def live(self, worker: WorkerId, client: redis.Redis, lease_client: redis.Redis) -> None:
        """Run one incarnation: register it as `worker` and serve until the process is stopped or
        the incarnation is over. `lease_client`: connection for the lease's thread.
        """
        raise AssertionError("defined by each kind of process")

    def drop_work(self) -> None:
        """Drop what belongs to an incarnation that is over."""

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._incarnation()
            except (RedisError, RedisUnreachable) as error:
                is_outage = isinstance(error, RedisError) and is_away(error)
                if not self.has_joined and not is_outage:
                    raise
                self.drop_work()
                self.stop.wait(self._pause_s(error))
        beat(LEAVING_S, LEAVING_S)

    def _pause_s(self, error: RedisError | RedisUnreachable) -> float:
        """Log why the incarnation ended, once per outage of Redis; return the seconds to wait
        before the next one.
        """
        if isinstance(error, RedisError) and is_away(error):
            return self.outage.add(error)
        if isinstance(error, RedisError):
            log.warning(
                "this incarnation's inbox is gone (%s): it was fenced; the worker joins again",
                error,
            )
        return self.outage.pause_s()

    def _incarnation(self) -> None:
        beat(START_S, START_S)
        with (
            connect(self.redis_url, one_connection=True) as client,
            connect(self.redis_url) as lease_client,
        ):
            worker = new_worker_id(self.role, socket.gethostname(), os.getpid())
            self.labels.worker, self.labels.stage = worker, self.config.role(self.role).stage
            if self.last_id is not None:
                # Other workers need not wait for the lease of an incarnation that is certainly
                # over.
                run(client, scripts.fence_worker("", self.last_id))
            self.last_id = worker
            self.live(worker, client, lease_client)
