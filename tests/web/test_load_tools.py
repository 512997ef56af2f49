"""Streams as load-testing tools read them: each reader replicates the parser of one tool.

Sources: vllm-omni benchmarks/patch/patch.py, sglang bench_serving.py, llmperf
openai_chat_completions_client.py.
"""

import base64
import io
import json
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.web.conftest import ASK, ServedGateway
from tests.web.fake_client import RATE_HZ, Script, sine
from web.http import sse

CHAT = "/v1/chat/completions"
SPOKEN = {"modalities": ["text", "audio"], "audio": {"format": "wav"}}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(slots=True)
class ToolFigures:
    """What a load-testing tool has read of a stream. `chunks`: decoded events, in order."""

    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    output_tokens: int = 0
    num_text: int = 0
    num_audio: int = 0
    pcm: bytes = b""


def pieces_of(gateway: ServedGateway, **fields: object) -> list[bytes]:
    """Return a stream in the pieces in which the socket delivers it."""
    body = {**ASK, "stream": True, **fields}
    with gateway.http.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        return list(answer.iter_raw())


def by_message(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield messages, which end at a blank line or when the rest is valid JSON."""
    rest = ""
    for piece in pieces:
        rest += piece.decode()
        *whole, rest = rest.split("\n\n")
        yield from (message.strip() for message in whole if message.strip())
        if rest.startswith("data: ") and is_whole(rest.removeprefix("data: ").strip()):
            yield rest.strip()
            rest = ""
    assert not rest.strip(), f"lost: {rest!r}"


def is_whole(text: str) -> bool:
    try:
        return text == "[DONE]" or json.loads(text) is not None
    except json.JSONDecodeError:
        return False


def events(messages: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the decoded events, as all tools do: remove the prefix, parse JSON."""
    for message in messages:
        payload = message.removeprefix("data: ")
        if payload != "[DONE]" and not message.startswith(":"):
            yield json.loads(payload)


def vllm_omni(pieces: list[bytes]) -> ToolFigures:
    """Read a stream like vLLM-Omni, by the event's modality: text in `content`, audio in `content`
    or `audio.data`, where each piece is a WAV file.
    """
    measured = ToolFigures()
    for data in events(by_message(pieces)):
        measured.chunks.append(data)
        measured.output_tokens = (data.get("usage") or {}).get("completion_tokens", 0)
        if not data.get("choices"):
            continue
        delta: dict[str, Any] = data["choices"][0].get("delta") or {}
        content = delta.get("content")
        if not content and isinstance(delta.get("audio"), dict):
            content = delta["audio"].get("data")
        if data.get("modality") == "text":
            measured.text += content or ""
            measured.num_text += bool(content)
        elif data.get("modality") == "audio":
            measured.num_audio += 1
            with wave.open(io.BytesIO(base64.b64decode(content or "")), "rb") as file:
                assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (
                    1,
                    2,
                    RATE_HZ,
                )
                measured.pcm += file.readframes(file.getnframes())
    return measured


def by_line(pieces: list[bytes]) -> ToolFigures:
    """Yield the events as SGLang and llmperf read them: every non-empty line is an event."""
    measured = ToolFigures()
    lines = [line.strip().decode() for line in b"".join(pieces).split(b"\n")]
    for line in filter(None, lines):
        payload = line[len("data: ") :]
        if payload == "[DONE]":
            continue
        data = json.loads(payload)
        assert "error" not in data
        measured.chunks.append(data)
        measured.text += data["choices"][0]["delta"].get("content") or ""
    return measured


@pytest.mark.parametrize("fields", [{}, SPOKEN], ids=["text", "spoken"])
def test_stream_is_read_line_by_line(gateway: ServedGateway, fields: dict[str, object]) -> None:
    fields = {
        **fields,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": -1,
        "min_tokens": 1,
        "repetition_penalty": 1.0,
    }
    assert by_line(pieces_of(gateway, **fields)).text == Script().text


def test_vllm_omni_reads_text_and_audio(gateway: ServedGateway) -> None:
    options = {**USAGE, "include_wav_headers": True}
    measured = vllm_omni(
        pieces_of(gateway, **SPOKEN, stream_options=options, max_tokens=16, ignore_eos=True)
    )
    assert measured.text == Script().text and measured.num_text > 1
    assert measured.num_audio > 5 and measured.pcm == sine(Script().num_samples).tobytes()
    assert measured.output_tokens > 0
    text_only = vllm_omni(pieces_of(gateway, stream_options=USAGE))
    assert text_only.text == Script().text and text_only.num_audio == 0


def test_vllm_omni_reads_speech_as_raw_samples(gateway: ServedGateway) -> None:
    fields = {"stream": True, "stream_format": "audio", "response_format": "pcm"}
    body = {"model": "omni", "input": "Hello.", "voice": "ethan", **fields}
    answer = gateway.http.post("/v1/audio/speech", json=body)
    assert answer.content == sine(Script().num_samples).tobytes()


@pytest.mark.parametrize("tool", [vllm_omni, by_line], ids=lambda tool: tool.__name__)
def test_load_tool_reads_a_stream_with_pauses(
    gateway: ServedGateway,
    tool: Callable[[list[bytes]], ToolFigures],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.002)
    gateway.client.script = Script(text="Hello there.", gap_s=0.02)
    pieces = pieces_of(gateway)
    assert b"".join(pieces).count(b"\n" + sse.PING) > 3
    assert tool(pieces).text == "Hello there."


def test_event_ids_are_sent_only_on_request(gateway: ServedGateway) -> None:
    plain = b"".join(pieces_of(gateway, **SPOKEN)).decode()
    assert all(line == "" or line.startswith("data: ") for line in plain.split("\n"))
    asked = b"".join(
        pieces_of(gateway, **SPOKEN, stream_options={"include_event_ids": True})
    ).decode()
    assert asked.count("\nid: ") > 10
    refused = b"".join(
        pieces_of(gateway, **SPOKEN, stream_options={"include_event_ids": False})
    ).decode()
    assert "id: " not in [line[:4] for line in refused.split("\n")]
