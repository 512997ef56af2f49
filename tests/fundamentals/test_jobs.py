"""Jobs seen and ordered through the gateway's port: each state, its progress, its traceback; over real rq, without its worker."""

from collections.abc import Iterator

import pytest
import redis
from rq.job import Job as RqJob
from rq.results import Result
from rq.serializers import JSONSerializer

from fleet.config import load_config
from fleet.control import jobs
from fleet.control.client import FleetClient
from fleet.core.errors import BadInput, Conflict, NotFound
from fleet.core.telemetry import JobProgress


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def board(redis_url: str) -> FleetClient:
    return await FleetClient.connect(redis_url, load_config(None, ("engine=fake",)))


def rq_job(connection: redis.Redis, job: str) -> RqJob:
    return RqJob.fetch(job, connection=connection, serializer=JSONSerializer)


async def test_a_job_is_followed_from_the_queue_to_its_failure(connection: redis.Redis, board: FleetClient) -> None:
    telemetry = board.telemetry
    first, second = await telemetry.submit_job("bench", ["--scale"]), await telemetry.submit_job("bench", [])
    assert [job.id for job in await telemetry.jobs()] == [second.id, first.id]
    assert first.state == "queued" and first.arguments == ("--scale",) and first.created_us > 0 and first.progress is None
    running = rq_job(connection, first.id)
    jobs.note_progress(running, JobProgress(done=3, total=9, note="3 of 9"))
    found = await telemetry.job(first.id)
    assert found is not None and found.progress == JobProgress(done=3, total=9, note="3 of 9")
    queue = jobs.open_queue(connection)
    queue.remove(first.id)
    running.set_status(jobs.JobStatus.FAILED)
    queue.failed_job_registry.add(running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>")
    Result.create_failure(running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>")
    failed = await telemetry.job(first.id)
    assert failed is not None and failed.state == "failed" and failed.error == "ValueError: no <b>"
    assert failed.traceback.startswith("Traceback") and failed.result == ""
    again = await telemetry.retry_job(first.id)
    assert again.id != first.id and again.arguments == ("--scale",) and again.state == "queued"
    await telemetry.delete_job(first.id)
    assert await telemetry.job(first.id) is None and first.id not in {job.id for job in await telemetry.jobs()}
    await board.stop()


async def test_a_queued_job_is_taken_out_and_what_cannot_be_is_refused(board: FleetClient) -> None:
    telemetry = board.telemetry
    job = await telemetry.submit_job("bench", [])
    with pytest.raises(Conflict, match="not ended"):
        await telemetry.retry_job(job.id)
    await telemetry.stop_job(job.id)
    stopped = await telemetry.job(job.id)
    assert stopped is not None and stopped.state == "canceled"
    with pytest.raises(Conflict, match="ended already"):
        await telemetry.stop_job(job.id)
    for call in (telemetry.retry_job("none"), telemetry.stop_job("none"), telemetry.delete_job("none")):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(BadInput, match="bench"):
        await telemetry.submit_job("rm", ["-rf"])
    await board.stop()


async def test_a_job_of_foreign_make_does_no_harm(connection: redis.Redis, board: FleetClient) -> None:
    jobs.open_queue(connection).enqueue("time.sleep", 600, meta={"progress": {"done": "much"}})
    (job,) = await board.telemetry.jobs()
    assert (job.kind, job.arguments, job.progress, job.state) == ("", (), None, "queued")
    await board.stop()
