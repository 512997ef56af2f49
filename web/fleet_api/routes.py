"""GET, POST and DELETE /v1/fleet/...: state of the fleet and operations on it. The console's
buttons call these routes.

Knows no stage and no page.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput, NotFound, quoted
from fleet.core.ids import Epoch, RequestId, StageName, request_id_of
from fleet.core.jobs import EXAMPLE, REPORT_FILES
from fleet.drafts.figures.speculation import StageDrafts
from fleet.telemetry.journal import WHAT, JournalEntry
from fleet.telemetry.routes import routes_of
from fleet.telemetry.trace import STATES, RequestFilter, RequestRow
from fleet.telemetry.views import (
    LEVELS,
    WORKER_ORDERS,
    DeadLetterView,
    Job,
    LogLine,
    LogQuery,
    RoleQueue,
    SeriesPoint,
    WorkerOrder,
    WorkerView,
)
from web.fleet_api.chrome_trace import chrome_trace_of
from web.fleet_api.request_detail import (
    check_owner,
    read_logs_without_audio,
    read_request_detail,
    request_not_found,
    wav_of,
)
from web.fleet_api.scaling import ScalingApi
from web.fleet_api.training import TrainingApi
from web.gateway.fleet_metrics import GATEWAY_ROLE
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.callers import current_caller
from web.http.json_response import json_response
from web.http.query_params import choice_param, int_param, time_param

MAX_PAGE, MAX_LINES, MAX_ENTRIES = 200, 1000, 1000
MAX_TIME_US = MAX_EPOCH = 10**17
MAX_JOB_BODY_BYTES = 64 * 1024


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of requests. `next` is the value of the parameter `before` for the next page; null at
    the end. `counts` has the number of matching requests by state, for all states even if one is
    asked for; `counts_all` is false if only the newest requests were counted.
    """

    object: str = "list"
    data: Sequence[RequestRow]
    next: str | None
    counts: dict[str, int]
    counts_all: bool
    now_us: int


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers. `gone` lists workers that ended in the last ten minutes, the latest first."""

    object: str = "list"
    data: Sequence[WorkerView]
    gone: Sequence[WorkerView]
    missing_roles: Sequence[str]


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[RoleQueue]


class DeadLetterList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[DeadLetterView]


class SeriesList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[SeriesPoint]


class LogList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[LogLine]
    next: str | None
    newest: str
    dropped: int


class JournalList(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the journal, the newest first. `more` is true if older entries of the time range
    were left out: ask again with `until` at the time of the last one.
    """

    object: str = "list"
    data: Sequence[JournalEntry]
    more: bool


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[Job]


class RetryResult(msgspec.Struct, frozen=True, kw_only=True):
    """A request was submitted again. `id` is the new request, whose answer is at
    `/v1/fleet/requests/{id}/stream`.
    """

    id: str
    object: str = "fleet.request"
    retry_of: str


class AbortResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "fleet.request.aborted"
    aborted: bool


class WorkerOrderResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "fleet.worker.order"
    order: str


class DraftsList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[StageDrafts]


