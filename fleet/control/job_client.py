"""Client of background jobs for callers on an event loop: runs the calls of `fleet.control.jobs` in
threads, and reads files that jobs wrote.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from redis import Redis

from fleet.config.settings import is_cluster
from fleet.control.connect import SOCKET_TIMEOUT_S, answer_of, connect_for_a_call
from fleet.control.job_files import read_file, remove_folder
from fleet.core.errors import Conflict, NotFound
from fleet.core.jobs import NO_JOBS
from fleet.telemetry.views import Job

T = TypeVar("T")


class JobClient:
    """Client of the job queue. rq is imported by the first call, since serving does not need it.
    Any method may raise RedisUnreachable, and Conflict if Redis is a cluster, where jobs cannot be
    stored.
    """

    def __init__(self, url: str, data_dir: Path) -> None:
        self._url = url
        self._data_dir = data_dir

    async def list_jobs(self) -> Sequence[Job]:
        """Return the jobs, newest first."""
        from fleet.control import jobs

        if is_cluster(self._url):
            return ()
        return await self._run(jobs.jobs)

    async def find(self, job: str) -> Job | None:
        from fleet.control import jobs

        return await self._run(lambda connection: jobs.job(connection, job))

    async def submit(self, kind: str, arguments: object) -> Job:
        """Put a job into the queue. Raises: BadInput naming the argument, the cause and the remedy;
        see `fleet.core.jobs.read_arguments`.
        """
        from fleet.control import jobs

        return await self._run(lambda connection: jobs.submit(connection, kind, arguments))

    async def retry(self, job: str) -> Job:
        """Submit an ended job again, under a new id unless it is the job of a batch. Raises:
        NotFound, Conflict.
        """
        from fleet.control import jobs

        return await self._run(lambda connection: jobs.retry(connection, job))

    async def stop(self, job: str) -> None:
        """Order a running job to stop, without waiting for its end, or remove a queued one from the
        queue. Raises: NotFound, Conflict.
        """
        from fleet.control import jobs

        await self._run(lambda connection: jobs.stop(connection, job))

    async def delete(self, job: str) -> None:
        """Delete a job that does not run, with its files. Raises: NotFound, Conflict."""
        from fleet.control import jobs

        await self._run(lambda connection: jobs.delete(connection, job))
        # A folder on another machine is removed by the worker there.
        await asyncio.to_thread(remove_folder, self._data_dir, job)

    async def read_file(self, job: str, name: str) -> bytes:
        """Return the content of one of the `REPORT_FILES` that a job wrote. Raises: NotFound;
        Conflict if the file is too large.
        """
        if await self.find(job) is None:
            raise NotFound(
                f"job_id: no job {job[:80]!r}; GET /v1/fleet/jobs lists those there are",
                param="job_id",
            )
        return await asyncio.to_thread(read_file, self._data_dir, job, name)

    async def _run(self, work: Callable[[Redis], T]) -> T:
        """Run blocking rq calls in a thread, over a separate Redis connection that is passed to
        `work`.
        """
        if is_cluster(self._url):
            raise Conflict(NO_JOBS)

        def call() -> T:
            with connect_for_a_call(self._url, SOCKET_TIMEOUT_S) as connection:
                return work(connection)

        return await answer_of(asyncio.to_thread(call))
