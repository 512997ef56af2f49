"""Route by which a person orders how many workers a role has. Knows no role by name."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput
from fleet.telemetry.views import MAX_REPLICAS
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.callers import current_caller
from web.http.json_response import json_response

MAX_BODY_BYTES = 1024
EXAMPLE = '{"replicas": 2}'


class RoleOrderBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of PUT /v1/fleet/roles/{role}. `replicas`: number of workers that accept tasks."""

    replicas: int


class RoleOrderResult(msgspec.Struct, frozen=True, kw_only=True):
    """The number of a role's workers was ordered. The present `fleet up` commands follow within two
    seconds: they start workers, or let workers finish their tasks and then stop them.
    """

    id: str
    object: str = "fleet.role"
    replicas: int


class ScalingApi:
    """The route of ordered numbers of workers; `routes()` lists it."""

    def __init__(self, gateway: Gateway) -> None:
        self._client = gateway.client

    def routes(self, root: str) -> list[BaseRoute]:
        return [Route(f"{root}/roles/{{role}}", self.scale, methods=["PUT"])]

    async def scale(self, request: Request) -> Response:
        replicas = _replicas(await read_body(request, MAX_BODY_BYTES))
        role = await self._client.operations.scale(
            str(request.path_params["role"]), replicas, by=current_caller().name
        )
        return json_response(RoleOrderResult(id=role, replicas=replicas))


def _replicas(raw: bytes) -> int:
    """Return the number in a body. Raises: BadInput naming the field."""
    try:
        return msgspec.json.decode(raw, type=RoleOrderBody).replicas
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"replicas: {error}; send a whole number from 0 to {MAX_REPLICAS}, as in {EXAMPLE}",
            param="replicas",
        ) from error
