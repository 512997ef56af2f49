"""Jobs (rq) are listed and controlled through the gateway's port. The jobs of job workers that died
silently are failed; no job is taken from a living worker.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis
from rq import Queue
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer

from fleet.batches.records import ENDPOINTS, StoredBatch
from fleet.batches.store import BatchStore
from fleet.config import load_config
from fleet.control import jobs
from fleet.control.client import FleetClient
from fleet.control.connect import connect
from fleet.control.job_files import (
    MAX_FILE_BYTES,
    MAX_FOLDERS,
    make_folder,
    read_file,
    remove_old_folders,
)
from fleet.core.errors import BadInput, Conflict, NotFound
from fleet.core.jobs import MEASURE_TAKES, BatchArguments, BenchArguments, Measure
from fleet.jobs.batch import queue_unfinished
from fleet.jobs.bench import OF_THE_GATEWAY, command_line, report_options
from fleet.jobs.dead_workers import (
    PROCESS,
    JobWorkerProcess,
    fail_jobs_of_dead_workers,
    this_process,
)
from fleet.jobs.measured import Measured
from fleet.jobs.record import JobRecord
from fleet.jobs.worker import JobWorker
from fleet.lab.measure.options import BenchOptions, parse
from fleet.telemetry.views import JobProgress
from tests.support import RedisProcess, wait_until

MEASURED = Measured(config=load_config(None, ("engine=fake",)), url="http://127.0.0.1:1234")


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def client(gateway_client: FleetClient) -> FleetClient:
    return gateway_client


def rq_job(connection: redis.Redis, job: str) -> RqJob:
    return RqJob.fetch(job, connection=connection, serializer=JSONSerializer)


async def test_job_is_shown_from_queue_to_failure(
    connection: redis.Redis, client: FleetClient
) -> None:
    first, second = (
        await client.jobs.submit("bench", {"measure": "scale"}),
        await client.jobs.submit("bench", {}),
    )
    assert [job.id for job in await client.jobs.list_jobs()] == [second.id, first.id]
    assert first.state == "queued" and first.created_us > 0 and first.progress is None
    assert first.arguments == BenchArguments(measure="scale").as_json()
    running = rq_job(connection, first.id)
    jobs.note_progress(running, JobProgress(done=3, total=9, note="3 of 9"))
    found = await client.jobs.find(first.id)
    assert found is not None and found.progress == JobProgress(done=3, total=9, note="3 of 9")
    queue = jobs.open_queue(connection)
    queue.remove(first.id)
    running.set_status(jobs.JobStatus.FAILED)
    queue.failed_job_registry.add(
        running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>"
    )
    Result.create_failure(
        running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>"
    )
    failed = await client.jobs.find(first.id)
    assert failed is not None and failed.state == "failed" and failed.error == "ValueError: no <b>"
    assert failed.traceback.startswith("Traceback") and failed.result == ""
    retried = await client.jobs.retry(first.id)
    assert (
        retried.id != first.id
        and retried.arguments == first.arguments
        and retried.state == "queued"
    )
    await client.jobs.delete(first.id)
    assert await client.jobs.find(first.id) is None and first.id not in {
        job.id for job in await client.jobs.list_jobs()
    }


def test_job_worker_waits_while_redis_refuses_writes(own_redis: RedisProcess) -> None:
    """A job worker keeps running while Redis refuses writes, and takes the next job afterwards."""
    with connect(own_redis.url) as admin, redis.Redis.from_url(own_redis.url) as connection:
        queue = Queue(jobs.QUEUE, connection=connection, serializer=JSONSerializer)
        worker = JobWorker(
            [queue], connection=connection, serializer=JSONSerializer, job_class=JobRecord
        )
        submitted = queue.enqueue("time.sleep", 600)
        admin.config_set("min-replicas-to-write", 1)
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(worker.dequeue_job_and_maintain_ttl, None)
            wait_until(
                lambda: found.done() or "NOREPLICAS" in worker.outage.cause,
                "the job worker to be refused",
            )
            admin.config_set("min-replicas-to-write", 0)
            taken = found.result(timeout=30)
        assert taken is not None and taken[0].id == submitted.id


async def test_queued_job_is_cancelled_and_invalid_commands_are_refused(
    client: FleetClient,
) -> None:
    job = await client.jobs.submit("bench", {})
    with pytest.raises(Conflict, match="not ended"):
        await client.jobs.retry(job.id)
    await client.jobs.stop(job.id)
    stopped = await client.jobs.find(job.id)
    assert stopped is not None and stopped.state == "canceled"
    with pytest.raises(Conflict, match="ended already"):
        await client.jobs.stop(job.id)
    for call in (client.jobs.retry("none"), client.jobs.stop("none"), client.jobs.delete("none")):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(BadInput, match="bench"):
        await client.jobs.submit("rm", {})


async def test_job_submitted_by_other_code_is_not_run(
    connection: redis.Redis, client: FleetClient
) -> None:
    jobs.open_queue(connection).enqueue("time.sleep", 600, meta={"progress": {"done": "much"}})
    (job,) = await client.jobs.list_jobs()
    assert (job.kind, job.arguments, job.progress, job.state) == ("", None, None, "queued")


async def test_record_of_another_version_is_shown_but_not_retried(
    connection: redis.Redis, client: FleetClient
) -> None:
    queue = jobs.open_queue(connection)
    old = queue.enqueue("fleet.jobs.bench.run", ["--json", "/tmp/x"], meta={"kind": "bench"})
    (job,) = await client.jobs.list_jobs()
    assert (job.kind, job.arguments) == ("bench", None)
    await client.jobs.stop(old.id)
    with pytest.raises(Conflict, match="another version; submit it again"):
        await client.jobs.retry(old.id)


async def test_job_folder_is_private_and_removed_with_its_job(
    client: FleetClient, tmp_path: Path
) -> None:
    job = await client.jobs.submit("bench", {})
    folder = make_folder(tmp_path, job.id)
    assert folder == tmp_path / "jobs" / job.id and stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "report.json").write_text("{}")
    (folder / "other.txt").write_text("no")
    (folder / "report.png").symlink_to(folder / "other.txt")
    assert await client.jobs.read_file(job.id, "report.json") == b"{}"
    for job_id, name in (
        (job.id, "other.txt"),
        (job.id, "report.png"),
        (job.id, "../report.json"),
        ("../jobs", "report.json"),
    ):
        with pytest.raises(NotFound):
            await client.jobs.read_file(job_id, name)
    (folder / "report.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(Conflict, match="larger than"):
        read_file(tmp_path, job.id, "report.json")
    await client.jobs.delete(job.id)
    assert not folder.exists()


async def test_folders_of_expired_jobs_are_removed(
    connection: redis.Redis, client: FleetClient, tmp_path: Path
) -> None:
    kept, expired = await client.jobs.submit("bench", {}), await client.jobs.submit("bench", {})
    folders = [make_folder(tmp_path, job.id) for job in (kept, expired)]
    foreign = tmp_path / "jobs" / "notes"
    foreign.mkdir()
    rq_job(connection, expired.id).delete()
    remove_old_folders(tmp_path, lambda job_ids: jobs.kept_ids(connection, job_ids))
    assert folders[0].exists() and not folders[1].exists() and foreign.exists()


async def test_missing_or_large_job_file_is_refused_without_a_path(
    client: FleetClient, tmp_path: Path
) -> None:
    job = await client.jobs.submit("bench", {})
    folder = make_folder(tmp_path, job.id)
    (folder / "report.png").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    for name, kind in (("report.json", NotFound), ("report.png", Conflict)):
        with pytest.raises(kind) as refused:
            await client.jobs.read_file(job.id, name)
        assert str(tmp_path) not in refused.value.message and "data_dir" in refused.value.message


def test_link_or_file_named_after_a_job_is_removed_and_its_target_kept(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    ids = [f"00000000-0000-0000-0000-{number:012x}" for number in range(5)]
    (tmp_path / "jobs").mkdir()
    link, dangling, file = [tmp_path / "jobs" / job_id for job_id in ids[:3]]
    for clean_up in (
        lambda: remove_old_folders(tmp_path, lambda _: set()),
        lambda: [make_folder(tmp_path, id) for id in ids[:3]],
    ):
        link.symlink_to(target)
        dangling.symlink_to(tmp_path / "nothing")
        file.write_text("no folder")
        folders = [make_folder(tmp_path, job_id) for job_id in ids[3:]]
        clean_up()
        assert target.is_dir() and not any(
            path.is_symlink() or path.is_file() for path in (link, dangling, file)
        )
        assert [folder.exists() for folder in folders] == [link.exists()] * 2


def test_undeletable_folder_does_not_keep_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [
        make_folder(tmp_path, f"00000000-0000-0000-0000-{number:012x}") for number in range(3)
    ]
    remove = shutil.rmtree

    def refuse_one(path: Path) -> None:
        if path == folders[1]:
            raise PermissionError("not allowed")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse_one)
    with pytest.raises(PermissionError):
        remove_old_folders(tmp_path, lambda _: set())
    assert [folder.exists() for folder in folders] == [False, True, False]


CORRUPT = (
    ("meta", b"[1]"),
    ("timeout", b"xx"),
    ("created_at", b"soon"),
    ("status", b"asleep"),
    ("data", None),
)


@pytest.mark.parametrize(("field", "value"), CORRUPT, ids=[field for field, _ in CORRUPT])
async def test_unreadable_record_is_listed_beside_others(
    connection: redis.Redis, client: FleetClient, field: str, value: bytes | None
) -> None:
    whole, corrupt = await client.jobs.submit("bench", {}), await client.jobs.submit("bench", {})
    if value is None:
        connection.hdel(RqJob.key_for(corrupt.id), field)
    else:
        connection.hset(RqJob.key_for(corrupt.id), field, value)
    listed = {job.id: job for job in await client.jobs.list_jobs()}
    assert set(listed) == {whole.id, corrupt.id} and listed[whole.id].state == "queued"
    shown = listed[corrupt.id]
    assert shown.state == "unreadable" and shown.arguments is None and "delete it" in shown.error
    assert await client.jobs.find(corrupt.id) == shown
    for order in (client.jobs.retry, client.jobs.stop):
        with pytest.raises(Conflict, match="cannot be read"):
            await order(corrupt.id)
    assert jobs.kept_ids(connection, [whole.id, corrupt.id, "none"]) == {whole.id, corrupt.id}
    await client.jobs.delete(corrupt.id)
    assert [job.id for job in await client.jobs.list_jobs()] == [whole.id] and jobs.open_queue(
        connection
    ).job_ids == [whole.id]


async def test_unreadable_result_is_listed(connection: redis.Redis, client: FleetClient) -> None:
    job = await client.jobs.submit("bench", {})
    connection.xadd(f"rq:results:{job.id}", {"type": "1", "return_value": "%"})
    assert [shown.state for shown in await client.jobs.list_jobs()] == ["unreadable"]
    connection.delete(RqJob.key_for(job.id), f"rq:results:{job.id}")
    connection.set(RqJob.key_for(job.id), "no hash")
    assert [shown.state for shown in await client.jobs.list_jobs()] == ["unreadable"]
    await client.jobs.delete(job.id)
    assert not await client.jobs.list_jobs()


def test_oldest_folders_beyond_the_bound_are_removed(tmp_path: Path) -> None:
    for number in range(MAX_FOLDERS + 3):
        folder = make_folder(tmp_path, f"00000000-0000-0000-0000-{number:012x}")
        os.utime(folder, (number, number))
    remove_old_folders(tmp_path, set)
    left = sorted(path.name for path in (tmp_path / "jobs").iterdir())
    assert len(left) == MAX_FOLDERS and left[0].endswith("000000000003")


@pytest.mark.parametrize("measure", MEASURE_TAKES)
def test_each_measure_is_a_command_line_of_the_benchmark(measure: Measure, tmp_path: Path) -> None:
    command = command_line(
        BenchArguments(measure=measure, check=True), MEASURED, tmp_path / "c.yaml"
    )
    options = parse([*command, *report_options(tmp_path)])
    assert (
        options.check
        and options.config == tmp_path / "c.yaml"
        and options.json == tmp_path / "report.json"
    )
    assert (
        options.overrides == [] and not options.up and options.engine is None and options.wavs == []
    )
    assert options.url == (MEASURED.url if measure in OF_THE_GATEWAY else None)
    assert [each.of_gateway for each in options.chosen] == [measure in OF_THE_GATEWAY]
    assert [options.barge_in, options.scale, options.hop, options.transfer].count(True) == (
        measure not in ("serving", "voice")
    )


def test_benchmark_receives_the_job_arguments(tmp_path: Path) -> None:
    def parsed(arguments: BenchArguments) -> BenchOptions:
        return parse(command_line(arguments, MEASURED, tmp_path))

    options = parsed(BenchArguments(requests=3, concurrency=2, max_tokens=5, frames=6, warm_up=0))
    assert (
        options.requests,
        options.concurrency,
        options.max_tokens,
        options.frames,
        options.warm_up,
    ) == (3, 2, 5, 6, 0)
    scale = parsed(BenchArguments(measure="scale", streams=(4, 2), scale_seconds=7))
    assert (scale.streams, scale.scale_seconds) == ([4, 2], 7)
    assert parsed(BenchArguments(measure="voice", sessions=5)).sessions == 5
    assert parsed(BenchArguments(measure="hop", hops=9)).hops == 9


NO_PID = 2**22 + 1
"""A number above the largest possible process id."""
HERE = this_process()
GONE = JobWorkerProcess(HERE.machine, NO_PID, HERE.started_s)
REUSED = JobWorkerProcess(HERE.machine, HERE.pid, HERE.started_s - 60)
ELSEWHERE = JobWorkerProcess("another machine", NO_PID, HERE.started_s)


def registered(connection: redis.Redis, place: JobWorkerProcess = HERE) -> JobWorker:
    """Register a job worker whose process is at `place`."""
    worker = JobWorker(
        [jobs.QUEUE], connection=connection, serializer=JSONSerializer, job_class=JobRecord
    )
    worker.register_birth()
    connection.hset(worker.key, PROCESS, msgspec.json.encode(place))
    return worker


def begin(connection: redis.Redis, worker: JobWorker) -> str:
    """Let the job worker begin a new job, up to the start of the job's process; return the job's
    id.
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


