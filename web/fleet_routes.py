"""GET /v1/models, /v1/fleet/..., /health, /ready and /metrics: what the fleet has and does. Knows no stage."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleet.core.errors import FleetError, ModelNotFound, NoWorker
from fleet.core.hand_off import HandOff
from fleet.core.ids import RequestId
from web.errors import ErrorBody, NotFound, envelope_of
from web.gateway import Gateway
from web.ports import RequestView, WorkerView
from web.wire import Model, ModelList

GATEWAY_ROLE = "gateway"


class WorkerBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    role: str
    host: str
    pid: int
    started_us: int
    lease_left_s: float
    standby: bool
    running: int
    capacity: int


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[WorkerBody]
    missing_roles: list[str]


class TaskBody(msgspec.Struct, frozen=True, kw_only=True):
    """`hand_off`: the moments at which its decode came to another worker than its prefill. `spared`: the rows of it that the
    conversation's earlier turn had computed.
    """

    stage: str
    state: str
    owner: str | None
    walk: str | None
    hand_off: HandOff | None = None
    spared: int = 0


class EdgeBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    target: str
    produced: int
    consumed: int
    items: int


class StoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """One request's story."""

    id: str
    object: str = "fleet.request"
    state: str
    error: str | None
    created_us: int
    tasks: list[TaskBody]
    edges: list[EdgeBody]


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "fleet.request.aborted"
    aborted: bool


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """`missing` names the roles without a live worker."""

    ready: bool
    missing: list[str]
    error: ErrorBody | None = None


def json_response(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json", headers=headers)


class FleetRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def models(self, _request: Request) -> Response:
        return json_response(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        wanted = str(request.path_params["model"])
        if wanted != self._gateway.model:
            raise ModelNotFound(f"model: no model {wanted!r}; this server has {self._gateway.model!r}", param="model")
        return json_response(self._model())

    async def workers(self, _request: Request) -> Response:
        workers = await self._gateway.client.workers()
        missing = await self._gateway.client.missing_roles()
        return json_response(WorkerList(data=[_worker(view) for view in workers], missing_roles=list(missing)))

    async def story(self, request: Request) -> Response:
        request_id = RequestId(str(request.path_params["request_id"]))
        view = await self._gateway.client.request_view(request_id)
        if view is None:
            raise _no_request(request_id)
        return json_response(_story(request_id, view))

    async def abort(self, request: Request) -> Response:
        """`aborted` false: the request had ended already."""
        request_id = RequestId(str(request.path_params["request_id"]))
        aborted = await self._gateway.client.abort_request(request_id)
        if not aborted and await self._gateway.client.request_view(request_id) is None:
            raise _no_request(request_id)
        return json_response(Aborted(id=request_id, aborted=aborted))

    async def health(self, _request: Request) -> Response:
        """This process is up; nothing is said of others."""
        return json_response(Health())

    async def ready(self, _request: Request) -> Response:
        try:
            missing = list(await self._gateway.client.missing_roles())
        except FleetError as error:
            return json_response(Readiness(ready=False, missing=[], error=envelope_of(error).error), 503)
        if not missing:
            return json_response(Readiness(ready=True, missing=[]))
        message = f"no live worker for: {', '.join(missing)}; start one with `fleet worker {missing[0]}`"
        body = Readiness(ready=False, missing=missing, error=envelope_of(NoWorker(message)).error)
        return json_response(body, 503, {"retry-after": "1"})

    async def metrics(self, _request: Request) -> Response:
        """Fleet-wide gauges are read now; if Redis is away, the rest is still told."""
        metrics = self._gateway.metrics
        try:
            workers = await self._gateway.client.workers()
            roles = await self._gateway.client.roles()
            metrics.live.set(await self._gateway.client.live_count())
        except FleetError:
            workers, roles = [], []
        metrics.set_roles(roles)
        metrics.workers.clear()
        for view in workers:
            metrics.workers.labels(role=view.role or GATEWAY_ROLE).inc()
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> Model:
        return Model(id=self._gateway.model, created=self._gateway.started_s)


def _no_request(request_id: str) -> NotFound:
    return NotFound(f"no request {request_id!r}; it never was, or its retention time is over", param="request_id")


def _worker(view: WorkerView) -> WorkerBody:
    return WorkerBody(
        id=view.id,
        role=view.role or GATEWAY_ROLE,
        host=view.host,
        pid=view.pid,
        started_us=view.started_us,
        lease_left_s=round(view.lease_left_s, 3),
        standby=view.standby,
        running=view.running,
        capacity=view.capacity,
    )


def _story(request_id: str, view: RequestView) -> StoryBody:
    return StoryBody(
        id=request_id,
        state=view.state,
        error=view.error or None,
        created_us=view.created_us,
        tasks=[
            TaskBody(
                stage=t.stage, state=t.state, owner=t.owner or None, walk=t.walk or None, hand_off=t.hand_off, spared=t.spared
            )
            for t in view.tasks
        ],
        edges=[
            EdgeBody(
                name=e.name, source=e.source, target=e.target, produced=e.produced, consumed=e.consumed, items=e.items
            )
            for e in view.edges
        ],
    )
