"""The console's routes as one visible list."""

from starlette.routing import BaseRoute, Mount, Route

from web.console import Console
from web.gateway.gateway import Gateway
from web.pages.frame import LIVE
from web.pages.jobs import JobsPage
from web.pages.live import LivePages
from web.pages.login import Login
from web.pages.logs import LogsPage, LogTail
from web.pages.overview import OverviewPage
from web.pages.queues import QueuesPage
from web.pages.request import RequestStoryPage
from web.pages.requests import RequestsPage
from web.pages.sessions import SessionsPage
from web.pages.static import HashedFiles
from web.pages.transfers import TransfersPage
from web.pages.views import STATIC, Views
from web.pages.workers import OneWorkerPage, WorkersPage


def console_routes(gateway: Gateway, login: Login, views: Views) -> list[BaseRoute]:
    voice = Console(gateway, views)
    requests, tail = RequestsPage(gateway), LogTail(gateway, views)
    pages = (
        OverviewPage(gateway), requests, RequestStoryPage(gateway), WorkersPage(gateway), OneWorkerPage(gateway),
        QueuesPage(gateway), TransfersPage(gateway), SessionsPage(gateway), JobsPage(gateway), LogsPage(gateway),
    )  # fmt: skip
    live = LivePages(gateway, views, pages)
    return [
        Route("/", voice.page),
        Route("/console/events", voice.events),
        Route("/overview", live.whole("overview")),
        Route("/requests", live.whole("requests")),
        Route("/requests/{id}", live.whole("request")),
        Route("/requests/{id}/older", requests.older),
        Route("/requests/{id}/newer", requests.newer),
        Route("/workers", live.whole("workers")),
        Route("/workers/{id}", live.whole("worker")),
        Route("/queues", live.whole("queues")),
        Route("/transfers", live.whole("transfers")),
        Route("/sessions", live.whole("sessions")),
        Route("/jobs", live.whole("jobs")),
        Route("/logs", live.whole("logs")),
        Route(tail.path, tail),
        Route(f"{LIVE}{{key}}", live),
        Route("/console/login", login.enter, methods=["GET", "POST"]),
        Route("/console/logout", login.leave, methods=["POST"]),
        Mount("/static", HashedFiles(directory=STATIC)),
    ]
