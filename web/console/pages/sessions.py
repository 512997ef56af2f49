"""Sessions: who talks by voice now, how fast it is answered, and what went wrong for its listener. Knows no audio."""

from dataclasses import dataclass

from web.console.page_context import PageContext, Query, stream_path
from web.gateway.gateway import Gateway
from web.realtime.session_views import SessionView, read_views

MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsContext(PageContext):
    """`sessions`: the newest; `num_more` are left out."""

    num_more: int = 0
    sessions: tuple[SessionView, ...] = ()


class SessionsPage:
    key = active = "sessions"
    path = "/sessions"
    template = "sessions.html"
    live = ("trouble", "sessions")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def empty(self, query: Query) -> SessionsContext:
        return SessionsContext(title="Sessions", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> SessionsContext:
        newest = await read_views(self._gateway)
        shown, rest = newest[:MAX_ROWS], newest[MAX_ROWS:]
        return SessionsContext(title="Sessions", stream=stream_path(self.key, {}), sessions=tuple(shown), num_more=len(rest))
