"""The Sessions page: the live voice sessions, with their latencies and underruns. Knows no
audio.
"""

from dataclasses import dataclass

from web.console.page_context import LivePage, PageContext, Query
from web.realtime.session_views import SessionView, read_views

MAX_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsContext(PageContext):
    """Data of the Sessions page. `sessions` are the newest sessions; `num_more` older sessions are
    left out.
    """

    num_more: int = 0
    sessions: tuple[SessionView, ...] = ()


class SessionsPage(LivePage):
    key = active = "sessions"
    path = "/sessions"
    live = ("trouble", "sessions")
    context = SessionsContext

    async def read(self, query: Query) -> SessionsContext:
        newest = await read_views(self._gateway)
        return SessionsContext(sessions=tuple(newest[:MAX_ROWS]), num_more=len(newest[MAX_ROWS:]))
