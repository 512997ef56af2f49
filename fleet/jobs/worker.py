"""The process that runs jobs, one at a time, each in a fork of its own. It stops at once: an interrupted job counts as failed."""

import logging
import signal
from types import FrameType

from redis import Redis
from rq import Worker
from rq.serializers import JSONSerializer

from fleet.control.jobs import QUEUE

log = logging.getLogger(__name__)


class JobWorker(Worker):
    """rq's worker, but a stop signal ends the job under way: the fleet must not wait an hour for a benchmark."""

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The job's fork is killed; rq then sees it dead, records the failure and leaves its loop."""
        if self.horse_pid:
            log.warning("stopping; the job under way is ended")
            self.kill_horse(signal.SIGKILL)
        super().request_stop(signum, frame)


def run_jobs(connection: Redis) -> None:
    """Work until SIGTERM. rq waits out a Redis that is away for a while."""
    JobWorker([QUEUE], connection=connection, serializer=JSONSerializer).work(with_scheduler=False)
