"""Sessions: the live voice sessions, with their latencies and underruns. Knows no audio."""

from dataclasses import dataclass, replace

from web.console.page_context import LivePage, PageContext, Query, stream_path
from web.realtime.session_views import SessionView, read_views

MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsContext(PageContext):
    """`sessions`: the newest; `num_more` are left out."""

    num_more: int = 0
    sessions: tuple[SessionView, ...] = ()


class SessionsPage(LivePage):
    key = active = "sessions"
    path = "/sessions"
    live = ("trouble", "sessions")

    def empty(self, query: Query) -> SessionsContext:
        return SessionsContext(title="Sessions", stream=stream_path(self.key, {}))

    async def read(self, query: Query) -> SessionsContext:
        newest = await read_views(self._gateway)
        return replace(self.empty(query), sessions=tuple(newest[:MAX_ROWS]), num_more=len(newest[MAX_ROWS:]))
