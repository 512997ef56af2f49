"""The gateway's ASGI app: routes and middleware as one visible list."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from fleet.config.schema import FleetConfig
from fleet.core.errors import FleetError
from fleet.processing import Frontend
from web.chat import ChatEndpoint
from web.console import Console
from web.errors import on_fleet_error, on_http_error
from web.fleet_routes import FleetRoutes
from web.gateway import Gateway
from web.middleware import Guard, RequestContext
from web.ports import FleetPort
from web.resume import ResumeEndpoint

STATIC = Path(__file__).parent / "static"


def create_app(config: FleetConfig, client: FleetPort, frontend: Frontend, api_key: str | None) -> Starlette:
    """Raises: ConfigError if the graph or the deployment's sampling cannot be served."""
    gateway = Gateway(config, client, frontend)
    app = Starlette(
        routes=_routes(gateway, api_key),
        middleware=[Middleware(RequestContext, metrics=gateway.metrics), Middleware(Guard, api_key=api_key)],
        exception_handlers={FleetError: on_fleet_error, HTTPException: on_http_error},
    )
    app.state.closing = gateway.closing
    return app


def _routes(gateway: Gateway, api_key: str | None) -> list[BaseRoute]:
    fleet, console = FleetRoutes(gateway), Console(gateway, api_key)
    return [
        Route("/v1/chat/completions", ChatEndpoint(gateway), methods=["POST"]),
        Route("/v1/models", fleet.models),
        Route("/v1/models/{model:path}", fleet.model),
        Route("/v1/fleet/workers", fleet.workers),
        Route("/v1/fleet/requests/{request_id}", fleet.story),
        Route("/v1/fleet/requests/{request_id}/stream", ResumeEndpoint(gateway), methods=["GET"]),
        Route("/v1/fleet/requests/{request_id}", fleet.abort, methods=["DELETE"]),
        Route("/health", fleet.health),
        Route("/ready", fleet.ready),
        Route("/metrics", fleet.metrics),
        Route("/", console.page),
        Route("/console/login", console.login, methods=["GET", "POST"]),
        Route("/console/events", console.events),
        WebSocketRoute("/console/ws", console.socket),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