class DrafterResult(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter was chosen. The stage's workers use it within a second; running answers
    continue.
    """

    stage: str
    object: str = "fleet.drafter"
    drafter: str


class RedeliveryResult(msgspec.Struct, frozen=True, kw_only=True):
    """A task was taken from its worker. Another worker will claim it, as the trace of its request
    shows.
    """

    id: str
    object: str = "fleet.task.redelivery"
    stage: str


class DeletionResult(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    deleted: bool = True


class JobBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/fleet/jobs. `arguments` are the arguments of `fleet jobs submit` for this
    kind of job.
    """

    kind: Literal["bench", "train"]
    arguments: dict[str, Any] = {}


class FleetApi:
    """The routes under /v1/fleet, each handled by a method; `routes()` lists them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._client = gateway, gateway.client

    def routes(self) -> list[BaseRoute]:
        root = "/v1/fleet"
        return [
            Route(f"{root}/requests", self.requests),
            Route(f"{root}/requests/{{request_id}}", self.request_detail),
            Route(f"{root}/requests/{{request_id}}", self.abort, methods=["DELETE"]),
            Route(f"{root}/requests/{{request_id}}/audio", self.audio),
            Route(f"{root}/requests/{{request_id}}/trace", self.trace),
            Route(f"{root}/requests/{{request_id}}/retry", self.retry, methods=["POST"]),
            Route(
                f"{root}/requests/{{request_id}}/tasks/{{stage}}/redeliver",
                self.redeliver,
                methods=["POST"],
            ),
            Route(f"{root}/workers", self.workers),
            Route(f"{root}/workers/{{worker_id}}/{{order}}", self.order_worker, methods=["POST"]),
            Route(f"{root}/drafters", self.drafters),
            Route(f"{root}/drafters/{{stage}}/{{drafter}}", self.choose_drafter, methods=["POST"]),
            *TrainingApi(self._gateway).routes(root),
            *ScalingApi(self._gateway).routes(root),
            Route(f"{root}/queues", self.queues),
            Route(f"{root}/dead-letters", self.dead_letters),
            Route(
                f"{root}/dead-letters/{{request_id}}/retry",
                self.retry_dead_letter,
                methods=["POST"],
            ),
            Route(f"{root}/dead-letters/{{request_id}}", self.drop_dead_letter, methods=["DELETE"]),
            Route(f"{root}/transfers", self.transfers),
            Route(f"{root}/routes", self.span_routes),
            Route(f"{root}/series", self.series),
            Route(f"{root}/journal", self.journal),
            Route(f"{root}/logs", self.logs),
            Route(f"{root}/jobs", self.jobs, methods=["GET"]),
            Route(f"{root}/jobs", self.submit_job, methods=["POST"]),
            Route(f"{root}/jobs/{{job_id}}", self.job, methods=["GET"]),
            Route(f"{root}/jobs/{{job_id}}", self.delete_job, methods=["DELETE"]),
            Route(f"{root}/jobs/{{job_id}}/files/{{name}}", self.job_file),
            Route(f"{root}/jobs/{{job_id}}/retry", self.retry_job, methods=["POST"]),
            Route(f"{root}/jobs/{{job_id}}/stop", self.stop_job, methods=["POST"]),
        ]

    async def requests(self, request: Request) -> Response:
        """List requests, newest first. Query parameters filter the list; `q` is a part of the
        id.
        """
        params = request.query_params
        wanted = read_request_filter(params)
        limit = int_param(params, "limit", 50, MAX_PAGE, least=1)
        page = await self._client.telemetry.list_requests(
            wanted, before=params.get("before", ""), limit=limit
        )
        return json_response(
            RequestList(
                data=page.rows,
                next=page.next or None,
                counts=page.counts,
                counts_all=page.counts_all,
                now_us=page.now_us,
            )
        )

    async def abort(self, request: Request) -> Response:
        """Abort a request of the caller's key, or with the scope `operate` any. `aborted` in the
        response is false if the request had ended already.
        """
        request_id = _request_id(request)
        await check_owner(self._gateway, request_id)
        caller = current_caller()
        ordered_by = caller.name if caller.may("operate") else None
        aborted = await self._client.requests.abort(request_id, ordered_by=ordered_by)
        if not aborted and await self._client.telemetry.trace(request_id) is None:
            raise request_not_found(request_id)
        return json_response(AbortResult(id=request_id, aborted=aborted))

    async def request_detail(self, request: Request) -> Response:
        return json_response(await read_request_detail(self._gateway, _request_id(request)))

    async def audio(self, request: Request) -> Response:
        """Send a request's audio produced so far as a WAV file. Audio is stored until a minute
        after the end of the request.
        """
        request_id = _request_id(request)
        wav = await wav_of(self._gateway, request_id)
        name = f'inline; filename="{request_id}.wav"'
        return Response(
            wav,
            media_type="audio/wav",
            headers={"content-disposition": name, "cache-control": "no-store"},
        )

    async def trace(self, request: Request) -> Response:
        """Send a request's trace in Chrome's trace format, which Perfetto opens."""
        request_id = _request_id(request)
        found = await read_request_detail(self._gateway, request_id)
        trace = chrome_trace_of(
            found, self._gateway.graph, await read_logs_without_audio(self._gateway, found)
        )
        name = f'attachment; filename="{request_id}.json"'
        return Response(
            msgspec.json.encode(trace),
            media_type="application/json",
            headers={"content-disposition": name},
        )

    async def retry(self, request: Request) -> Response:
        request_id = _request_id(request)
        new_id = await self._client.operations.retry(request_id, by=current_caller().name)
        return json_response(RetryResult(id=new_id, retry_of=request_id), 201)

    async def redeliver(self, request: Request) -> Response:
        """Take a stuck task from its worker, to be granted again. With the parameter `epoch`,
        refuse if the task's owner has changed since that epoch.
        """
        request_id, stage = _request_id(request), StageName(str(request.path_params["stage"]))
        epoch = Epoch(int_param(request.query_params, "epoch", 0, MAX_EPOCH))
        await self._client.operations.redeliver(request_id, stage, epoch, by=current_caller().name)
        return json_response(RedeliveryResult(id=request_id, stage=stage))

    async def workers(self, _request: Request) -> Response:
        workers = [
            msgspec.structs.replace(view, role=view.role or GATEWAY_ROLE)
            for view in await self._client.telemetry.workers(with_gone=True)
        ]
        missing = await self._client.telemetry.missing_roles()
        live, gone = (
            [view for view in workers if not view.gone],
            [view for view in workers if view.gone],
        )
        return json_response(WorkerList(data=live, gone=gone, missing_roles=missing))

    async def order_worker(self, request: Request) -> Response:
        """Send an order to a worker. `drain`: claim no tasks. `resume`: claim tasks again. `stop`:
        finish the tasks and exit. `dump`: log stack traces.
        """
        worker, order = (
            str(request.path_params["worker_id"]),
            _order(str(request.path_params["order"])),
        )
        await self._client.operations.order_worker(worker, order, by=current_caller().name)
        return json_response(WorkerOrderResult(id=worker, order=order))

    async def drafters(self, _request: Request) -> Response:
        return json_response(DraftsList(data=await self._client.telemetry.drafts()))

    async def choose_drafter(self, request: Request) -> Response:
        stage, drafter = str(request.path_params["stage"]), str(request.path_params["drafter"])
        await self._client.operations.choose_drafter(stage, drafter)
        return json_response(DrafterResult(stage=stage, drafter=drafter))

    async def queues(self, _request: Request) -> Response:
        return json_response(QueueList(data=await self._client.telemetry.queues()))

    async def dead_letters(self, _request: Request) -> Response:
        return json_response(DeadLetterList(data=await self._client.telemetry.dead_letters()))

    async def retry_dead_letter(self, request: Request) -> Response:
        request_id = _request_id(request)
        by = current_caller().name
        new_id = await self._client.operations.retry_dead_letter(request_id, by=by)
        return json_response(RetryResult(id=new_id, retry_of=request_id), 201)

    async def drop_dead_letter(self, request: Request) -> Response:
        request_id = _request_id(request)
        await self._client.operations.drop_dead_letter(request_id)
        return json_response(DeletionResult(id=request_id, object="fleet.dead_letter"))

    async def transfers(self, _request: Request) -> Response:
        return json_response(await self._client.telemetry.transfers())

    async def span_routes(self, _request: Request) -> Response:
        return json_response(routes_of(await self._client.telemetry.workers()))

    async def series(self, _request: Request) -> Response:
        return json_response(SeriesList(data=await self._client.telemetry.series()))

    async def journal(self, request: Request) -> Response:
        """List what happened to processes, roles and answers, newest first. `since` and `until` are
        times in microseconds since 1970, `what` is a kind of entry.
        """
        params = request.query_params
        since_us = int_param(params, "since", 0, MAX_TIME_US)
        until_us = int_param(params, "until", 0, MAX_TIME_US)
        if until_us and until_us < since_us:
            raise BadInput(f"until: {until_us} is before since ({since_us})", param="until")
        what = choice_param(params, "what", WHAT)
        limit = int_param(params, "limit", 200, MAX_ENTRIES, least=1)
        entries = await self._client.telemetry.journal(
            since_us=since_us,
            until_us=until_us,
            limit=limit + 1,
            what=(what,) if what else (),
        )
        return json_response(JournalList(data=entries[::-1][:limit], more=len(entries) > limit))

    async def logs(self, request: Request) -> Response:
        """List log lines, newest first. Query parameters filter the list; `q` is a part of the
        message, `level` the lowest level.
        """
        params = request.query_params
        wanted = read_log_query(params)
        limit = int_param(params, "limit", 200, MAX_LINES, least=1)
        page = await self._client.telemetry.logs(
            wanted, before=params.get("before", ""), limit=limit
        )
        return json_response(
            LogList(
                data=page.lines, next=page.next or None, newest=page.newest, dropped=page.dropped
            )
        )

    async def jobs(self, _request: Request) -> Response:
        return json_response(JobList(data=await self._client.jobs.list_jobs()))

    async def job(self, request: Request) -> Response:
        job_id = str(request.path_params["job_id"])
        job = await self._client.jobs.find(job_id)
        if job is None:
            raise NotFound(
                f"no job {quoted(job_id)}; GET /v1/fleet/jobs lists those there are", param="job_id"
            )
        return json_response(job)

    async def job_file(self, request: Request) -> Response:
        """Send a file of the job's report: `report.json` or `report.png`."""
        job_id, name = str(request.path_params["job_id"]), str(request.path_params["name"])
        content = await self._client.jobs.read_file(job_id, name)
        headers = {"content-disposition": f'inline; filename="{name}"', "cache-control": "no-store"}
        return Response(content, media_type=REPORT_FILES[name], headers=headers)

    async def submit_job(self, request: Request) -> Response:
        kind, arguments = _job_body(await read_body(request, MAX_JOB_BODY_BYTES))
        return json_response(await self._client.jobs.submit(kind, arguments), 201)

    async def retry_job(self, request: Request) -> Response:
        return json_response(await self._client.jobs.retry(str(request.path_params["job_id"])), 201)

    async def stop_job(self, request: Request) -> Response:
        job_id = str(request.path_params["job_id"])
        await self._client.jobs.stop(job_id)
        job = await self._client.jobs.find(job_id)
        if job is None:
            raise NotFound(f"job {quoted(job_id)} was deleted meanwhile", param="job_id")
        return json_response(job)

    async def delete_job(self, request: Request) -> Response:
        job_id = str(request.path_params["job_id"])
        await self._client.jobs.delete(job_id)
        return json_response(DeletionResult(id=job_id, object="fleet.job"))


def read_request_filter(params: Mapping[str, str]) -> RequestFilter:
    """Return the filter in query parameters of a request list. Raises: BadInput naming the
    parameter.
    """
    from_us, to_us = time_param(params, "from"), time_param(params, "to")
    if to_us and from_us > to_us:
        raise BadInput("from: it is later than `to`; exchange them", param="from")
    return RequestFilter(
        state=choice_param(params, "state", STATES),
        stage=params.get("stage", ""),
        worker=params.get("worker", ""),
        kind=params.get("kind", ""),
        model=params.get("model", ""),
        min_ms=int_param(params, "min_ms", 0, 10**9),
        session=params.get("session", ""),
        text=request_id_of(params.get("q", "")),
        from_us=from_us,
        to_us=to_us,
    )


def read_log_query(params: Mapping[str, str]) -> LogQuery:
    """Return the filter in query parameters of a log. Raises: BadInput naming the parameter."""
    return LogQuery(
        text=params.get("q", ""),
        level=choice_param(params, "level", LEVELS),
        worker=params.get("worker", ""),
        request=request_id_of(params.get("request", "")),
        process=params.get("process", ""),
    )


def _order(name: str) -> WorkerOrder:
    for order in WORKER_ORDERS:
        if name == order:
            return order
    raise NotFound(
        f"no order {name[:40]!r}; a worker takes {', '.join(WORKER_ORDERS)}", param="order"
    )


def _job_body(raw: bytes) -> tuple[str, object]:
    """Return the kind and the unchecked arguments of a job from the body. Raises: BadInput."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the body is not JSON ({error}); send for example {EXAMPLE}") from error
    if not isinstance(body, dict):
        raise BadInput(f"the body is not an object; send for example {EXAMPLE}")
    fields = cast("dict[str, object]", body)
    for name in fields:
        if name not in JobBody.__struct_fields__:
            raise BadInput(
                f"{name[:40]}: a job has no such field; send for example {EXAMPLE}", param=name[:40]
            )
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise BadInput(
            f"kind: it must name the kind of job; send for example {EXAMPLE}", param="kind"
        )
    return kind, fields.get("arguments", {})


def _request_id(request: Request) -> RequestId:
    return request_id_of(str(request.path_params["request_id"]))
