"""Background jobs under rq: submission, views, and orders to retry, stop or delete a job. Only the
functions in `FUNCTIONS` can be run.

Arguments are checked when a job is submitted, and again by its worker. Results and progress are
JSON. Knows no request.
"""

import datetime
import zlib
from typing import cast

import msgspec
from redis import Redis
from redis.exceptions import ResponseError
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import (
    DeserializationError,
    InvalidJobOperation,
    NoSuchJobError,
    TimeoutFormatError,
)
from rq.job import Job as RqJob
from rq.job import JobStatus
from rq.registry import BaseRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from fleet.control.connect import text
from fleet.core.errors import BadInput, Conflict, NotFound
from fleet.core.jobs import REPORT_FILES, BatchArguments, JobArguments, read_arguments
from fleet.telemetry.views import Job, JobProgress

QUEUE = "fleet"
FUNCTIONS = {
    "bench": "fleet.jobs.bench.run",
    "train": "fleet.jobs.train.run",
    "batch": "fleet.jobs.batch.run",
}
"""Function that runs each kind of job: its argument is the job's arguments as a JSON object, and it
returns JSON.
"""
TIMEOUT_S = 3600
KEPT_S = 7 * 24 * 3600
MAX_LISTED = 200
"""Maximum number of jobs that are listed per state, the latest first."""
PROGRESS, FILES = "progress", "files"
UNREADABLE = "unreadable"
"""State of a job whose record or result cannot be read."""
DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DeserializationError,
    LookupError,
    NoSuchJobError,
    RecursionError,
    ResponseError,
    TimeoutFormatError,
    TypeError,
    ValueError,
    zlib.error,
)
"""Errors that a damaged job record causes in rq, which does not check records, or in Redis if a key
has another type.
"""
UNFINISHED = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.DEFERRED, JobStatus.SCHEDULED)


def open_queue(connection: Redis) -> Queue:
    return Queue(QUEUE, connection=connection, serializer=JSONSerializer)


def submit(connection: Redis, kind: str, arguments: object) -> Job:
    """Put a job into the queue. `arguments`: JSON object of the client. Raises: BadInput naming the
    argument, the cause and the remedy.

    A batch has one job with a fixed id: an unfinished one is returned unchanged, an ended one is
    deleted and replaced.
    """
    checked = read_arguments(kind, arguments)
    job_id = checked.job_id if isinstance(checked, BatchArguments) else None
    if job_id is not None and (former := job(connection, job_id)) is not None:
        if former.state in UNFINISHED:
            return former
        delete(connection, job_id)
    queued = open_queue(connection).enqueue(
        FUNCTIONS[kind],
        checked.as_json(),
        job_id=job_id,
        job_timeout=TIMEOUT_S,
        result_ttl=KEPT_S,
        failure_ttl=KEPT_S,
        meta={"kind": kind},
    )
    return _view(queued, None)


def jobs(connection: Redis) -> list[Job]:
    """Return the stored jobs, at most `MAX_LISTED` of each state, the newest first."""
    return sorted(
        _read(connection, _ids(connection)), key=lambda view: view.created_us, reverse=True
    )


def job(connection: Redis, job_id: str) -> Job | None:
    """Return one job, or None if it is not stored."""
    return next(iter(_read(connection, [job_id])), None)


def retry(connection: Redis, job_id: str) -> Job:
    """Submit an ended job again under a new id; the job of a batch keeps its id and is replaced.
    Raises: NotFound; Conflict if the job has not ended or was submitted by another version.
    """
    found = _find(connection, job_id)
    if found.get_status() in UNFINISHED:
        raise Conflict(f"job {job_id} has not ended; stop it first", param="job_id")
    view = _view(found, None)
    if view.arguments is None:
        raise Conflict(
            f"job {job_id} is of another version; submit it again with this one's arguments",
            param="job_id",
        )
    return submit(connection, view.kind, view.arguments)


def stop(connection: Redis, job_id: str) -> None:
    """Order a running job to stop, without waiting for its end, or remove a queued one from the
    queue. Raises: NotFound; Conflict if the job has ended.
    """
    found = _find(connection, job_id)
    status = found.get_status()
    if status not in UNFINISHED:
        raise Conflict(f"job {job_id} has ended already: {status.value}", param="job_id")
    try:
        if status == JobStatus.STARTED:
            send_stop_job_command(connection, job_id, serializer=JSONSerializer)
        else:
            found.cancel()
    except InvalidJobOperation as error:
        raise Conflict(
            f"job {job_id} changed meanwhile: {error}; look at its state and try again",
            param="job_id",
        ) from error


def delete(connection: Redis, job_id: str) -> None:
    """Delete a job that is not running. Raises: NotFound; Conflict if it runs."""
    view = job(connection, job_id)
    if view is not None and view.state == UNREADABLE:
        _delete_unreadable(connection, job_id)
        return
    found = _find(connection, job_id)
    if found.get_status() == JobStatus.STARTED:
        raise Conflict(f"job {job_id} runs; stop it first", param="job_id")
    # Fleet's jobs have no group, and rq fails to delete a job whose group is missing
    found.group_id = None
    found.delete()


def note_progress(current: RqJob, progress: JobProgress) -> None:
    """Save the progress of the running job."""
    current.meta[PROGRESS] = msgspec.to_builtins(progress)
    current.save_meta()


def note_files(current: RqJob, names: list[str]) -> None:
    """Save the names of the report files in the running job's folder."""
    current.meta[FILES] = names
    current.save_meta()


