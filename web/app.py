"""The gateway's ASGI app: routes and middleware as one visible list."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from fleet.config.schema import FleetConfig
from fleet.core.errors import FleetError
from fleet.processing import Frontend
from web.body_memory import BodyMemory
from web.chat import ChatEndpoint
from web.errors import on_fleet_error, on_http_error
from web.fleet_api import FleetApi
from web.fleet_routes import FleetRoutes
from web.gateway import Gateway
from web.guard import Guard, Rules
from web.hosts import Hosts
from web.logins import Logins
from web.middleware import RequestContext
from web.openapi import OpenApi
from web.origins import Cors, Origins
from web.pages.failed import ErrorPages
from web.pages.login import Login
from web.pages.site import console_routes
from web.pages.views import Views
from web.ports import FleetPort
from web.realtime.transport.refusal import RefusalLog
from web.realtime.transport.routes import VoiceRoutes
from web.resume import ResumeEndpoint
from web.speech import SpeechEndpoint
from web.transcription import TranscriptionEndpoint
from web.wrong_keys import WrongKeys


def create_app(config: FleetConfig, client: FleetPort, frontend: Frontend, api_key: str | None) -> Starlette:
    """Raises: ConfigError if the graph or the deployment's sampling cannot be served, or any origin is allowed without a key."""
    gateway = Gateway(config, client, frontend)
    has_key = api_key is not None
    origins = Origins(config.web, has_key=has_key)
    logins, wrong_keys = Logins(client.logins, api_key), WrongKeys()
    refusal_log = RefusalLog()
    rules = Rules(api_key, config.web, Hosts(config.web, has_key=has_key), origins, logins, wrong_keys)
    views = Views()
    login = Login(gateway, api_key, logins, wrong_keys, views)
    app = Starlette(
        routes=[*_routes(gateway, wrong_keys, refusal_log), *console_routes(gateway, login, views)],
        middleware=[
            Middleware(Cors, origins=origins),
            Middleware(ErrorPages, gateway=gateway),
            Middleware(RequestContext, metrics=gateway.metrics, bodies=BodyMemory(config.web.body_memory_mib)),
            Middleware(Guard, rules=rules, refusal_log=refusal_log),
        ],
        exception_handlers={FleetError: on_fleet_error, HTTPException: on_http_error},
    )
    app.state.closing = gateway.closing
    app.state.detach_all = gateway.detach_all
    app.state.close = gateway.close
    return app


def _routes(gateway: Gateway, wrong_keys: WrongKeys, refusal_log: RefusalLog) -> list[BaseRoute]:
    fleet = FleetRoutes(gateway)
    return [
        Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
        Route("/v1/audio/speech", SpeechEndpoint(gateway), methods=["POST"]),
        Route("/v1/audio/transcriptions", TranscriptionEndpoint(gateway), methods=["POST"]),
        Route("/v1/audio/translations", fleet.translations, methods=["POST"]),
        Route("/v1/audio/voices", fleet.voices),
        Route("/v1/audio/models", fleet.speech_models),
        Route("/v1/models", fleet.models),
        Route("/v1/models/{model:path}", fleet.model),
        Route("/v1/fleet/requests/{request_id}/stream", ResumeEndpoint(gateway), methods=["GET"]),
        Route("/v1/fleet/requests/{request_id}", fleet.abort, methods=["DELETE"]),
        *FleetApi(gateway).routes(),
        Route("/health", fleet.health),
        Route("/ready", fleet.ready),
        Route("/metrics", fleet.metrics),
        Route("/openapi.json", OpenApi(gateway).describe),
        *VoiceRoutes(gateway, wrong_keys, refusal_log).routes(),
    ]
