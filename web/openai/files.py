"""/v1/files: files for batches, and their answers. A client does not see the files of others. Knows
no batch's state.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from fleet.batches.records import JSONL, FileObject
from fleet.batches.store import BatchStore
from fleet.core.errors import BadInput, Conflict, InputTooLarge, quoted
from web.gateway.gateway import Gateway
from web.http.body import MIB, body_memory_of, read_body
from web.http.forms import open_form
from web.http.guard import owner_of
from web.http.json_response import json_response
from web.http.query_params import choice_param, int_param
from web.schema.batches import FileForm, parse_file_form

MAX_FORM_BYTES = 64 * 1024
"""Size limit of a form beside its file."""
MAX_LISTED = 10_000
MAX_NAME_CHARS = 255
ORDERS, PURPOSES = ("asc", "desc"), ("batch", "batch_output")


class FilePage(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: Sequence[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class FileRoutes:
    """The routes of files, a method each; `routes()` lists them."""

    def __init__(self, gateway: Gateway) -> None:
        self._max_bytes = gateway.config.batches.max_file_mib * MIB
        self._batches = BatchStore(gateway.config)
        self._files = self._batches.files

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/files", self.files, methods=["GET"]),
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files/{file_id}", self.file, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Store an uploaded file. Until the file is stored, the form and the file are in memory and
        count towards `web.body_memory_mib`.
        """
        raw = await read_body(request, self._max_bytes + MAX_FORM_BYTES)
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise BadInput(
                "content-type: send a form, multipart/form-data, with the fields file and purpose"
            )
        async with open_form(request.headers, raw) as form:
            body, file = _read_form(form)
            body_memory_of(request.scope).reserve(file.size or 0)  # a copy out of `raw`
            content = await file.read()
        if len(content) > self._max_bytes:
            raise InputTooLarge(
                f"file: {len(content)} bytes; at most {self._max_bytes} are allowed "
                "(batches.max_file_mib)",
                param="file",
            )
        name = (file.filename or "batch.jsonl")[:MAX_NAME_CHARS]
        owner = owner_of(request.scope)
        added = await asyncio.to_thread(self._files.add, content, name, body.expiry_s, owner)
        return json_response(added)

    async def files(self, request: Request) -> Response:
        params = request.query_params
        limit = int_param(params, "limit", MAX_LISTED, MAX_LISTED, least=1)
        purpose, order = (
            choice_param(params, "purpose", PURPOSES),
            choice_param(params, "order", ORDERS),
        )
        found = list(await asyncio.to_thread(self._files.files, purpose, owner_of(request.scope)))
        if order == "asc":
            found.reverse()
        if after := params.get("after", ""):
            place = next((at for at, file in enumerate(found) if file.id == after), None)
            if place is None:
                raise BadInput(f"after: no file {quoted(after)} in this list", param="after")
            found = found[place + 1 :]
        page = found[:limit]
        return json_response(
            FilePage(
                data=page,
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
                has_more=len(found) > limit,
            )
        )

    async def file(self, request: Request) -> Response:
        return json_response(await asyncio.to_thread(self._files.find, self._file_id(request)))

    async def content(self, request: Request) -> Response:
        path = await asyncio.to_thread(self._files.content, self._file_id(request))
        return FileResponse(path, media_type=JSONL, headers={"cache-control": "no-store"})

    async def delete(self, request: Request) -> Response:
        file_id = self._file_id(request)
        if (user := await asyncio.to_thread(self._batches.user_of, file_id)) is not None:
            raise Conflict(
                f"file_id: batch {user} reads the file; cancel it first", param="file_id"
            )
        await asyncio.to_thread(self._files.delete, file_id)
        return json_response(FileDeletion(id=file_id))

    def _file_id(self, request: Request) -> str:
        """Return the id in the path. Raises: NotFound for the file of another client."""
        file_id = str(request.path_params["file_id"])
        self._files.check_owner(file_id, owner_of(request.scope))
        return file_id


def _read_form(form: FormData) -> tuple[FileForm, UploadFile]:
    """Return the fields and the file of a form. Raises: BadInput, UnsupportedValue."""
    items = form.multi_items()
    body = parse_file_form(
        [(name, value) for name, value in items if isinstance(value, str) and name != "file"]
    )
    files = [value for _, value in items if isinstance(value, UploadFile)]
    if len(files) != 1 or form.get("file") is not files[0]:
        raise BadInput("file: send one file, as the field file of the form", param="file")
    return body, files[0]
