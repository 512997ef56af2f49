"""Jobs: what runs in the background, how far it is, and why it failed. Knows no kind of job."""

from dataclasses import dataclass

from fleet.core.telemetry import Job
from web.gateway import Gateway
from web.pages.frame import Frame, Query, stream_path

MAX_ROWS = 100
ENDED = ("finished", "failed", "stopped", "canceled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs(Frame):
    """`jobs`: the newest; `num_more` are left out."""

    jobs: tuple[Job, ...] = ()
    num_more: int = 0
    ended: tuple[str, ...] = ENDED


class JobsPage:
    key = active = "jobs"
    template = "jobs.html"
    live = ("trouble", "jobs")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def empty(self, query: Query) -> Jobs:
        return Jobs(title="Jobs", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> Jobs:
        jobs = await self._gateway.client.telemetry.jobs()
        return Jobs(title="Jobs", stream=stream_path(self.key, {}), jobs=tuple(jobs[:MAX_ROWS]), num_more=len(jobs[MAX_ROWS:]))
