"""The console's routes as one visible list."""

from starlette.routing import BaseRoute, Mount, Route

from web.console.live_pages import LivePages
from web.console.login import LoginPages
from web.console.page_context import LIVE
from web.console.pages.api_docs import ApiDocsPage
from web.console.pages.jobs import JobsPage
from web.console.pages.logs import LogsPage, LogStream
from web.console.pages.overview import OverviewPage
from web.console.pages.queues import QueuesPage
from web.console.pages.request import OneRequestPage
from web.console.pages.requests import RequestsPage
from web.console.pages.sessions import SessionsPage
from web.console.pages.transfers import TransfersPage
from web.console.pages.voice import VoicePage
from web.console.pages.workers import OneWorkerPage, WorkersPage
from web.console.static_files import HashedStaticFiles
from web.console.templating import STATIC, Templates
from web.gateway import Gateway


def console_routes(gateway: Gateway, login: LoginPages, views: Templates) -> list[BaseRoute]:
    voice = VoicePage(gateway, views)
    requests, tail = RequestsPage(gateway), LogStream(gateway, views)
    pages = (
        OverviewPage(gateway), requests, OneRequestPage(gateway), WorkersPage(gateway), OneWorkerPage(gateway),
        QueuesPage(gateway), TransfersPage(gateway), SessionsPage(gateway), JobsPage(gateway), LogsPage(gateway),
    )  # fmt: skip
    live = LivePages(gateway, views, pages)
    return [
        Route("/", voice.page),
        Route("/console/events", voice.events),
        Route("/overview", live.serve_page("overview")),
        Route("/requests", live.serve_page("requests")),
        Route("/requests/{id}", live.serve_page("request")),
        Route("/requests/{id}/older", requests.older),
        Route("/requests/{id}/newer", requests.newer),
        Route("/workers", live.serve_page("workers")),
        Route("/workers/{id}", live.serve_page("worker")),
        Route("/queues", live.serve_page("queues")),
        Route("/transfers", live.serve_page("transfers")),
        Route("/sessions", live.serve_page("sessions")),
        Route("/jobs", live.serve_page("jobs")),
        Route("/logs", live.serve_page("logs")),
        Route(tail.path, tail),
        Route(f"{LIVE}{{key}}", live),
        Route("/docs", ApiDocsPage(views).show),
        Route("/console/login", login.log_in, methods=["GET", "POST"]),
        Route("/console/logout", login.log_out, methods=["POST"]),
        Mount("/static", HashedStaticFiles(directory=STATIC)),
    ]
