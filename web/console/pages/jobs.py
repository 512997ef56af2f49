"""The Jobs page: state, progress, results and errors of background jobs. Knows no kind of job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from fleet.core.jobs import MEASURE_TAKES
from fleet.telemetry.views import Job
from web.console.page_context import LivePage, PageContext, Query

MAX_ROWS = 100
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsContext(PageContext):
    """Data of the Jobs page. `jobs` are the newest jobs, and `arguments` their formatted arguments
    in the same order; `num_more` older jobs are left out. `measures` are the choices for a new
    benchmark.
    """

    jobs: tuple[Job, ...] = ()
    arguments: tuple[str, ...] = ()
    num_more: int = 0
    measures: tuple[str, ...] = tuple(MEASURE_TAKES)


class JobsPage(LivePage):
    key = active = "jobs"
    path = "/jobs"
    live = ("trouble", "jobs")
    context = JobsContext

    async def read(self, query: Query) -> JobsContext:
        jobs = await self._gateway.client.jobs.list_jobs()
        shown = tuple(jobs[:MAX_ROWS])
        return JobsContext(
            jobs=shown,
            arguments=tuple(
                format_arguments(job.arguments) if job.state != UNREADABLE else "" for job in shown
            ),
            num_more=len(jobs[MAX_ROWS:]),
        )


def format_arguments(arguments: Mapping[str, object] | None) -> str:
    """Return a job's arguments as `fleet jobs submit` accepts them on the command line."""
    if arguments is None:
        return "arguments of another version"
    return " ".join(f"{name}={_format_value(value)}" for name, value in arguments.items())


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("list[object]", value)))
    return str(value).lower() if isinstance(value, bool) else str(value)
