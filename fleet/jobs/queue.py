"""Submitting a job and looking at it. A kind of job names the function that does it; nothing else can be run."""

from dataclasses import dataclass
from typing import cast

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from fleet.core.errors import BadInput

QUEUE = "fleet"
KINDS = {"bench": "fleet.jobs.bench.run"}
"""Kind -> the function, which takes a list of strings and returns JSON."""
TIMEOUT_S = 3600
KEPT_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """`result` is the function's own JSON once `state` is "finished"; `error` is the last line of a failure."""

    id: str
    kind: str
    arguments: tuple[str, ...]
    state: str
    result: object = None
    error: str = ""


def open_queue(connection: Redis) -> Queue:
    return Queue(QUEUE, connection=connection, serializer=JSONSerializer)


def submit(connection: Redis, kind: str, arguments: list[str]) -> str:
    """Put a job into the queue and return its id. Raises: BadInput naming the kinds there are."""
    if kind not in KINDS:
        raise BadInput(f"unknown kind of job {kind!r}; use one of {', '.join(sorted(KINDS))}", param="kind")
    job = open_queue(connection).enqueue(
        KINDS[kind], arguments, job_timeout=TIMEOUT_S, result_ttl=KEPT_S, failure_ttl=KEPT_S, meta={"kind": kind}
    )
    return job.id


def jobs(connection: Redis) -> list[JobView]:
    """Every job still kept, the newest first. Read from the jobs themselves: one on its way to a worker is in no list of rq's."""
    prefix = Job.redis_job_namespace_prefix
    keys = [cast(bytes, key).decode() for key in connection.scan_iter(match=f"{prefix}*", _type="hash")]
    ids = [key.removeprefix(prefix) for key in keys]
    found = Job.fetch_many(ids, connection=connection, serializer=JSONSerializer)
    known = sorted((job for job in found if job is not None), key=lambda job: job.created_at, reverse=True)
    return [_view(job) for job in known]


def _view(job: Job) -> JobView:
    latest = job.latest_result()
    error = (latest.exc_string or "").strip().splitlines() if latest else []
    return JobView(
        id=job.id,
        kind=str(job.meta.get("kind", "")),
        arguments=tuple(job.args[0]),
        state=str(job.get_status(refresh=False).value),
        result=latest.return_value if latest else None,
        error=error[-1] if error else "",
    )
