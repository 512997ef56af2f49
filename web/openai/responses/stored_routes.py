"""Routes of stored responses: GET and DELETE /v1/responses/{id}, and the items of its input."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput, UnsupportedValue
from web.gateway.gateway import Gateway
from web.http.guard import owner_of
from web.http.json_response import json_response
from web.openai.responses.conversation import load_response, response_not_found
from web.schema.response_items import ResponseItem
from web.schema.response_object import ItemList, ResponseDeleted

MAX_LISTED, DEFAULT_LISTED = 100, 20


class StoredResponseRoutes:
    """Routes of stored responses. A response is found only with the API key that created it; with
    another key, the response does not exist.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[BaseRoute]:
        path = "/v1/responses/{response_id}"
        return [
            Route(path, self.retrieve, methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(f"{path}/input_items", self.input_items, methods=["GET"]),
            Route(f"{path}/cancel", self.cancel, methods=["POST"]),
        ]

    async def retrieve(self, request: Request) -> Response:
        found = await load_response(self._gateway, _id_of(request), owner_of(request.scope))
        return json_response(found.response)

    async def delete(self, request: Request) -> Response:
        """Delete a response. Later responses of the conversation keep a copy of its items."""
        response_id = _id_of(request)
        if not await self._gateway.client.responses.delete(response_id, owner_of(request.scope)):
            raise response_not_found(response_id)
        return json_response(ResponseDeleted(id=response_id))

    async def input_items(self, request: Request) -> Response:
        """List the items of the response's own input, the newest first by default."""
        found = await load_response(self._gateway, _id_of(request), owner_of(request.scope))
        items = found.items[::-1] if _is_descending(request) else found.items
        return json_response(_page(items, _limit(request), request.query_params.get("after")))

    async def cancel(self, _request: Request) -> Response:
        raise UnsupportedValue(
            "responses are not computed in the background, so none can be cancelled by its id; "
            "close the connection of a running one"
        )


def _id_of(request: Request) -> str:
    return str(request.path_params["response_id"])


def _is_descending(request: Request) -> bool:
    order = request.query_params.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise BadInput("order: must be asc or desc", param="order")
    return order == "desc"


def _limit(request: Request) -> int:
    given = request.query_params.get("limit") or str(DEFAULT_LISTED)
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= 3 else 0
    if not 1 <= limit <= MAX_LISTED:
        raise BadInput(f"limit: must be a number from 1 to {MAX_LISTED}", param="limit")
    return limit


def _page(items: list[ResponseItem], limit: int, after: str | None) -> ItemList:
    """Return up to `limit` items that follow the item with the id `after`, or from the beginning if
    `after` is None or empty. Raises: BadInput if no item has the id.
    """
    start = 0
    if after:
        ids = [item.id for item in items]
        if after not in ids:
            raise BadInput("after: is the id of no item of this response", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )
