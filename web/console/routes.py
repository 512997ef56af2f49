"""Routes of all pages and streams of the console."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from web.console.answer_view import AnswerLoader
from web.console.bundle import BundleRoute
from web.console.live_pages import LivePages
from web.console.login import LoginPages
from web.console.page_context import LIVE
from web.console.pages.api_docs import ApiDocsPage
from web.console.pages.compare import ComparePage
from web.console.pages.fleet import FleetPage
from web.console.pages.incidents import IncidentsPage, OneIncidentPage
from web.console.pages.jobs import JobsPage
from web.console.pages.kept import KeptPage
from web.console.pages.logs import LogsPage, LogStream
from web.console.pages.now import NowPage
from web.console.pages.orders import OrdersPage
from web.console.pages.queues import QueuesPage
from web.console.pages.request import OneRequestPage
from web.console.pages.requests import RequestsPage
from web.console.pages.session import OneSessionPage
from web.console.pages.sessions import SessionsPage
from web.console.pages.training import TrainingPage
from web.console.pages.transfers import TransfersPage
from web.console.pages.voice import PipelineStatusEvents, VoicePage
from web.console.pages.workers import OneWorkerPage, WorkersPage
from web.console.static_files import HashedStaticFiles
from web.console.templating import STATIC, Templates
from web.gateway.gateway import Gateway


def console_routes(gateway: Gateway, login: LoginPages, templates: Templates) -> list[BaseRoute]:
    requests, answers = RequestsPage(gateway), AnswerLoader(gateway)
    workers = (
        FleetPage(gateway),
        WorkersPage(gateway),
        OneWorkerPage(gateway),
        QueuesPage(gateway),
        TransfersPage(gateway),
    )
    training = TrainingPage(gateway)
    others = (
        NowPage(gateway),
        IncidentsPage(gateway),
        OneIncidentPage(gateway),
        OrdersPage(gateway),
        OneRequestPage(gateway, answers),
        ComparePage(gateway, answers),
        SessionsPage(gateway),
        OneSessionPage(gateway),
        KeptPage(gateway),
        JobsPage(gateway),
        LogsPage(gateway),
    )
    live = LivePages(gateway, templates, (requests, *workers, training, *others))
    return [
        Route("/", VoicePage(gateway, templates).show),
        Route("/console/events", PipelineStatusEvents(gateway, templates)),
        *live.routes(),
        Route("/overview", redirect_to_now),
        Route("/v1/fleet/requests/{request_id}/bundle", BundleRoute(gateway, answers).send),
        Route("/requests/{id}/older", requests.redirect_to_older),
        Route("/requests/{id}/newer", requests.redirect_to_newer),
        Route(f"{LIVE}logs", LogStream(gateway, templates)),
        Route(f"{LIVE}{{key}}", live),
        Route("/docs", ApiDocsPage(templates).show),
        Route("/console/login", login.log_in, methods=["GET", "POST"]),
        Route("/console/logout", login.log_out, methods=["POST"]),
        Mount("/static", HashedStaticFiles(directory=STATIC)),
    ]


async def redirect_to_now(_request: Request) -> Response:
    """Redirect from the former address of the Now page."""
    return RedirectResponse("/now", status_code=308)
