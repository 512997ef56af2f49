"""The gateway's ASGI app: routes and middleware as one visible list."""

from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from fleet.config.schema import FleetConfig
from fleet.core.errors import FleetError
from fleet.processing import Frontend
from web.console.error_pages import ErrorPages
from web.console.login import LoginPages
from web.console.routes import console_routes
from web.console.templating import Templates
from web.fleet_api.alert_sender import AlertSender
from web.fleet_api.answer_keeper import AnswerKeeper
from web.fleet_api.health import HealthRoutes
from web.fleet_api.history import HistoryApi
from web.fleet_api.otlp.exporter import AnswerExporter
from web.fleet_api.resume import ResumeEndpoint
from web.fleet_api.routes import FleetApi
from web.gateway.fleet_port import FleetPort
from web.gateway.gateway import Gateway
from web.http.body import BodyMemory
from web.http.compression import Compression
from web.http.errors import on_fleet_error, on_http_error
from web.http.guard import AccessRules, Guard
from web.http.hosts import AllowedHosts
from web.http.key_ring import KeyRing
from web.http.logins import Logins
from web.http.middleware import RequestContext
from web.http.origins import AllowedOrigins, Cors
from web.http.protocol.abuse import TimedAbuseLog
from web.http.scopes import require_scopes
from web.http.wrong_keys import WrongKeys
from web.openai.batches import BatchRoutes
from web.openai.chat import ChatEndpoint
from web.openai.completions import CompletionEndpoint
from web.openai.decisions import DecisionEndpoint
from web.openai.files import FileRoutes
from web.openai.models import ModelRoutes
from web.openai.responses.endpoint import ResponseEndpoint
from web.openai.responses.stored_routes import StoredResponseRoutes
from web.openai.speech import SpeechEndpoint
from web.openai.transcription import TranscriptionEndpoint
from web.openapi.document import OpenApi
from web.openapi.query_fields import QueryFields
from web.realtime.clock import Clock
from web.realtime.transport.refusal import refuse_socket
from web.realtime.transport.routes import VoiceRoutes
from web.speech_stream.socket import SpeechSockets


def create_app(
    config: FleetConfig,
    client: FleetPort,
    frontend: Frontend,
    api_key: str | None,
    clock: Clock | None = None,
) -> Starlette:
    """Return the gateway's ASGI app for a deployment.

    `frontend` is the model's tokenizer and audio input. Clients must send `api_key` or a key of
    `web.keys_file`; without both none is required. `clock` is the clock of the voice sessions,
    which tests replace.
    Raises: ConfigError if the graph or the deployment's sampling cannot be served, if requests from
    any origin are allowed without a key, or if `web.keys_file` cannot be read.
    """
    gateway = Gateway(config, client, frontend)
    keeper = AnswerKeeper(gateway)
    followers = (keeper, AlertSender(gateway), AnswerExporter(gateway))
    keys = KeyRing(api_key, config.web.keys_file)
    has_key = keys.is_required
    origins = AllowedOrigins(config.web, has_key=has_key)
    lines = TimedAbuseLog()
    refuse = partial(refuse_socket, lines=lines)
    logins, wrong_keys = Logins(client.logins, keys), WrongKeys(lines)
    rules = AccessRules(
        keys, config.web, AllowedHosts(config.web, has_key=has_key), origins, logins, wrong_keys
    )
    templates = Templates(gateway.graph)
    login = LoginPages(gateway, keys, logins, wrong_keys, templates)
    voice = VoiceRoutes(gateway, keys, wrong_keys, lines, clock)
    routes = [
        *_routes(gateway, voice, keeper),
        *console_routes(gateway, login, templates),
    ]
    require_scopes(routes, refuse, lines)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Compression),
            Middleware(Cors, origins=origins, lines=lines),
            Middleware(ErrorPages, gateway=gateway, templates=templates),
            Middleware(
                RequestContext,
                responses=gateway.metrics.http,
                bodies=BodyMemory(config.web.body_memory_mib),
            ),
            Middleware(Guard, rules=rules, refuse_socket=refuse),
            Middleware(QueryFields),
        ],
        exception_handlers={FleetError: on_fleet_error, HTTPException: on_http_error},
    )
    app.state.closing = gateway.closing
    app.state.calls_left = voice.calls_left
    app.state.detach_all = client.requests.detach_all
    app.state.close = gateway.close
    app.state.stop_captures = gateway.captures.stop
    app.state.followers = followers
    return app


def _routes(gateway: Gateway, voice: VoiceRoutes, keeper: AnswerKeeper) -> list[BaseRoute]:
    return [
        Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
        Route("/v1/responses", ResponseEndpoint(gateway), methods=["POST"]),
        *StoredResponseRoutes(gateway).routes(),
        Route("/v1/decisions", DecisionEndpoint(gateway), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(gateway), methods=["POST"]),
        Route("/v1/audio/speech", SpeechEndpoint(gateway), methods=["POST"]),
        *SpeechSockets(gateway).routes(),
        Route("/v1/audio/transcriptions", TranscriptionEndpoint(gateway), methods=["POST"]),
        *ModelRoutes(gateway).routes(),
        *FileRoutes(gateway).routes(),
        *BatchRoutes(gateway).routes(),
        Route("/v1/fleet/requests/{request_id}/stream", ResumeEndpoint(gateway), methods=["GET"]),
        *FleetApi(gateway).routes(),
        *HistoryApi(gateway, keeper).routes(),
        *HealthRoutes(gateway).routes(),
        Route("/openapi.json", OpenApi(gateway).describe),
        *voice.routes(),
    ]
