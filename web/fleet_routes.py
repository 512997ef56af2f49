"""GET /v1/models, /v1/fleet/..., /health, /ready and /metrics: what the fleet has and does. Knows no stage."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleet.core.errors import FleetError, NoWorker
from fleet.core.ids import RequestId
from web.errors import ErrorBody, UnservedRoute, envelope_of
from web.gateway import Gateway
from web.guard import is_trusted
from web.request_detail import no_request
from web.wire import ListedVoice, Model, ModelList, SpeechModel, SpeechModelList, VoiceList


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "fleet.request.aborted"
    aborted: bool


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """`missing` names the roles without a live worker, to clients with the API key."""

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
        wanted = str(request.path_params["model"]).rstrip("/")
        if not wanted:
            return await self.models(request)
        self._gateway.check_model(wanted)
        return json_response(self._model())

    async def voices(self, _request: Request) -> Response:
        """The default one first; OpenAI's names are understood too."""
        voices = [ListedVoice(id=name, name=name) for name in self._gateway.frontend.voices()]
        return json_response(VoiceList(voices=voices))

    async def speech_models(self, _request: Request) -> Response:
        """Models for /v1/audio/speech: the served one, or none if it does not speak."""
        model = self._gateway.model
        return json_response(SpeechModelList(models=[SpeechModel(id=model, name=model)] if self._gateway.speaks else []))

    async def translations(self, _request: Request) -> Response:
        raise UnservedRoute("translations are not served; /v1/audio/transcriptions writes down what is said, in its own language")

    async def abort(self, request: Request) -> Response:
        """`aborted` false: the request had ended already."""
        request_id = RequestId(str(request.path_params["request_id"]))
        aborted = await self._gateway.client.requests.abort(request_id)
        if not aborted and await self._gateway.client.telemetry.trace(request_id) is None:
            raise no_request(request_id)
        return json_response(Aborted(id=request_id, aborted=aborted))

    async def health(self, _request: Request) -> Response:
        """This process is up; nothing is said of others."""
        return json_response(Health())

    async def ready(self, request: Request) -> Response:
        """Probes need the status alone; what is missing is for clients with the key."""
        try:
            missing = await self._gateway.client.telemetry.missing_roles()
        except FleetError as error:
            return _not_ready(request, [], error)
        if not missing:
            return json_response(Readiness(ready=True, missing=[]))
        message = f"no live worker for: {', '.join(missing)}; start one with `fleet worker {missing[0]}`"
        return _not_ready(request, missing, NoWorker(message))

    async def metrics(self, _request: Request) -> Response:
        """Fleet-wide gauges are read now; if Redis is away, the rest is still told."""
        metrics = self._gateway.metrics
        try:
            workers = await self._gateway.client.telemetry.workers()
            roles = await self._gateway.client.telemetry.roles()
            transfers = await self._gateway.client.telemetry.transfers()
            metrics.live.set(await self._gateway.client.telemetry.num_live())
        except FleetError:
            workers, roles, transfers = [], [], None
        metrics.set_roles(roles)
        metrics.set_workers(workers, roles)
        metrics.set_transfers(transfers)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> Model:
        return Model(id=self._gateway.model, created=self._gateway.started_s)


def _not_ready(request: Request, missing: Sequence[str], error: FleetError) -> Response:
    if not is_trusted(request.scope):
        missing, error = [], NoWorker("requests cannot be served now; send the API key to read what is missing")
    return json_response(Readiness(ready=False, missing=list(missing), error=envelope_of(error).error), 503, {"retry-after": "1"})
