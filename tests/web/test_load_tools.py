"""Streams as load-testing tools read them: each reader replicates the parser of one tool.

Sources: vllm 0.11 benchmarks/lib/endpoint_request_func.py, vllm-omni benchmarks/patch/patch.py,
sglang bench_serving.py, llmperf openai_chat_completions_client.py.
"""

import base64
import io
import json
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet.core.errors import EngineError
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


def by_message(pieces: Iterable[bytes], *, strips: bool) -> Iterator[str]:
    """Yield messages, which end at a blank line or when the rest is valid JSON. `strips`: whether
    white space is stripped from each piece.
    """
    rest = ""
    for piece in pieces:
        rest += (piece.strip() if strips else piece).decode()
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


def vllm(pieces: list[bytes]) -> ToolFigures:
    """Read a stream like vLLM: every event with a choice counts, the first one as the first token;
    usage is read only from events without choices.
    """
    measured = ToolFigures()
    for data in events(by_message(pieces, strips=True)):
        measured.chunks.append(data)
        if choices := data.get("choices"):
            measured.text += choices[0]["delta"].get("content") or ""
        elif usage := data.get("usage"):
            measured.output_tokens = usage["completion_tokens"]
    return measured


def vllm_omni(pieces: list[bytes]) -> ToolFigures:
    """Read a stream like vLLM-Omni, by the event's modality: text in `content`, audio in `content`
    or `audio.data`, where each piece is a WAV file.
    """
    measured = ToolFigures()
    for data in events(by_message(pieces, strips=False)):
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
@pytest.mark.parametrize("tool", [vllm, by_line], ids=lambda tool: tool.__name__)
def test_load_tool_reads_complete_stream(
    gateway: ServedGateway, tool: Callable[[list[bytes]], ToolFigures], fields: dict[str, object]
) -> None:
    fields = {
        **fields,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": -1,
        "min_tokens": 1,
        "repetition_penalty": 1.0,
    }
    assert tool(pieces_of(gateway, **fields)).text == Script().text


def test_vllm_reads_the_usage_and_no_event_before_the_first_output(gateway: ServedGateway) -> None:
    measured = vllm(pieces_of(gateway, stream_options=USAGE, max_completion_tokens=16))
    assert measured.output_tokens == measured.chunks[-1]["usage"]["completion_tokens"] > 0
    gateway.client.script = Script(fail_at=0, failure=EngineError("it broke"))
    (only,) = events(by_message(pieces_of(gateway), strips=True))
    assert only["error"]["message"] == "it broke"


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


def test_vllm_continues_a_text_with_its_fields(gateway: ServedGateway) -> None:
    fields = {"repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "ignore_eos": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "omni", "prompt": "Once", **fields, **usage}
    answer = gateway.http.post("/v1/completions", json=body)
    read = list(events(line for line in answer.text.split("\n\n") if line))
    said = [data["choices"][0]["text"] for data in read if data["choices"]]
    assert Script().text.startswith("".join(said)) and said
    assert read[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("tool", [vllm, vllm_omni, by_line], ids=lambda tool: tool.__name__)
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
