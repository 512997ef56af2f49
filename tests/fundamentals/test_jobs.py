"""Jobs are listed and controlled through the gateway's port: state, progress and traceback; over real rq, without its worker."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import redis
from rq.job import Job as RqJob
from rq.results import Result
from rq.serializers import JSONSerializer

from fleet.bench.options import BenchOptions, parse
from fleet.config import load_config
from fleet.control import jobs
from fleet.control.client import FleetClient, JobClient
from fleet.control.job_files import MAX_FILE_BYTES, MAX_FOLDERS, make_folder, read_file, remove_old_folders
from fleet.core.errors import BadInput, Conflict, NotFound
from fleet.core.jobs import MEASURE_TAKES, BenchArguments, Measure
from fleet.core.telemetry import JobProgress
from fleet.jobs.bench import OF_THE_GATEWAY, command_line, report_options
from fleet.jobs.measured import Measured

MEASURED = Measured(config=load_config(None, ("engine=fake",)), url="http://127.0.0.1:1234")


@pytest.fixture
def job_client(gateway_client: FleetClient) -> JobClient:
    return gateway_client.jobs


def rq_job(client: redis.Redis, job: str) -> RqJob:
    return RqJob.fetch(job, connection=client, serializer=JSONSerializer)


async def test_job_is_shown_from_queue_to_failure(client: redis.Redis, job_client: JobClient) -> None:
    first, second = await job_client.submit("bench", {"measure": "scale"}), await job_client.submit("bench", {})
    assert [job.id for job in await job_client.list_jobs()] == [second.id, first.id]
    assert first.state == "queued" and first.created_us > 0 and first.progress is None
    assert first.arguments == BenchArguments(measure="scale")
    running = rq_job(client, first.id)
    jobs.note_progress(running, JobProgress(done=3, total=9, note="3 of 9"))
    found = await job_client.find(first.id)
    assert found is not None and found.progress == JobProgress(done=3, total=9, note="3 of 9")
    queue = jobs.open_queue(client)
    queue.remove(first.id)
    running.set_status(jobs.JobStatus.FAILED)
    queue.failed_job_registry.add(running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>")
    Result.create_failure(running, ttl=1000, exc_string="Traceback (most recent call last):\nValueError: no <b>")
    failed = await job_client.find(first.id)
    assert failed is not None and failed.state == "failed" and failed.error == "ValueError: no <b>"
    assert failed.traceback.startswith("Traceback") and failed.result == ""
    retried = await job_client.retry(first.id)
    assert retried.id != first.id and retried.arguments == first.arguments and retried.state == "queued"
    await job_client.delete(first.id)
    assert await job_client.find(first.id) is None and first.id not in {job.id for job in await job_client.list_jobs()}


async def test_queued_job_is_cancelled_and_invalid_commands_are_refused(job_client: JobClient) -> None:
    job = await job_client.submit("bench", {})
    with pytest.raises(Conflict, match="not ended"):
        await job_client.retry(job.id)
    await job_client.stop(job.id)
    stopped = await job_client.find(job.id)
    assert stopped is not None and stopped.state == "canceled"
    with pytest.raises(Conflict, match="ended already"):
        await job_client.stop(job.id)
    for call in (job_client.retry("none"), job_client.stop("none"), job_client.delete("none")):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(BadInput, match="bench"):
        await job_client.submit("rm", {})


async def test_job_submitted_by_other_code_is_not_run(client: redis.Redis, job_client: JobClient) -> None:
    jobs.open_queue(client).enqueue("time.sleep", 600, meta={"progress": {"done": "much"}})
    (job,) = await job_client.list_jobs()
    assert (job.kind, job.arguments, job.progress, job.state) == ("", None, None, "queued")


async def test_record_of_another_version_is_shown_but_not_retried(client: redis.Redis, job_client: JobClient) -> None:
    queue = jobs.open_queue(client)
    old = queue.enqueue("fleet.jobs.bench.run", ["--json", "/tmp/x"], meta={"kind": "bench"})
    (job,) = await job_client.list_jobs()
    assert (job.kind, job.arguments) == ("bench", None)
    await job_client.stop(old.id)
    with pytest.raises(Conflict, match="another version; submit it again"):
        await job_client.retry(old.id)


async def test_job_folder_is_private_and_removed_with_its_job(job_client: JobClient, tmp_path: Path) -> None:
    job = await job_client.submit("bench", {})
    folder = make_folder(tmp_path, job.id)
    assert folder == tmp_path / "jobs" / job.id and stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "report.json").write_text("{}")
    (folder / "other.txt").write_text("no")
    (folder / "report.png").symlink_to(folder / "other.txt")
    assert await job_client.read_file(job.id, "report.json") == b"{}"
    for job_id, name in ((job.id, "other.txt"), (job.id, "report.png"), (job.id, "../report.json"), ("../jobs", "report.json")):
        with pytest.raises(NotFound):
            await job_client.read_file(job_id, name)
    (folder / "report.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(Conflict, match="larger than"):
        read_file(tmp_path, job.id, "report.json")
    await job_client.delete(job.id)
    assert not folder.exists()


async def test_folders_of_expired_jobs_are_removed(client: redis.Redis, job_client: JobClient, tmp_path: Path) -> None:
    kept, expired = await job_client.submit("bench", {}), await job_client.submit("bench", {})
    folders = [make_folder(tmp_path, job.id) for job in (kept, expired)]
    foreign = tmp_path / "jobs" / "notes"
    foreign.mkdir()
    rq_job(client, expired.id).delete()
    remove_old_folders(tmp_path, lambda job_ids: jobs.kept_ids(client, job_ids))
    assert folders[0].exists() and not folders[1].exists() and foreign.exists()


async def test_missing_or_large_job_file_is_refused_without_a_path(job_client: JobClient, tmp_path: Path) -> None:
    job = await job_client.submit("bench", {})
    folder = make_folder(tmp_path, job.id)
    (folder / "report.png").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    for name, kind in (("report.json", NotFound), ("report.png", Conflict)):
        with pytest.raises(kind) as refused:
            await job_client.read_file(job.id, name)
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
        assert target.is_dir() and not any(path.is_symlink() or path.is_file() for path in (link, dangling, file))
        assert [folder.exists() for folder in folders] == [link.exists()] * 2


def test_undeletable_folder_does_not_keep_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_folder(tmp_path, f"00000000-0000-0000-0000-{number:012x}") for number in range(3)]
    remove = shutil.rmtree

    def refuse_one(path: Path) -> None:
        if path == folders[1]:
            raise PermissionError("not allowed")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse_one)
    with pytest.raises(PermissionError):
        remove_old_folders(tmp_path, lambda _: set())
    assert [folder.exists() for folder in folders] == [False, True, False]


CORRUPT = (("meta", b"[1]"), ("timeout", b"xx"), ("created_at", b"soon"), ("status", b"asleep"), ("data", None))


@pytest.mark.parametrize(("field", "value"), CORRUPT, ids=[field for field, _ in CORRUPT])
async def test_unreadable_record_is_listed_beside_others(
    client: redis.Redis, job_client: JobClient, field: str, value: bytes | None
) -> None:
    whole, corrupt = await job_client.submit("bench", {}), await job_client.submit("bench", {})
    if value is None:
        client.hdel(RqJob.key_for(corrupt.id), field)
    else:
        client.hset(RqJob.key_for(corrupt.id), field, value)
    listed = {job.id: job for job in await job_client.list_jobs()}
    assert set(listed) == {whole.id, corrupt.id} and listed[whole.id].state == "queued"
    shown = listed[corrupt.id]
    assert shown.state == "unreadable" and shown.arguments is None and "delete it" in shown.error
    assert await job_client.find(corrupt.id) == shown
    for order in (job_client.retry, job_client.stop):
        with pytest.raises(Conflict, match="cannot be read"):
            await order(corrupt.id)
    assert jobs.kept_ids(client, [whole.id, corrupt.id, "none"]) == {whole.id, corrupt.id}
    await job_client.delete(corrupt.id)
    assert [job.id for job in await job_client.list_jobs()] == [whole.id] and jobs.open_queue(client).job_ids == [whole.id]


async def test_unreadable_result_is_listed(client: redis.Redis, job_client: JobClient) -> None:
    job = await job_client.submit("bench", {})
    client.xadd(f"rq:results:{job.id}", {"type": "1", "return_value": "%"})
    assert [shown.state for shown in await job_client.list_jobs()] == ["unreadable"]
    client.delete(RqJob.key_for(job.id), f"rq:results:{job.id}")
    client.set(RqJob.key_for(job.id), "no hash")
    assert [shown.state for shown in await job_client.list_jobs()] == ["unreadable"]
    await job_client.delete(job.id)
    assert not await job_client.list_jobs()


def test_oldest_folders_beyond_the_bound_are_removed(tmp_path: Path) -> None:
    for number in range(MAX_FOLDERS + 3):
        folder = make_folder(tmp_path, f"00000000-0000-0000-0000-{number:012x}")
        os.utime(folder, (number, number))
    remove_old_folders(tmp_path, set)
    left = sorted(path.name for path in (tmp_path / "jobs").iterdir())
    assert len(left) == MAX_FOLDERS and left[0].endswith("000000000003")


@pytest.mark.parametrize("measure", MEASURE_TAKES)
def test_each_measure_is_a_command_line_of_the_benchmark(measure: Measure, tmp_path: Path) -> None:
    command = command_line(BenchArguments(measure=measure, check=True), MEASURED, tmp_path / "c.yaml")
    options = parse([*command, *report_options(tmp_path)])
    assert options.check and options.config == tmp_path / "c.yaml" and options.json == tmp_path / "report.json"
    assert options.overrides == () and not options.up and options.engine is None and options.wavs == ()
    assert options.url == (MEASURED.url if measure in OF_THE_GATEWAY else None)
    assert options.serving == (measure == "serving") and options.voice == (measure == "voice")
    assert [options.barge_in, options.scale, options.hop, options.transfer].count(True) == (measure not in ("serving", "voice"))


def test_benchmark_receives_the_job_arguments(tmp_path: Path) -> None:
    def parsed(arguments: BenchArguments) -> BenchOptions:
        return parse(command_line(arguments, MEASURED, tmp_path))

    options = parsed(BenchArguments(requests=3, concurrency=2, max_tokens=5, frames=6, warm_up=0))
    assert (options.requests, options.concurrency, options.max_tokens, options.frames, options.warm_up) == (3, 2, 5, 6, 0)
    scale = parsed(BenchArguments(measure="scale", streams=(4, 2), scale_seconds=7))
    assert (scale.streams, scale.scale_seconds) == ((2, 4), 7)
    assert parsed(BenchArguments(measure="voice", sessions=5)).sessions == 5
    assert parsed(BenchArguments(measure="hop", hops=9)).hops == 9
