"""The worker process that runs jobs, one at a time, each in a forked process. A stop signal kills
the running job, which then counts as failed: the worker does not wait for it.

On Linux, a job's processes end with the worker even if the worker is killed; the job is failed when
another worker next looks for jobs.
"""

import datetime
import logging
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import msgspec
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import StopRequested
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from fleet.batches.store import BatchStore
from fleet.control.job_files import folder_of, remove_old_folders
from fleet.control.jobs import QUEUE, kept_ids
from fleet.control.outage import Outage, is_away
from fleet.core.errors import NotFound
from fleet.jobs.batch import queue_unfinished
from fleet.jobs.dead_workers import PROCESS, REMEDY, fail_jobs_of_dead_workers, this_process
from fleet.jobs.measured import MEASURED, TEMPORARY, Measured
from fleet.jobs.record import JobRecord
from fleet.process.beat import UNBOUNDED_S, beat
from fleet.process.parent_death import signalled_with_parent

log = logging.getLogger(__name__)

STANDING_S = 60.0
"""Longest time in seconds for which the worker's loop may stand still, mostly in calls to Redis,
before the worker's keeper takes the process for hung.
"""
STOP_POLL_S = 2
"""Seconds between two checks of a waiting worker for a stop signal that rq missed."""


class JobWorker(Worker):
    """rq's worker, changed so that a stop signal kills the running job: a fleet that stops must not
    wait an hour for a benchmark.

    A record that `JobRecord` refuses fails without being run. Before each wait for a job, the jobs
    of dead workers are failed, and unfinished batches are queued. Folders of deleted jobs are
    removed during rq's maintenance.
    """

    data_dir = Path()
    batches: BatchStore | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outage = Outage("the job worker")
        self._process = this_process()

    def serialize(self) -> dict[str, Any]:
        """Return the worker's record for Redis, with the identity of its process added, by which
        other workers can tell that it is dead.
        """
        return {**super().serialize(), PROCESS: msgspec.json.encode(self._process).decode()}

    def fork_work_horse(self, job: RqJob, queue: Queue) -> None:
        self._die_with_worker = signalled_with_parent(signal.SIGKILL)
        super().fork_work_horse(job, queue)

    def main_work_horse(self, job: RqJob, queue: Queue) -> NoReturn:
        if self._die_with_worker is not None:
            self._die_with_worker()
        super().main_work_horse(job, queue)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle a stop signal: kill the job's process. rq then records the failure and leaves its
        loop.
        """
        if self.horse_pid:
            log.warning("the job worker stops, so its running job is killed; %s", REMEDY)
            self.kill_horse(signal.SIGKILL)
        self._stop_requested = True
        super().request_stop(signum, frame)

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[RqJob, Queue] | None:
        """Wait for the next job or for a stop signal. Raises: StopRequested after a stop signal.

        rq's handler raises StopRequested wherever the signal arrives, and redis-py discards
        exceptions raised inside its own measurements (seen once in 35 stops): rq would then wait
        for the next job, for up to 7 minutes.
        """
        while not self._stop_requested:
            beat(STANDING_S, STANDING_S)
            try:
                for job_id in fail_jobs_of_dead_workers(self, self.queues[0]):
                    self._remove_temporary(job_id)
                if self.batches is not None:
                    queue_unfinished(self.connection, self.batches)
                found = super().dequeue_job_and_maintain_ttl(STOP_POLL_S, STOP_POLL_S)
            except RedisError as error:
                # rq itself waits for lost connections only.
                if not is_away(error):
                    raise
                time.sleep(self.outage.add(error))
                continue
            self.outage.end()
            if found is not None:
                return found
        raise StopRequested

    def execute_job(self, job: RqJob, queue: Queue) -> None:
        beat(UNBOUNDED_S, UNBOUNDED_S)  # a job may take as long as its own limit permits
        refusal = cast(JobRecord, job).refusal or self._wrong_id(job.id)
        if refusal:
            self._refuse(job, queue, refusal)
            return
        try:
            super().execute_job(job, queue)
        finally:
            self._remove_temporary(job.id)

    def _remove_temporary(self, job_id: str) -> None:
        """Remove the temporary files of a job, which a killed job cannot remove itself."""
        if not self._wrong_id(job_id):
            shutil.rmtree(folder_of(self.data_dir, job_id) / TEMPORARY, ignore_errors=True)

    def run_maintenance_tasks(self) -> None:
        super().run_maintenance_tasks()
        try:
            remove_old_folders(self.data_dir, lambda job_ids: kept_ids(self.connection, job_ids))
        except OSError as error:
            log.warning("folders of deleted jobs could not be removed: %s", error)

    def _wrong_id(self, job_id: str) -> str:
        try:
            folder_of(self.data_dir, job_id)
        except NotFound as error:
            return error.message
        return ""

    def _refuse(self, job: RqJob, queue: Queue, reason: str) -> None:
        log.error("job %s is refused and was not run: %s", job.id, reason)
        self.prepare_execution(job)
        self.prepare_job_execution(job, remove_from_intermediate_queue=True)
        job.ended_at = datetime.datetime.now(datetime.UTC)
        self.handle_job_failure(job, queue, exc_string=f"refused, and not run: {reason}")


def run_jobs(connection: Redis, measured: Measured) -> None:
    """Run jobs until SIGTERM. `measured`: deployment on which the jobs run. rq reconnects after an
    outage of Redis.
    """
    MEASURED.set(measured)
    worker = JobWorker(
        [QUEUE], connection=connection, serializer=JSONSerializer, job_class=JobRecord
    )
    worker.data_dir = measured.config.data_dir
    worker.batches = BatchStore(measured.config)
    worker.work(with_scheduler=False)
