"""A batch against a gateway that refuses, fails and breaks: each line is answered once."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.batches.asking import batch_run, gateway
from fleet.batches.asking.batch_run import BatchRun
from fleet.batches.asking.gateway import LineGateway
from fleet.batches.records import WINDOW_S, Batch, LineCounts
from fleet.batches.store import BatchStore
from fleet.config import load_config
from fleet.core.errors import ConfigError
from tests.support import HttpHandler, serve_http

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
Reply = Callable[[HttpHandler, str], None]


def reply(
    status: int, body: object, kind: str = "application/json", retry_after: str = ""
) -> Reply:
    def send(handler: HttpHandler, _name: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body, indent=1).encode()
        handler.send_response(status)
        handler.send_header("content-type", kind)
        if retry_after:
            handler.send_header("retry-after", retry_after)
        handler.send_header("x-request-id", "req-1")
        handler.send_header("content-length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return send


def hang_up(handler: HttpHandler, _name: str) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


OK = reply(200, {"answer": 1})


def error(code: str) -> dict[str, object]:
    return {"error": {"message": "m", "type": "t", "param": None, "code": code}}


@dataclass(slots=True)
class BatchCase:
    """A batch of the lines `names` in `folder`, and a gateway whose replies are listed by line; a
    line without one is answered.
    """

    folder: Path
    names: list[str]
    endpoint: str = CHAT
    replies: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])
    asked: Counter[str] = field(default_factory=Counter[str])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    now_s: float = 1000.0
    on_answer: Callable[[], None] = lambda: None
    store: BatchStore = field(init=False)
    batch_id: str = ""

    def __post_init__(self) -> None:
        config = load_config(None, (f"data_dir={self.folder}",))
        self.store = BatchStore(config, clock=lambda: self.now_s)
        lines = [
            json.dumps({"custom_id": name, "url": self.endpoint, "body": {"name": name}})
            for name in self.names
        ]
        file = self.store.files.add("\n".join(lines).encode(), "in.jsonl")
        self.batch_id = self.store.create(self.endpoint, file.id).id

    def answer(self, handler: HttpHandler) -> None:
        name = json.loads(handler.read_body())["name"]
        self.asked[name] += 1
        self.headers.append({key.lower(): value for key, value in handler.headers.items()})
        self.on_answer()
        left = self.replies.get(name, [])
        (left.pop(0) if left else OK)(handler, name)

    def run(self, url: str = "", concurrency: int = 2) -> Batch:
        if url:
            return asyncio.run(self._run(url, concurrency))
        with serve_http(self.answer) as served:
            return asyncio.run(self._run(served, concurrency))

    async def _run(self, url: str, concurrency: int) -> Batch:
        part = BatchRun(
            self.store,
            self.batch_id,
            self.note,
            max_lines=100,
            concurrency=concurrency,
            part_s=60,
        )
        async with LineGateway(url, "key") as connection:
            return await part.run(connection)

    def note(self, counts: LineCounts) -> None:
        assert counts.total == len(self.names)

    def written(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        if file_id is None:
            return {}
        lines = self.store.files.content(file_id).read_text().splitlines()
        found = {entry["custom_id"]: entry for entry in map(json.loads, lines)}
        assert len(found) == len(lines), "each line is answered once"
        return found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries, which take no time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(gateway, "asyncio", SimpleNamespace(sleep=pause))
    return made


def test_each_line_has_one_answer_in_the_right_file(tmp_path: Path, pauses: list[float]) -> None:
    busy = reply(429, error("rate_limit_exceeded"), retry_after="7")
    away, proxied = reply(503, error("gateway_stopping")), reply(502, b"<html>")
    lost, broken = reply(503, error("worker_lost")), reply(500, error("server_error"))
    case = BatchCase(
        tmp_path,
        ["fine", "busy", "broken once", "broken", "lost", "refused", "cut"],
        replies={
            "busy": [busy, away, proxied, busy],
            "broken once": [broken, hang_up],
            "broken": [broken, broken, broken],
            "lost": [lost, lost, lost],
            "refused": [reply(400, error("invalid_value"))],
            "cut": [hang_up, hang_up, hang_up],
        },
    )
    batch = case.run()
    assert batch.status == "completed" and batch == case.store.find(case.batch_id)
    assert batch.request_counts == LineCounts(total=7, completed=3, failed=4)
    answers, errors = case.written(batch.output_file_id), case.written(batch.error_file_id)
    assert set(answers) == {"fine", "busy", "broken once"}
    assert answers["fine"]["response"] == {
        "status_code": 200,
        "request_id": "req-1",
        "body": {"answer": 1},
    }
    statuses = {
        name: (entry["response"] or {}).get("status_code") for name, entry in errors.items()
    }
    assert statuses == {"broken": 500, "lost": 503, "refused": 400, "cut": None}
    assert errors["cut"]["error"]["code"] == "connection_lost"
    assert errors["refused"]["response"]["body"]["error"]["code"] == "invalid_value"
    expected = {"fine": 1, "busy": 5, "refused": 1} | dict.fromkeys(
        ("broken once", "broken", "lost", "cut"), 3
    )
    assert case.asked == expected and pauses.count(7.0) == 2
    assert all(
        sent["x-fleet-priority"] == "background" and sent["authorization"] == "Bearer key"
        for sent in case.headers
    )
    assert not case.store.unfinished() and case.run() == batch and case.asked == expected


def test_speech_is_returned_as_base64(tmp_path: Path) -> None:
    spoken = reply(200, b"\x00\xff", "audio/mpeg")
    case = BatchCase(tmp_path, ["a"], endpoint=SPEECH, replies={"a": [spoken]})
    answers = case.written(case.run().output_file_id)
    assert answers["a"]["response"]["body"] == {"content_type": "audio/mpeg", "audio": "AP8="}


def test_next_run_sends_only_lines_without_an_answer(tmp_path: Path, pauses: list[float]) -> None:
    """The gateway refuses the key in the middle, which ends the run and keeps its answers."""
    names = [str(number) for number in range(20)]
    case = BatchCase(tmp_path, names, replies={"9": [reply(401, error("invalid_api_key"))]})
    with pytest.raises(ConfigError, match="FLEET_API_KEY"):
        case.run(concurrency=1)
    half = case.store.load(case.batch_id)
    assert half.batch.status == "in_progress" and "FLEET_API_KEY" in half.problem
    batch = case.run()
    assert batch.status == "completed" and set(case.written(batch.output_file_id)) == set(names)
    assert case.asked == Counter(names) + Counter(["9"])


def test_batch_that_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    case = BatchCase(tmp_path, ["a", "b"])
    for _ in range(batch_run.MAX_STARTS):
        case.replies["a"] = [reply(401, error("invalid_api_key"))]
        with pytest.raises(ConfigError):
            case.run(concurrency=1)
    batch = case.run()
    assert batch.status == "failed" and batch.failed_at == 1000 and batch.errors is not None
    assert "FLEET_API_KEY" in batch.errors.data[0].message and not case.store.unfinished()


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_early_end_gives_every_other_line_an_error(tmp_path: Path, status: str) -> None:
    names = [str(number) for number in range(50)]
    case = BatchCase(tmp_path, names)
    ended = threading.Event()

    def end() -> None:
        if case.asked.total() == 5 and not ended.is_set():
            ended.set()
            if status == "cancelled":
                case.store.cancel(case.batch_id)
            else:
                case.now_s += WINDOW_S
        elif ended.is_set():
            held.wait(timeout=30)

    held = threading.Event()
    case.on_answer = end
    with serve_http(case.answer) as served:
        batch = case.run(served, concurrency=1)
        held.set()
    assert batch.status == status and getattr(batch, f"{status}_at") == case.now_s
    answers, errors = case.written(batch.output_file_id), case.written(batch.error_file_id)
    assert set(answers) | set(errors) == set(names) and not set(answers) & set(errors)
    assert answers and {each["error"]["code"] for each in errors.values()} == {f"batch_{status}"}
    assert batch.request_counts == LineCounts(total=50, completed=len(answers), failed=len(errors))


def test_faulty_input_fails_the_batch_before_anything_is_sent(tmp_path: Path) -> None:
    case = BatchCase(tmp_path, ["a", "a"])
    batch = case.run()
    assert batch.status == "failed" and batch.errors is not None and not case.asked
    assert [(fault.code, fault.line) for fault in batch.errors.data] == [("duplicate_custom_id", 2)]
    assert [file.purpose for file in case.store.files.files()] == ["batch"]
