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
from web.fleet_api.health import HealthRoutes
from web.fleet_api.resume import ResumeEndpoint
from web.fleet_api.routes import FleetApi
from web.gateway.fleet_port import FleetPort
from web.gateway.gateway import Gateway
from web.http.body import BodyMemory
from web.http.errors import on_fleet_error, on_http_error
from web.http.guard import AccessRules, Guard
from web.http.hosts import AllowedHosts
from web.http.logins import Logins
from web.http.middleware import RequestContext
from web.http.origins import AllowedOrigins, Cors
from web.http.protocol.abuse import TimedAbuseLog
from web.http.wrong_keys import WrongKeys
from web.openai.chat import ChatEndpoint
from web.openai.models import ModelRoutes
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

    `frontend` is the model's tokenizer and audio input. `api_key` is the key that clients must
    send; None requires no key. `clock` is the clock of the voice sessions, which tests replace.
    Raises: ConfigError if the graph or the deployment's sampling cannot be served, or if requests
    from any origin are allowed without a key.
    """
    gateway = Gateway(config, client, frontend)
    has_key = api_key is not None
    origins = AllowedOrigins(config.web, has_key=has_key)
    lines = TimedAbuseLog()
    logins, wrong_keys = Logins(client.logins, api_key), WrongKeys(lines)
    rules = AccessRules(
        api_key, config.web, AllowedHosts(config.web, has_key=has_key), origins, logins, wrong_keys
    )
    templates = Templates(gateway.graph)
    login = LoginPages(gateway, api_key, logins, wrong_keys, templates)
    app = Starlette(
        routes=[
            *_routes(gateway, wrong_keys, lines, clock),
            *console_routes(gateway, login, templates),
        ],
        middleware=[
            Middleware(Cors, origins=origins, lines=lines),
            Middleware(ErrorPages, gateway=gateway, templates=templates),
            Middleware(
                RequestContext,
                responses=gateway.metrics.http,
                bodies=BodyMemory(config.web.body_memory_mib),
            ),
            Middleware(Guard, rules=rules, refuse_socket=partial(refuse_socket, lines=lines)),
            Middleware(QueryFields),
        ],
        exception_handlers={FleetError: on_fleet_error, HTTPException: on_http_error},
    )
    app.state.closing = gateway.closing
    app.state.detach_all = client.requests.detach_all
    app.state.close = gateway.close
    app.state.stop_captures = gateway.captures.stop
    return app


def _routes(
    gateway: Gateway, wrong_keys: WrongKeys, lines: TimedAbuseLog, clock: Clock | None
) -> list[BaseRoute]:
    return [
        Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
        Route("/v1/audio/speech", SpeechEndpoint(gateway), methods=["POST"]),
        *SpeechSockets(gateway).routes(),
        Route("/v1/audio/transcriptions", TranscriptionEndpoint(gateway), methods=["POST"]),
        *ModelRoutes(gateway).routes(),
        Route("/v1/fleet/requests/{request_id}/stream", ResumeEndpoint(gateway), methods=["GET"]),
        *FleetApi(gateway).routes(),
        *HealthRoutes(gateway).routes(),
        Route("/openapi.json", OpenApi(gateway).describe),
        *VoiceRoutes(gateway, wrong_keys, lines, clock).routes(),
    ]
