"""GET /health, /ready and /metrics. Knows no stage."""

from collections.abc import Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import FleetError, NoWorker, RedisUnreachable
from fleet.core.ids import RoleName
from web.gateway.gateway import Gateway
from web.http.errors import ErrorBody, envelope_of
from web.http.guard import is_trusted
from web.http.json_response import json_response


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"


class StartingRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role with starting workers. `loaded_percent` is the percentage of the weights that the most
    advanced of these workers has loaded; None if unknown.
    """

    role: str
    loaded_percent: int | None = None

    def __str__(self) -> str:
        loaded = "" if self.loaded_percent is None else f", {self.loaded_percent} % loaded"
        return f"{self.role} (starting{loaded})"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Response of GET /ready. `error`: why requests cannot be served, None if `ready` is true.
    `missing`: roles without a live worker; `starting`: the missing roles that have a starting
    worker. For clients without the API key both are empty, and `error` gives no details.
    """

    ready: bool
    missing: list[str]
    starting: list[StartingRole] = []
    error: ErrorBody | None = None


class HealthRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def health(self, _request: Request) -> Response:
        """Answer GET /health: 200 while this process runs, whatever the state of the fleet."""
        return json_response(Health())

    async def ready(self, request: Request) -> Response:
        """Answer GET /ready: 200 if requests can be served, otherwise 503. The names of missing
        roles are only for clients with the API key.
        """
        try:
            missing = await self._gateway.client.telemetry.missing_roles()
            roles = await self._gateway.client.telemetry.roles() if missing else []
        except FleetError as error:
            return _not_ready(request, [], [], error)
        trouble = self._gateway.client.telemetry.redis_trouble()
        if not missing and not trouble:
            return json_response(Readiness(ready=True, missing=[]))
        starting = [
            StartingRole(role=v.role, loaded_percent=v.loaded_percent)
            for v in roles
            if v.starting and v.role in missing
        ]
        error = (
            RedisUnreachable(trouble)
            if trouble
            else _no_worker(missing, starting, {v.role: v.gap for v in roles if v.gap})
        )
        return _not_ready(request, missing, starting, error)

    async def metrics(self, _request: Request) -> Response:
        """Answer GET /metrics with this gateway's metrics and the fleet's metrics, which are read
        now and left out while Redis is unreachable.
        """
        metrics = self._gateway.metrics
        metrics.waiting.set(self._gateway.client.requests.num_waiting)
        try:
            workers = await self._gateway.client.telemetry.workers()
            roles = await self._gateway.client.telemetry.roles()
            transfers = await self._gateway.client.telemetry.transfers()
            metrics.live.set(await self._gateway.client.telemetry.num_live())
        except FleetError:
            metrics.fleet.show()
        else:
            metrics.fleet.show(workers, roles, transfers.edges)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _no_worker(
    missing: Sequence[str], starting: Sequence[StartingRole], gaps: Mapping[RoleName, str]
) -> NoWorker:
    shown = {each.role: str(each) for each in starting}
    absent = [role for role in missing if role not in shown]
    remedy = f"start one with `fleet worker {absent[0]}`" if absent else "wait until it has loaded"
    named = [
        shown.get(role, role) + (f" ({gap})" if (gap := gaps.get(RoleName(role))) else "")
        for role in missing
    ]
    return NoWorker(f"no live worker for: {', '.join(named)}; {remedy}")


def _not_ready(
    request: Request, missing: Sequence[str], starting: Sequence[StartingRole], error: FleetError
) -> Response:
    if not is_trusted(request.scope):
        missing, starting = [], []
        error = NoWorker("requests cannot be served now; send the API key to read what is missing")
    body = Readiness(
        ready=False, missing=list(missing), starting=list(starting), error=envelope_of(error).error
    )
    return json_response(body, 503, {"retry-after": "1"})