def test_unfinished_batches_have_one_job_until_they_end(
    connection: redis.Redis, tmp_path: Path
) -> None:
    store = BatchStore(load_config(None, ("engine=fake", f"data_dir={tmp_path}")))
    batch = store.create(ENDPOINTS[0], store.files.add(b"x", "in.jsonl").id)
    job_id = BatchArguments(batch=batch.id).job_id
    queue = jobs.open_queue(connection)

    def state_after_look() -> str:
        queue_unfinished(connection, store)
        found = jobs.job(connection, job_id)
        assert found is not None
        return found.state

    assert state_after_look() == state_after_look() == "queued" and queue.job_ids == [job_id]
    for ended in (JobStatus.FINISHED, JobStatus.FAILED):
        queue.remove(job_id)
        rq_job(connection, job_id).set_status(ended)
        assert state_after_look() == "queued" and queue.job_ids == [job_id]
    queue.remove(job_id)
    rq_job(connection, job_id).set_status(JobStatus.STOPPED)
    assert state_after_look() == "stopped" and queue.job_ids == [], "a person stopped it"
    assert jobs.retry(connection, job_id).id == job_id and queue.job_ids == [job_id]
    jobs.delete(connection, job_id)
    assert state_after_look() == "queued", "its record was lost"
    jobs.delete(connection, job_id)
    ended_batch = msgspec.structs.replace(batch, status="cancelled")
    store.save(StoredBatch(batch=ended_batch))
    queue_unfinished(connection, store)
    assert jobs.job(connection, job_id) is None and queue.job_ids == []