def kept_ids(connection: Redis, job_ids: list[str]) -> set[str]:
    """Return the ids among `job_ids` whose jobs are stored."""
    pipe = connection.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.exists(RqJob.key_for(job_id))
    return {job_id for job_id, is_kept in zip(job_ids, pipe.execute(), strict=True) if is_kept}


def recorded_arguments(job: RqJob) -> JobArguments:
    """Return the checked arguments in a job's record. Raises: BadInput if `submit` of this version
    did not write the record.
    """
    kind = next((kind for kind, function in FUNCTIONS.items() if function == job.func_name), "")
    if not kind or job.instance is not None or job.kwargs or len(job.args) != 1:
        raise BadInput(
            "its record names no kind of job; submit it with `fleet jobs submit` or POST "
            "/v1/fleet/jobs",
            param="kind",
        )
    return read_arguments(kind, job.args[0])


def _ids(connection: Redis) -> list[str]:
    """Return the ids of all jobs in rq's lists. The lists are read atomically, so that a job on its
    way from the queue to a worker is not missed.
    """
    queue = open_queue(connection)
    pipe = connection.pipeline(transaction=True)
    for key in (queue.key, queue.intermediate_queue_key):
        pipe.lrange(key, -MAX_LISTED, -1)
    for registry in _registries(queue):
        pipe.zrevrange(registry.key, 0, MAX_LISTED - 1)
    listed = cast("list[list[bytes]]", pipe.execute())
    # A running job's entry also names its execution.
    return list(
        dict.fromkeys(text(member).partition(":")[0] for members in listed for member in members)
    )


def _registries(queue: Queue) -> tuple[BaseRegistry, ...]:
    return (
        queue.started_job_registry,
        queue.failed_job_registry,
        queue.finished_job_registry,
        queue.canceled_job_registry,
        queue.deferred_job_registry,
        queue.scheduled_job_registry,
    )


def _find(connection: Redis, job_id: str) -> RqJob:
    view = job(connection, job_id)
    if view is not None and view.state == UNREADABLE:
        raise Conflict(f"the record of job {job_id} cannot be read; delete the job", param="job_id")
    found = (
        RqJob.fetch_many([job_id], connection=connection, serializer=JSONSerializer)[0]
        if view is not None
        else None
    )
    if found is None:
        raise NotFound(
            f"no job {job_id[:80]!r}; `fleet jobs list` shows those there are", param="job_id"
        )
    return found


def _read(connection: Redis, job_ids: list[str]) -> list[Job]:
    """Return the jobs, among `job_ids`, that are stored. A job's state is `UNREADABLE` if its
    record or result is damaged.
    """
    pipe = connection.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hgetall(RqJob.key_for(job_id))
    records = cast("list[dict[bytes, bytes] | ResponseError]", pipe.execute(raise_on_error=False))
    return [
        _restore(connection, job_id, record)
        for job_id, record in zip(job_ids, records, strict=True)
        if record
    ]


def _restore(connection: Redis, job_id: str, record: dict[bytes, bytes] | ResponseError) -> Job:
    try:
        if isinstance(record, ResponseError):
            raise record
        found = RqJob(job_id, connection=connection, serializer=JSONSerializer)
        found.restore(record)
        return _view(found, found.latest_result())
    except DAMAGED as error:
        reason = (
            f"its record in Redis cannot be read ({type(error).__name__}: "
            f"{str(error)[:80]}); delete it"
        )
        return Job(id=job_id, kind="", arguments=None, state=UNREADABLE, created_us=0, error=reason)


def _delete_unreadable(connection: Redis, job_id: str) -> None:
    queue = open_queue(connection)
    pipe = connection.pipeline(transaction=True)
    pipe.delete(RqJob.key_for(job_id), Result.get_key(job_id))
    for key in (queue.key, queue.intermediate_queue_key):
        pipe.lrem(key, 0, job_id)
    for registry in _registries(queue):
        pipe.zrem(registry.key, job_id)
    pipe.execute()


def _view(job: RqJob, latest: Result | None) -> Job:
    trace = (latest.exc_string or "").strip() if latest is not None else ""
    result = latest.return_value if latest is not None and not trace else None
    return Job(
        id=job.id,
        kind=str(job.meta.get("kind", "")),
        arguments=_arguments(job),
        state=str(job.get_status(refresh=False).value),
        created_us=_us(job.created_at),
        started_us=_us(job.started_at),
        ended_us=_us(job.ended_at),
        progress=_progress(job),
        files=_files(job),
        result="" if result is None else msgspec.json.encode(result).decode(),
        error=trace.splitlines()[-1] if trace else "",
        traceback=trace,
    )


def _arguments(job: RqJob) -> dict[str, object] | None:
    try:
        return recorded_arguments(job).as_json()
    except (BadInput, DeserializationError):
        return None


def _files(job: RqJob) -> tuple[str, ...]:
    noted = job.meta.get(FILES)
    return (
        tuple(name for name in REPORT_FILES if name in cast("list[object]", noted))
        if isinstance(noted, list)
        else ()
    )


def _progress(job: RqJob) -> JobProgress | None:
    try:
        return msgspec.convert(job.meta.get(PROGRESS), JobProgress | None)
    except msgspec.ValidationError:
        return None


def _us(at: datetime.datetime | None) -> int:
    if at is None:
        return 0
    return int((at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp() * 1e6)
