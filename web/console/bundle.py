"""GET /v1/fleet/requests/{request_id}/bundle: everything that is stored about one answer, as a ZIP
file to attach to a bug report.

The file names nobody: without API key, conversation and address, and without the fields of a body
in which clients name people or carry secrets. Texts and sound are what the bug is about, and are
in it.
"""

import asyncio
import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleet.core.errors import NotFound
from fleet.core.ids import request_id_of
from fleet.telemetry.trace import RequestTrace
from fleet.telemetry.views import LogLine, WorkerView
from web.console import formats
from web.console.answer_view import AnswerLoader, AnswerView
from web.fleet_api.chrome_trace import chrome_trace_of
from web.fleet_api.request_detail import RequestDetail, read_lines, wav_of
from web.gateway.gateway import Gateway

MAX_LINES = 1000
PRIVATE = (
    *("user", "safety_identifier", "prompt_cache_key", "metadata", "session"),
    *("authorization", "headers", "api_key", "key", "token", "password", "secret"),
    *("url", "server_url", "file_id"),
)
"""Fields of a body, at any depth, in which clients name people or carry secrets. The `name` of a
message is left out too; the `name` of a function stays.
"""
ADDRESS = re.compile(r"\bfrom (?:\[[0-9a-fA-F:.]+\]|\d+\.\d+\.\d+\.\d+)(?::\d+)?")
LEFT_OUT = "(left out)"


class WorkerVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Version and place of a worker that had a task of the request. `listed` is False if the fleet
    no longer knows the worker; the other fields are then empty.
    """

    id: str
    listed: bool
    role: str = ""
    state: str = ""
    cause: str = ""
    package: str = ""
    checkpoint: str = ""
    protocol: str = ""
    device: str = ""
    gpu: str = ""


class BundleRoute:
    """Sends the bundle of one request."""

    def __init__(self, gateway: Gateway, answers: AnswerLoader) -> None:
        self._gateway = gateway
        self._answers = answers

    async def send(self, request: Request) -> Response:
        """Send what is stored about a request as a ZIP file."""
        request_id = request_id_of(str(request.path_params["request_id"]))
        answer = await self._answers.read(request_id)
        telemetry = self._gateway.client.telemetry
        lines = await read_lines(self._gateway, request_id, MAX_LINES)
        workers = await telemetry.workers(with_gone=True)
        files = build_files(answer, lines, workers)
        try:
            files["answer.wav"] = await wav_of(self._gateway, request_id)
        except NotFound:
            files["README.txt"] += b"The answer has no sound, or it is no longer stored.\n"
        content = await asyncio.to_thread(zip_of, files, answer.facts.end_us)
        headers = {
            "content-disposition": f'attachment; filename="{answer.detail.id}.zip"',
            "cache-control": "no-store",
        }
        return Response(content, media_type="application/zip", headers=headers)


def build_files(
    answer: AnswerView, lines: Sequence[LogLine], workers: Sequence[WorkerView]
) -> dict[str, bytes]:
    """Return the files of the bundle by name, except for the sound."""
    detail = answer.detail
    versions = versions_of(detail, workers)
    trace = chrome_trace_of(detail, answer.facts.graph, answer.logs)
    logged = [msgspec.json.encode(without_names(line, detail)) for line in lines]
    return {
        "README.txt": _describe(answer, versions).encode(),
        "trace.json": msgspec.json.encode(_anonymous(detail)),
        "perfetto.json": msgspec.json.encode(trace),
        "workers.json": msgspec.json.encode(versions),
        "log.jsonl": b"".join(line + b"\n" for line in logged),
        "prompt.txt": detail.prompt.encode(),
        "answer.txt": detail.answer.encode(),
    }


def _anonymous(detail: RequestDetail) -> RequestDetail:
    return msgspec.structs.replace(detail, key="", session="", body=public_body(detail.body))


def public_body(body: str) -> str:
    """Return a stored body without its private fields; "" if it is no JSON."""
    try:
        return json.dumps(_without_private(json.loads(body)), ensure_ascii=False)
    except ValueError:
        return ""


def _without_private(value: object) -> object:
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        private = (*PRIVATE, "name") if "role" in fields else PRIVATE
        return {
            name: LEFT_OUT if name.lower() in private else _without_private(inner)
            for name, inner in fields.items()
        }
    if isinstance(value, list):
        return [_without_private(inner) for inner in cast("list[object]", value)]
    return value


def without_names(line: LogLine, trace: RequestTrace) -> LogLine:
    """Return a log line without the name of the request's API key, its conversation, and addresses
    of clients.
    """
    message = ADDRESS.sub(f"from {LEFT_OUT}", line.message)
    for name in filter(None, (trace.key, trace.session)):
        message = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", LEFT_OUT, message)
    return msgspec.structs.replace(line, message=message)


def versions_of(trace: RequestTrace, workers: Iterable[WorkerView]) -> list[WorkerVersion]:
    """Return the versions of all workers that the trace names, in the order of their names."""
    known: Mapping[str, WorkerView] = {view.id: view for view in workers}
    named = {task.owner for task in trace.tasks} | {event.worker for event in trace.events}
    found = {name: known.get(name) for name in sorted(named) if name}
    fields = [name for name in WorkerVersion.__struct_fields__ if name not in ("id", "listed")]
    return [
        WorkerVersion(
            id=name,
            listed=view is not None,
            **{field: getattr(view, field) for field in fields if view is not None},
        )
        for name, view in found.items()
    ]


def _describe(answer: AnswerView, versions: Sequence[WorkerVersion]) -> str:
    detail, facts = answer.detail, answer.facts
    took = formats.ms((facts.end_us - detail.created_us) / 1000)
    workers = [
        f"  {v.id}: {f'package {v.package}, checkpoint {v.checkpoint}' if v.listed else 'gone'}"
        for v in versions
    ]
    return "\n".join(
        [
            answer.verdict.text,
            "",
            f"{detail.id}: {detail.kind or 'request'} for {detail.model}, {detail.state}",
            f"submitted {formats.stamp(detail.created_us)}, took {took}",
            "workers:",
            *workers,
            "",
            "trace.json      the trace, with the texts of prompt and answer",
            "perfetto.json   the trace for https://ui.perfetto.dev",
            "log.jsonl       log lines that name the request, the newest thousand",
            "workers.json    versions of the workers",
            "prompt.txt, answer.txt, answer.wav (while the sound is stored)",
            "",
            "Left out: API key, conversation, addresses, and fields of the body that name people.",
            "",
        ]
    )


def zip_of(files: Mapping[str, bytes], at_us: int) -> bytes:
    """Return a ZIP file whose entries are dated `at_us`, so that equal contents are equal files."""
    when = datetime.fromtimestamp(at_us / 1e6, UTC)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, date_time=when.timetuple()[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return packed.getvalue()
