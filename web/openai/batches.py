"""/v1/batches: many requests in one file, answered in the background by the jobs workers. Knows no
answer.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fleet.batches.records import Batch
from fleet.batches.store import BatchStore
from fleet.core.errors import FleetError
from fleet.core.jobs import BatchArguments
from web.gateway.gateway import Gateway
from web.http.body import read_body
from web.http.callers import current_caller
from web.http.guard import owner_of
from web.http.json_response import json_response
from web.http.offload import parse_body
from web.http.query_params import int_param
from web.schema.batches import parse_batch

MAX_BODY_BYTES = 64 * 1024
MAX_LISTED = 100


class BatchPage(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRoutes:
    """The routes of batches, a method each; `routes()` lists them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._batches = BatchStore(gateway.config)

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/batches", self.batches, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches/{batch_id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create a batch and queue its job. If the job cannot be queued, the batch is discarded and
        the request fails.
        """
        body = await parse_body(parse_batch, await read_body(request, MAX_BODY_BYTES))
        owner = owner_of(request.scope)
        self._batches.files.check_owner(body.input_file_id, owner)
        batch = await asyncio.to_thread(
            self._batches.create,
            body.endpoint,
            body.input_file_id,
            body.metadata,
            body.output_expiry_s,
            owner,
            current_caller().name,
        )
        try:
            arguments = BatchArguments(batch=batch.id).as_json()
            await self._gateway.client.jobs.submit("batch", arguments)
        except FleetError:
            await asyncio.to_thread(self._batches.discard, batch.id)
            raise
        return json_response(batch)

    async def batches(self, request: Request) -> Response:
        params = request.query_params
        limit = int_param(params, "limit", 20, MAX_LISTED, least=1)
        after, owner = params.get("after", ""), owner_of(request.scope)
        data, has_more = await asyncio.to_thread(self._batches.page, after, limit, owner)
        return json_response(
            BatchPage(
                data=data,
                first_id=data[0].id if data else None,
                last_id=data[-1].id if data else None,
                has_more=has_more,
            )
        )

    async def batch(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(self._batches.find, self._batch_id(request)))

    async def cancel(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(self._batches.cancel, self._batch_id(request)))

    def _batch_id(self, request: Request) -> str:
        """Return the id in the path. Raises: NotFound for the batch of another client."""
        batch_id = str(request.path_params["batch_id"])
        self._batches.check_owner(batch_id, owner_of(request.scope))
        return batch_id
