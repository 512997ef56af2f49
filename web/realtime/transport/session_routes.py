"""Routes of recorded voice sessions: one with its turns, the sound of a turn, and the list of those
that this host keeps.
"""

from collections.abc import Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput, quoted
from fleet.history.sessions import TROUBLES, KeptSessionFilter
from web.gateway.gateway import Gateway
from web.http.json_response import json_response
from web.http.query_params import choice_param, int_param, time_param
from web.realtime.recorded_sessions import RecordedSessions

MAX_PAGE = 500
MAX_US = 2**53
STATES = ("ended", "unknown")


class KeptSessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A kept session in a list. `ended_us` is 0 if its end was not recorded, because its gateway
    was killed or a gateway of another host continued it; `seen_us`: time of the last record, in
    microseconds since 1970. `why`: what went wrong, in words of `TROUBLES`.
    """

    id: str
    began_us: int
    seen_us: int
    ended_us: int
    turns: int
    key: str
    why: Sequence[str]


class KeptSessionList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of kept sessions, the latest begun first. `next`: value of `before` for the following
    page; null on the last one.
    """

    object: str = "list"
    data: Sequence[KeptSessionView]
    next: int | None


class RecordedSessionRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._history = gateway.history
        self._sessions = RecordedSessions(gateway)

    def routes(self) -> list[BaseRoute]:
        one = "/v1/fleet/sessions/{session_id}"
        return [
            Route(one, self.session, methods=["GET"]),
            Route(f"{one}/turns/{{number}}/speech", self.speech, methods=["GET"]),
            Route("/v1/fleet/kept/sessions", self.kept, methods=["GET"]),
        ]

    async def session(self, request: Request) -> Response:
        """Send a session with its turns, live or kept."""
        return json_response(await self._sessions.read(str(request.path_params["session_id"])))

    async def speech(self, request: Request) -> Response:
        """Send what the caller said in a turn of a live session, as a WAV file."""
        session, number = str(request.path_params["session_id"]), request.path_params["number"]
        if not str(number).isdecimal() or len(str(number)) > 9:
            raise BadInput(
                f"number: {quoted(str(number))} is no number of a turn; the first is 1",
                param="number",
            )
        wav = await self._sessions.speech(session, int(number))
        return Response(wav, media_type="audio/wav", headers={"cache-control": "no-store"})

    async def kept(self, request: Request) -> Response:
        """List the sessions that this gateway's host keeps."""
        params = request.query_params
        limit = int_param(params, "limit", 50, MAX_PAGE, least=1)
        before_us = int_param(params, "before", 0, MAX_US)
        found = await self._history.sessions(limit, read_filter(params), before_us=before_us)
        views = [
            KeptSessionView(
                id=self._sessions.name(one.session),
                began_us=one.began_us,
                seen_us=one.seen_us,
                ended_us=one.ended_us,
                turns=one.num_turns,
                key=one.key,
                why=one.why,
            )
            for one in found
        ]
        last = views[-1].began_us if len(views) == limit else None
        return json_response(KeptSessionList(data=views, next=last))


def read_filter(params: Mapping[str, str]) -> KeptSessionFilter:
    """Return the filter in query parameters. Raises: BadInput naming the parameter."""
    from_us, to_us = time_param(params, "from"), time_param(params, "to")
    if to_us and from_us > to_us:
        raise BadInput("from: it is later than `to`; exchange them", param="from")
    return KeptSessionFilter(
        state=choice_param(params, "state", STATES),
        why=choice_param(params, "why", TROUBLES),
        key=params.get("key", ""),
        text=params.get("q", ""),
        from_us=from_us,
        to_us=to_us,
    )
