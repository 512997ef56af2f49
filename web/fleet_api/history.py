"""The routes of kept answers: their list, and the pin that keeps one beyond its days."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import Conflict
from fleet.core.ids import RequestId, request_id_of
from fleet.history.choice import REASONS
from web.fleet_api.answer_keeper import AnswerKeeper
from web.gateway.gateway import Gateway
from web.http.json_response import json_response
from web.http.query_params import choice_param, int_param

MAX_PAGE = 500
MAX_US = 2**53


class KeptView(msgspec.Struct, frozen=True, kw_only=True):
    """A kept answer in a list. `kept_us`: when it was kept, microseconds since 1970."""

    id: RequestId
    kept_us: int
    why: Sequence[str]
    pinned: bool


class KeptList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of kept answers, the newest first. `next`: value of `before` for the following page;
    null on the last one.
    """

    object: str = "list"
    data: Sequence[KeptView]
    next: int | None


class PinResult(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId
    object: str = "fleet.request.pin"
    pinned: bool


class HistoryApi:
    def __init__(self, gateway: Gateway, keeper: AnswerKeeper) -> None:
        self._history, self._keeper = gateway.history, keeper

    def routes(self) -> list[BaseRoute]:
        pin = "/v1/fleet/requests/{request_id}/pin"
        return [
            Route("/v1/fleet/kept", self.kept),
            Route(pin, self.pin, methods=["POST"]),
            Route(pin, self.unpin, methods=["DELETE"]),
        ]

    async def kept(self, request: Request) -> Response:
        """List the answers that this gateway's host keeps."""
        params = request.query_params
        limit = int_param(params, "limit", 50, MAX_PAGE, least=1)
        before_us = int_param(params, "before", 0, MAX_US)
        why = choice_param(params, "why", REASONS)
        found = await self._history.newest(limit, before_us=before_us, why=why)
        views = [
            KeptView(id=one.request, kept_us=one.kept_us, why=one.why, pinned=one.pinned)
            for one in found
        ]
        return json_response(
            KeptList(data=views, next=views[-1].kept_us if len(views) == limit else None)
        )

    async def pin(self, request: Request) -> Response:
        """Keep an answer until it is no longer pinned. Raises: NotFound; Conflict if this server
        keeps no answers.
        """
        if not self._history.is_enabled:
            raise Conflict("this server keeps no answers; set history.max_mib above 0")
        request_id = request_id_of(str(request.path_params["request_id"]))
        if not await self._history.pin(request_id, pinned=True):
            await self._keeper.keep(request_id, ["pinned"], pinned=True)
        return json_response(PinResult(id=request_id, pinned=True))

    async def unpin(self, request: Request) -> Response:
        request_id = request_id_of(str(request.path_params["request_id"]))
        await self._history.pin(request_id, pinned=False)
        return json_response(PinResult(id=request_id, pinned=False))
