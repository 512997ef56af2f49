"""The job kind `batch`: runs a part of a batch of OpenAI's API against the deployment's gateway.
Unfinished batches are queued again, whatever their job's end was.
"""

import asyncio
import contextlib
import logging
from typing import cast

from redis import Redis
from redis.exceptions import RedisError
from rq import get_current_job
from rq.job import Job as RqJob

from fleet.batches.asking.batch_run import BatchRun
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.records import Batch, LineCounts
from fleet.batches.store import BatchStore
from fleet.config.settings import read_settings
from fleet.control.jobs import job, note_progress, submit
from fleet.core.errors import NotFound
from fleet.core.jobs import BatchArguments, read_arguments
from fleet.jobs.measured import MEASURED, Measured
from fleet.telemetry.views import JobProgress

log = logging.getLogger(__name__)

PART_S = 600.0
"""Time after which the job of an unfinished batch goes to the end of the queue."""
HELD = ("stopped", "canceled")
"""States of a batch's job that a person stopped or canceled: the batch is queued again only when a
person retries the job.
"""


def run(arguments: dict[str, object]) -> dict[str, str]:
    """Run a part of a batch, and return the batch's status. Raises: as `BatchRun.run`."""
    checked = cast(BatchArguments, read_arguments("batch", arguments))
    current = get_current_job()
    assert current is not None, "a job must run in an rq worker"
    return {"status": asyncio.run(_run(MEASURED.get(), checked.batch, current)).status}


async def _run(measured: Measured, batch_id: str, current: RqJob) -> Batch:
    def note(counts: LineCounts) -> None:
        done = counts.completed + counts.failed
        progress = JobProgress(done=done, total=counts.total, note=f"{counts.failed} with errors")
        with contextlib.suppress(RedisError):  # the batch goes on without Redis
            note_progress(current, progress)

    limits, store = measured.config.batches, BatchStore(measured.config)
    try:
        stored = store.load(batch_id)
    except NotFound as error:
        raise NotFound(
            f"{measured.config.batches_dir} has no batch {batch_id}; let batches.folder be a "
            "folder that gateways and job workers share"
        ) from error
    part = BatchRun(
        store,
        batch_id,
        note,
        max_lines=limits.max_lines,
        concurrency=limits.concurrency,
        part_s=PART_S,
    )
    async with LineGateway(measured.url, read_settings().api_key, stored.key) as gateway:
        return await part.run(gateway)


def queue_unfinished(connection: Redis, store: BatchStore) -> None:
    """Queue the next part of each unfinished batch whose job has ended or is lost, unless a person
    stopped or canceled the job. Raises: RedisError.
    """
    try:
        unfinished = store.unfinished()
    except OSError as error:
        log.warning("unfinished batches cannot be listed: %s", error)
        return
    for batch_id in unfinished:
        arguments = BatchArguments(batch=batch_id)
        former = job(connection, arguments.job_id)
        if former is None or former.state not in HELD:
            submit(connection, "batch", arguments.as_json())
