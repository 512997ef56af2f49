"""The Sessions page: the live voice sessions of all gateways, then those that this host has kept.
Knows no audio.
"""

from dataclasses import dataclass, replace

import msgspec

from fleet.history.sessions import TROUBLES, KeptSession, KeptSessionFilter
from web.console.page_context import FilteredContext, LivePage, Query, build_path, read_filters
from web.gateway.gateway import Gateway
from web.http.query_params import int_param
from web.realtime.recorded_sessions import RecordedSessions
from web.realtime.session_views import SessionView, read_views
from web.realtime.transport.session_routes import MAX_US, STATES, read_filter

PATH = "/sessions"
FIELDS = ("state", "why", "key", "q", "from", "to")
LIVE_STATE = "live"
MAX_ROWS, PAGE_SIZE = 100, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsContext(FilteredContext):
    """Data of the Sessions page. `sessions` are the newest live sessions; `num_more` older ones are
    left out. `kept` are sessions that this host has kept, without the live ones. `keeps` is False
    if this host keeps no sessions.
    """

    num_more: int = 0
    sessions: tuple[SessionView, ...] = ()
    kept: tuple[KeptSession, ...] = ()
    keeps: bool = True
    states: tuple[str, ...] = (LIVE_STATE, *STATES)
    troubles: tuple[str, ...] = TROUBLES


class SessionsPage(LivePage):
    key = active = "sessions"
    path = "/sessions"
    live = ("trouble", "sessions", "kept", "pager")

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._sessions = RecordedSessions(gateway)

    def empty(self, query: Query) -> SessionsContext:
        wanted = read_filters(query, FIELDS)
        before = query.get("before", "")
        return SessionsContext(
            wanted=wanted,
            stream_query={**wanted, "before": before},
            newest=build_path(PATH, wanted) if before else "",
        )

    async def read(self, query: Query) -> SessionsContext:
        """Return the sessions that match the filters in `query`. Raises: BadInput if a filter is
        invalid; RedisUnreachable.
        """
        wanted = read_filters(query, FIELDS)
        is_live = wanted["state"] == LIVE_STATE
        chosen = read_filter({**wanted, "state": "" if is_live else wanted["state"]})
        before_us = int_param(query, "before", 0, MAX_US)
        views = await read_views(self._gateway)
        shown = [view for view in views if matches_live(view, chosen)] if not before_us else []
        kept: list[KeptSession] = []
        if not is_live:
            names = {view.id for view in views}
            limit = PAGE_SIZE + 1 + len(names)
            found = await self._gateway.history.sessions(limit, chosen, before_us=before_us)
            named = [
                msgspec.structs.replace(one, session=self._sessions.name(one.session))
                for one in found
            ]
            kept = [one for one in named if one.session not in names]
        page = kept[:PAGE_SIZE]
        more = {**wanted, "before": str(page[-1].began_us)} if len(kept) > len(page) else {}
        return replace(
            self.empty(query),
            sessions=tuple(shown[:MAX_ROWS]),
            num_more=len(shown[MAX_ROWS:]),
            kept=tuple(page),
            keeps=self._gateway.history.is_enabled,
            older=build_path(PATH, more) if more else "",
        )


def matches_live(view: SessionView, wanted: KeptSessionFilter) -> bool:
    """Return True if a live session matches a filter. A filter by trouble, or by the state of an
    ended session, matches no live session.
    """
    return (
        not wanted.state
        and not wanted.why
        and wanted.key in ("", view.key)
        and wanted.text in view.id
        and view.seen_us >= wanted.from_us
        and (not wanted.to_us or view.created_us <= wanted.to_us)
    )
