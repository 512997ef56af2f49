"""The benchmark of texts that grow, without a fleet: what it sends and when, and the first sounds
of scripted speech.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from fleet.lab.client.client import ApiClient, SpeechCall
from fleet.lab.client.errors import ApiError
from fleet.lab.client.transport import OpenResponse
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.growing_text import (
    CALL,
    SOCKET,
    TARGET_MS,
    TEXTS,
    FirstSound,
    GrowingTextResult,
    measure_growing_text,
    until_first_clause,
)
from tests.bench_reports import missed, report_of, shown

TONE = (np.sin(np.arange(4800) * 0.1) * 9000).astype("<i2").tobytes()
SILENT_MS = 60
SILENCE = bytes(48 * SILENT_MS)
REFUSED = "model: this model speaks a text as one answer"


@dataclass
class SpeechServer:
    """A fake speech socket. `refusal`: error with which it refuses its configuration; {} for a
    socket that speaks. `before_sound`: text of each utterance until its first audio was sent.
    """

    refusal: dict[str, str] = field(default_factory=dict[str, str])
    clause_sound: bytes = SILENCE + TONE
    texts: list[str] = field(default_factory=list[str])
    before_sound: list[str] = field(default_factory=list[str])
    seeds: list[int] = field(default_factory=list[int])

    def take(self, socket: ServerConnection) -> None:
        config = self._next(socket)
        assert config["type"] == "session.config" and config["response_format"] == "pcm"
        if self.refusal:
            socket.send(json.dumps({"type": "error", "message": "", "error": self.refusal}))
            return
        self.seeds.append(config["seed"])
        text = self._read(socket, lambda text: text == until_first_clause(wanted(text))[0])
        self.before_sound.append(text)
        socket.send(json.dumps({"type": "audio.start"}))
        socket.send(self.clause_sound)
        socket.send(json.dumps({"type": "audio.done", "error": False}))
        self.texts.append(text + self._read(socket, lambda _: False))
        socket.send(TONE)
        socket.send(json.dumps({"type": "session.done"}))

    def _read(self, socket: ServerConnection, is_enough: Callable[[str], bool]) -> str:
        text = ""
        while not is_enough(text) and (event := self._next(socket))["type"] != "input.done":
            text += event["text"]
        return text

    @staticmethod
    def _next(socket: ServerConnection) -> dict[str, Any]:
        return json.loads(socket.recv())


def wanted(text: str) -> str:
    """Return the text that begins so."""
    return next(each for each in TEXTS if each.startswith(text))


class SpeechCalls(BaseHTTPRequestHandler):
    """A fake gateway whose speech is a second of silence and tone, in pieces of odd lengths."""

    sent: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()
        pcm = SILENCE + TONE
        for at in range(0, len(pcm), 1001):
            self.wfile.write(pcm[at : at + 1001])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class SpeechApi(ApiClient):
    """Client of a fake socket, and of fake speech calls at another address."""

    calls: ApiClient

    def model(self) -> str:
        return "m"

    def open_speech(self, call: SpeechCall) -> OpenResponse:
        return self.calls.open_speech(call)


@contextmanager
def serving(fake: SpeechServer) -> Iterator[tuple[SpeechApi, list[dict[str, Any]]]]:
    """Yield the client of both fakes, and the bodies of the speech calls."""
    sent = list[dict[str, Any]]()
    handler = type("Calls", (SpeechCalls,), {"sent": sent})
    with (
        serve(fake.take, "127.0.0.1", 0) as socket,
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as http,
    ):
        threads = [threading.Thread(target=each.serve_forever) for each in (socket, http)]
        for thread in threads:
            thread.start()
        api = SpeechApi(f"http://127.0.0.1:{socket.socket.getsockname()[1]}", "key")
        api.calls = ApiClient(f"http://127.0.0.1:{http.server_address[1]}")
        try:
            yield api, sent
        finally:
            socket.shutdown()
            http.shutdown()
            for thread in threads:
                thread.join()


def first_sound(transport: str, received_ms: float) -> FirstSound:
    return FirstSound(
        transport=transport,
        seed=1,
        clause="a",
        first_ms=1.0,
        received_ms=received_ms,
        played_ms=received_ms + 5,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_further_clauses_after_a_short_first_one(text: str) -> None:
    begin, clause = until_first_clause(text)
    assert text.startswith(begin) and len(clause) in range(13, 43)
    assert len(begin) - len(clause) in (0, 1) and len(text) > len(begin) + 20


def test_text_of_one_clause_is_refused() -> None:
    with pytest.raises(BenchError, match="has one clause"):
        until_first_clause("Yes")


def test_rest_of_a_text_is_sent_after_the_first_sound_and_both_transports_are_measured() -> None:
    fake = SpeechServer()
    steps: list[None] = []
    with serving(fake) as (api, sent):
        result = measure_growing_text(api, TEXTS, 3, lambda: steps.append(None))
    assert fake.texts == list(TEXTS[:4]) and len(steps) == 4, "three speakers after a warm-up"
    assert fake.before_sound == [until_first_clause(text)[0] for text in TEXTS[:4]]
    assert [body["input"] for body in sent] == list(TEXTS[:4])
    assert fake.seeds == [body["seed"] for body in sent] == [0, 1, 2, 3]
    assert [(each.transport, each.seed) for each in result.spoken] == [
        (transport, seed) for seed in (1, 2, 3) for transport in (SOCKET, CALL)
    ]
    for each in result.spoken:
        assert 0 < each.first_ms <= each.received_ms <= each.played_ms
        assert each.played_ms >= each.first_ms + SILENT_MS - 1, "the silence plays first"
    assert not result.refused


def test_refused_socket_leaves_the_calls_and_names_the_reason() -> None:
    refusal = {"message": REFUSED, "code": "unsupported_value"}
    with serving(SpeechServer(refusal=refusal)) as (api, _):
        result = measure_growing_text(api, TEXTS, 2, lambda: None)
    assert result.transports == [CALL] and len(result.spoken) == 2
    assert REFUSED in result.refused[SOCKET]
    assert REFUSED in " ".join(shown(report_of(growing_text=result)).split())


def test_other_errors_of_the_socket_end_the_measurement() -> None:
    refusal = {"message": "the voice is lost", "code": "worker_lost"}
    with (
        serving(SpeechServer(refusal=refusal)) as (api, _),
        pytest.raises(ApiError, match="the voice is lost"),
    ):
        measure_growing_text(api, TEXTS, 1, lambda: None)


def test_target_is_missed_by_the_slow_transport_alone() -> None:
    result = GrowingTextResult(
        model="m",
        spoken=(first_sound(SOCKET, TARGET_MS + 1), first_sound(CALL, TARGET_MS)),
        refused={},
    )
    assert missed(result) == [f"{SOCKET}, first sound, p95"]
    assert "first voiced sample received" in shown(report_of(growing_text=result))
