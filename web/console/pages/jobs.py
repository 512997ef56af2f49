"""Jobs: what runs in the background, how far it is, and why it failed. Knows no kind of job."""

from dataclasses import dataclass
from typing import cast

from fleet.core.jobs import MEASURE_TAKES, BenchArguments
from fleet.core.telemetry import Job
from web.console.page_context import PageContext, Query, stream_path
from web.gateway.gateway import Gateway

MAX_ROWS = 100
UNREADABLE = "unreadable"
ENDED = ("finished", "failed", "stopped", "canceled")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsContext(PageContext):
    """`jobs`: the newest; `num_more` are left out. `arguments`: of each, as people read them. `measures`: of a new one."""

    jobs: tuple[Job, ...] = ()
    arguments: tuple[str, ...] = ()
    num_more: int = 0
    ended: tuple[str, ...] = ENDED
    measures: tuple[str, ...] = tuple(MEASURE_TAKES)


class JobsPage:
    key = active = "jobs"
    path = "/jobs"
    template = "jobs.html"
    live = ("trouble", "jobs")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def empty(self, query: Query) -> JobsContext:
        return JobsContext(title="Jobs", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> JobsContext:
        jobs = await self._gateway.client.jobs.list_jobs()
        shown = tuple(jobs[:MAX_ROWS])
        return JobsContext(
            title="Jobs",
            stream=stream_path(self.key, {}),
            jobs=shown,
            arguments=tuple(format_arguments(job.arguments) if job.state != UNREADABLE else "" for job in shown),
            num_more=len(jobs[MAX_ROWS:]),
        )


def format_arguments(arguments: BenchArguments | None) -> str:
    """The arguments that were given, as `fleet jobs submit` takes them."""
    if arguments is None:
        return "arguments of another version"
    return " ".join(f"{name}={_value(value)}" for name, value in arguments.given().items())


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("list[object]", value)))
    return str(value).lower() if isinstance(value, bool) else str(value)
