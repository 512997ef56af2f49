"""Recovery of jobs whose worker was killed: such jobs fail as soon as another worker of the queue
looks. Runs no job.

A worker is dead if its process is known to have ended on this machine, or if its lease in Redis has
lapsed. The lease alone decides for a worker of another machine.
"""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec
import psutil
from redis.exceptions import WatchError
from rq import Queue
from rq.executions import Execution
from rq.worker import BaseWorker

from fleet.control.jobs import DAMAGED

log = logging.getLogger(__name__)

START_TOLERANCE_S = 5.0
"""Largest difference, in seconds, between two readings of one process's start time. The start time
is computed from the system clock, which may be set between the readings.
"""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
REMEDY = (
    "a batch continues by itself; retry another job on the console's page /jobs, or by POST "
    "/v1/fleet/jobs/{job_id}/retry"
)
PROCESS = "process"
"""Field of rq's worker record that stores the `JobWorkerProcess`."""


class JobWorkerProcess(msgspec.Struct, frozen=True):
    """Identity of a job worker's process. `machine`: the boot and the namespace of process ids in
    which `pid` is valid. `started_s`: Unix time of the start.
    """

    machine: str
    pid: int
    started_s: float


def this_process() -> JobWorkerProcess:
    return JobWorkerProcess(_machine(), os.getpid(), psutil.Process().create_time())


def _machine() -> str:
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def is_known_dead(place: JobWorkerProcess) -> bool:
    """Return True if the process `place` ran on this machine and is gone, even if its pid is in use
    again.
    """
    if place.machine != _machine():
        return False
    try:
        process = psutil.Process(place.pid)
        return (
            process.status() == psutil.STATUS_ZOMBIE
            or abs(process.create_time() - place.started_s) > START_TOLERANCE_S
        )
    except psutil.NoSuchProcess:
        return True


def fail_jobs_of_dead_workers(worker: BaseWorker, queue: Queue) -> list[str]:
    """Fail every job that a dead worker had begun, and put the jobs that such a worker had taken
    but not begun back at the head of the queue.

    `worker`: the calling worker, which must not run a job meanwhile. Returns the ids of the failed
    jobs. Raises: RedisError.
    """
    # fails those whose lease has lapsed
    begun = queue.started_job_registry.get_job_and_execution_ids()
    taken = queue.connection.llen(queue.intermediate_queue_key)
    if not begun and not taken:
        return []
    dead = _dead_workers(worker, queue)
    failed = [
        job_id for job_id, execution in begun if _fail(worker, queue, dead, job_id, execution)
    ]
    _return_taken(worker, queue, dead)
    for name in dead:
        record = worker.find_by_key(
            f"{worker.redis_worker_namespace_prefix}{name}", connection=queue.connection
        )
        if record is not None:
            record.register_death()
    return failed


def _dead_workers(worker: BaseWorker, queue: Queue) -> Mapping[str, JobWorkerProcess]:
    """Return the processes of registered workers that are dead, by worker name."""
    found: dict[str, JobWorkerProcess] = {}
    for key in worker.all_keys(queue=queue):
        raw = queue.connection.hget(key, PROCESS)
        try:
            place = msgspec.json.decode(cast(bytes, raw or b""), type=JobWorkerProcess)
        except msgspec.DecodeError:
            continue
        if is_known_dead(place):
            found[key.removeprefix(worker.redis_worker_namespace_prefix)] = place
    return found


def _fail(
    worker: BaseWorker,
    queue: Queue,
    dead: Mapping[str, JobWorkerProcess],
    job_id: str,
    execution_id: str,
) -> bool:
    try:
        execution = Execution.fetch(execution_id, job_id, queue.connection)
        job = queue.fetch_job(job_id)
    except DAMAGED:
        return False
    place = dead.get(execution.worker_name)
    if place is None or job is None:
        return False
    reason = f"its job worker, process {place.pid}, was killed; {REMEDY}"
    log.warning("job %s has failed: %s", job_id, reason)
    queue.connection.lrem(queue.intermediate_queue_key, 0, job_id)
    worker.execution = execution
    worker.handle_job_failure(job, queue, exc_string=reason)
    return True


def _return_taken(worker: BaseWorker, queue: Queue, dead: Mapping[str, JobWorkerProcess]) -> None:
    """Return to the queue the jobs that a dead worker took and did not begin. Does nothing while
    another live worker exists, which may have taken them. `dead`: processes of dead workers by
    name.
    """
    with queue.connection.pipeline() as pipe:
        pipe.watch(queue.intermediate_queue_key)
        taken = [
            job_id.decode()
            for job_id in cast("list[bytes]", pipe.lrange(queue.intermediate_queue_key, 0, -1))
        ]
        # Read after the list: who took one of its jobs was registered before.
        registered = [key for key in worker.all_keys(queue=queue) if pipe.exists(key)]
        alive = {
            key.removeprefix(worker.redis_worker_namespace_prefix) for key in registered
        } - set(dead)
        if not taken or alive - {worker.name}:
            return
        pipe.multi()
        pipe.delete(queue.intermediate_queue_key)
        pipe.lpush(queue.key, *taken)
        try:
            pipe.execute()
        except WatchError:
            log.debug("another job worker took a job meanwhile; the next look decides")
