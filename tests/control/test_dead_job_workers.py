"""Jobs of job workers that died without a word: failed if the death is known, and never taken from
a living worker.
"""

from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
import redis
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from fleet.control import jobs
from fleet.jobs.dead_workers import (
    PROCESS,
    JobWorkerProcess,
    fail_jobs_of_dead_workers,
    this_process,
)
from fleet.jobs.record import JobRecord
from fleet.jobs.worker import JobWorker

NO_PID = 2**22 + 1
"""More than the largest process id."""
HERE = this_process()
GONE = JobWorkerProcess(HERE.machine, NO_PID, HERE.started_s)
REUSED = JobWorkerProcess(HERE.machine, HERE.pid, HERE.started_s - 60)
ELSEWHERE = JobWorkerProcess("another machine", NO_PID, HERE.started_s)


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def registered(connection: redis.Redis, place: JobWorkerProcess = HERE) -> JobWorker:
    """Register a worker whose process is at `place`."""
    worker = JobWorker(
        [jobs.QUEUE], connection=connection, serializer=JSONSerializer, job_class=JobRecord
    )
    worker.register_birth()
    connection.hset(worker.key, PROCESS, msgspec.json.encode(place))
    return worker


def begin(connection: redis.Redis, worker: JobWorker) -> str:
    """Let the worker begin a new job, as far as it gets before the job's process runs; return the
    job's id.
    """
    submitted = jobs.submit(connection, "bench", {})
    queue = worker.queues[0]
    connection.lmove(queue.key, queue.intermediate_queue_key)
    found = queue.fetch_job(submitted.id)
    assert found is not None
    worker.prepare_execution(found)
    worker.prepare_job_execution(found, remove_from_intermediate_queue=True)
    return submitted.id


def state(connection: redis.Redis, job_id: str) -> str:
    found = jobs.job(connection, job_id)
    assert found is not None
    return found.state


@pytest.mark.parametrize("place", [GONE, REUSED], ids=["no process", "another process of its pid"])
def test_job_of_a_worker_with_an_ended_process_fails_immediately(
    connection: redis.Redis, place: JobWorkerProcess
) -> None:
    dead = registered(connection, place)
    job_id = begin(connection, dead)
    worker = registered(connection)
    assert fail_jobs_of_dead_workers(worker, worker.queues[0]) == [job_id]
    found = jobs.job(connection, job_id)
    assert found is not None and found.state == "failed"
    assert f"process {place.pid}, was killed" in found.error and "/retry" in found.error
    assert worker.all_keys(queue=worker.queues[0]) == [worker.key], (
        "the dead worker is registered no more"
    )
    assert fail_jobs_of_dead_workers(worker, worker.queues[0]) == []


@pytest.mark.parametrize("place", [HERE, ELSEWHERE], ids=["here", "on another machine"])
def test_job_of_a_worker_that_may_live_is_left_alone(
    connection: redis.Redis, place: JobWorkerProcess
) -> None:
    job_id = begin(connection, registered(connection, place))
    worker = registered(connection)
    assert fail_jobs_of_dead_workers(worker, worker.queues[0]) == []
    assert state(connection, job_id) == "started"


def test_job_of_a_worker_on_another_machine_fails_when_its_lease_has_lapsed(
    connection: redis.Redis,
) -> None:
    other = registered(connection, ELSEWHERE)
    job_id = begin(connection, other)
    registry = other.queues[0].started_job_registry
    (member,) = cast("list[bytes]", connection.zrange(registry.key, 0, -1))
    connection.zadd(registry.key, {member: 1})
    worker = registered(connection)
    fail_jobs_of_dead_workers(worker, worker.queues[0])
    assert state(connection, job_id) == "failed"


@pytest.mark.parametrize("place", [GONE, ELSEWHERE], ids=["dead", "may live"])
def test_job_taken_and_not_begun_returns_to_the_queue_if_no_living_worker_may_have_it(
    connection: redis.Redis, place: JobWorkerProcess
) -> None:
    registered(connection, place)
    first, second = (jobs.submit(connection, "bench", {}).id for _ in range(2))
    worker = registered(connection)
    queue = worker.queues[0]
    connection.lmove(queue.key, queue.intermediate_queue_key)
    fail_jobs_of_dead_workers(worker, queue)
    assert queue.job_ids == ([first, second] if place is GONE else [second])
    assert state(connection, first) == JobStatus.QUEUED


def test_damaged_entries_of_begun_jobs_stop_no_worker(connection: redis.Redis) -> None:
    worker = registered(connection)
    queue = worker.queues[0]
    connection.zadd(queue.started_job_registry.key, {"unknown:1": 2e10})
    connection.hset(registered(connection, GONE).key, PROCESS, b"no JSON")
    assert fail_jobs_of_dead_workers(worker, queue) == []
