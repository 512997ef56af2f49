"""Routes of draft head training: its state, the version of the draft head in use, and orders to
forget samples.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.core.errors import BadInput
from web.gateway.gateway import Gateway
from web.http.json_response import json_response

MAX_DIGITS = 9


class VersionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Response after a version of the draft head was promoted or rolled back. `version`: number of
    the version in use from now on; 0 is the head with which the workers started. Workers of the
    main stage switch within two seconds; answers do not change.
    """

    version: int
    object: str = "fleet.draft_version"


class ForgottenResult(msgspec.Struct, frozen=True, kw_only=True):
    """Response after the trainer was ordered to forget its samples, which takes up to a second."""

    object: str = "fleet.training.forgotten"


class TrainingApi:
    """The routes of training, a method each; `routes()` lists them."""

    def __init__(self, gateway: Gateway) -> None:
        self._training = gateway.client.training

    def routes(self, root: str) -> list[BaseRoute]:
        return [
            Route(f"{root}/training", self.state),
            Route(f"{root}/training/forget", self.forget, methods=["POST"]),
            Route(f"{root}/draft-versions/rollback", self.roll_back, methods=["POST"]),
            Route(f"{root}/draft-versions/{{number}}/promote", self.promote, methods=["POST"]),
        ]

    async def state(self, _request: Request) -> Response:
        return json_response(await self._training.state())

    async def forget(self, _request: Request) -> Response:
        await self._training.forget_samples()
        return json_response(ForgottenResult())

    async def promote(self, request: Request) -> Response:
        number = str(request.path_params["number"])
        if not (number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS):
            raise BadInput(
                "number: it must be the number of a version, or 0 for the head of the start",
                param="number",
            )
        await self._training.promote(int(number))
        return json_response(VersionResult(version=int(number)))

    async def roll_back(self, _request: Request) -> Response:
        return json_response(VersionResult(version=await self._training.roll_back()))
