"""The voice benchmarks without a fleet: what they send and when, and their results for scripted
answers.
"""

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from websockets.sync.server import ServerConnection, serve

from fleet.lab.client.client import ApiClient, ResourcesInUse
from fleet.lab.client.errors import ApiError
from fleet.lab.measure.barge_in import BargeIn, BargeInResult, measure_barge_in
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.options import parse
from fleet.lab.measure.voice import MEASUREMENT as VOICE
from fleet.lab.measure.voice import (
    SILENCE_MS,
    SpokenQuestion,
    VoiceResult,
    VoiceTurn,
    measure_voice,
    read_question,
)

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

TONE = (np.sin(np.arange(4800) * 0.1) * 9000).astype("<i2")
AUDIO = b64encode(TONE[:2400].tobytes()).decode()
LEAD_MS = 400
ANSWER: tuple[dict[str, Any], ...] = (
    {
        "type": "fleet.timing",
        "request_id": "req-1",
        "parts": [{"name": "endpointing", "ms": 500.0}, {"name": "lm", "ms": 20.0}],
    },
    {"type": "response.output_audio.delta", "delta": AUDIO},
    {"type": "response.output_audio_transcript.delta", "delta": "four"},
    {"type": "response.done", "response": {"status": "completed"}},
)


@dataclass
class VoiceServer:
    """A fake voice session that answers after speech followed by `silent_bytes` of silence."""

    answer: Sequence[dict[str, Any]] = ANSWER
    silent_bytes: int = 4800
    api: ApiClient | None = None
    path: str = ""
    received: bytes = b""
    sessions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def take(self, socket: ServerConnection) -> None:
        self.path = socket.request.path if socket.request is not None else ""
        silent = -1
        for raw in socket:
            event = json.loads(raw)
            if event["type"] == "session.update":
                self.sessions.append(event["session"])
                socket.send(json.dumps({"type": "session.created"}))
                socket.send(json.dumps({"type": "session.updated", "unknown": None}))
                continue
            pcm = b64decode(event["audio"])
            self.received += pcm
            if any(pcm):
                silent = 0
            elif silent >= 0:
                silent += len(pcm)
            if silent >= self.silent_bytes:
                silent = -1
                for each in self.answer:
                    socket.send(json.dumps(each))


class Api(ApiClient):
    held = ResourcesInUse(tasks=0, pages=2, slots=0)

    def model(self) -> str:
        return "m"

    def resources_in_use(self) -> ResourcesInUse:
        return self.held


@contextmanager
def serving(fake: "VoiceServer | InterruptibleServer") -> Iterator[Api]:
    with serve(fake.take, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        fake.api = Api(f"http://127.0.0.1:{server.socket.getsockname()[1]}", "key")
        yield fake.api
        server.shutdown()
        thread.join()


def test_voice_turns_are_sent_in_real_time_and_measured() -> None:
    fake = VoiceServer()
    with serving(fake) as api:
        result = measure_voice(api, [SpokenQuestion(name="q", samples=TONE)], 2, lambda: None)
    assert fake.path == "/v1/realtime?model=m&fleet=1" and len(fake.sessions) == 1
    assert fake.sessions[0]["audio"]["input"]["turn_detection"]["silence_duration_ms"] == SILENCE_MS
    assert fake.received.count(TONE.tobytes()) == 3, "two turns after one of warm-up"
    assert len(result.turns) == 2 and result.part_names == ["endpointing", "lm"]
    for turn in result.turns:
        assert (turn.question, turn.request, turn.transcript, turn.answer_s) == (
            "q",
            "req-1",
            "four",
            0.1,
        )
        assert turn.voice_to_voice_ms >= 100, (
            "the silence that the server waits for is sent in real time"
        )
        assert (
            turn.first_audio_ms is not None
            and abs(turn.voice_to_voice_ms - turn.first_audio_ms) <= 10
        )
    lm = result.part_ms("lm")
    assert lm is not None and lm.p50 == 20


def test_voice_to_voice_ends_at_the_first_voiced_sample() -> None:
    silence = {
        "type": "response.output_audio.delta",
        "delta": b64encode(bytes(48 * LEAD_MS)).decode(),
    }
    with serving(VoiceServer(answer=[silence, *ANSWER])) as api:
        (turn,) = measure_voice(
            api, [SpokenQuestion(name="q", samples=TONE)], 1, lambda: None
        ).turns
    assert turn.first_audio_ms is not None
    # both are rounded to a tenth of a millisecond
    assert LEAD_MS <= round(turn.voice_to_voice_ms - turn.first_audio_ms, 1) < LEAD_MS + 11


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            [
                {"type": "response.output_audio.delta", "delta": b64encode(bytes(4800)).decode()},
                {"type": "response.done", "response": {"status": "completed"}},
            ],
            "the answer to 'q' is silent",
        ),
        (
            [{"type": "error", "error": {"message": "no room"}}],
            "the voice session reports an error: no room",
        ),
        (
            [{"type": "response.done", "response": {"status": "completed"}}],
            "the answer to 'q' has no audio",
        ),
        (
            [
                {
                    "type": "response.done",
                    "response": {
                        "status": "failed",
                        "status_details": {"error": {"message": "no lm"}},
                    },
                }
            ],
            "the answer to 'q' was not completed: no lm",
        ),
        (
            [{"type": "response.done", "response": {"status": "cancelled"}}],
            "was not completed: cancelled",
        ),
    ],
)
def test_failed_voice_turn_reports_its_reason(answer: list[dict[str, Any]], message: str) -> None:
    with (
        serving(VoiceServer(answer=answer)) as api,
        pytest.raises((ApiError, BenchError), match=message),
    ):
        measure_voice(api, [SpokenQuestion(name="q", samples=TONE)], 1, lambda: None)


def test_unreachable_voice_gateway_is_one_line() -> None:
    with serving(VoiceServer()) as gone:
        pass
    with pytest.raises(
        ApiError, match="the voice session at http://127.0.0.1:.* broke off: .*refused"
    ):
        measure_voice(gone, [SpokenQuestion(name="q", samples=TONE)], 1, lambda: None)


def test_question_ends_with_its_last_voiced_sample(tmp_path: Path) -> None:
    silence = np.zeros(44_100, "<i2")
    tone = (np.sin(np.arange(44_100) * 0.05) * 9000).astype("<i2")
    soundfile.write(
        tmp_path / "a.wav", np.stack([np.concatenate([silence, tone, silence])] * 2, axis=1), 44_100
    )
    question = read_question(tmp_path / "a.wav")
    assert question.name == "a.wav" and abs(len(question.samples) - 48_000) < 500
    soundfile.write(tmp_path / "b.wav", silence, 44_100)
    with pytest.raises(BenchError, match="the file is silent"):
        read_question(tmp_path / "b.wav")
    (tmp_path / "c.wav").write_bytes(b"no sound")
    with pytest.raises(BenchError, match=r"--wav .*c\.wav"):
        read_question(tmp_path / "c.wav")


def test_voice_target_excludes_end_of_turn_silence() -> None:
    turns = tuple(
        VoiceTurn(
            question="q",
            request="r",
            voice_to_voice_ms=SILENCE_MS + fleet_ms,
            parts=(),
            answer_s=1,
            transcript="",
        )
        for fleet_ms in (100.0, 300.0, 900.0)
    )
    (ratio,) = VoiceResult(model="m", silence_ms=SILENCE_MS, turns=turns).targets()
    assert ratio.value == 300 and ratio.met
    assert VoiceResult(model="m", silence_ms=SILENCE_MS, turns=()).targets() == []


def test_recorded_questions_imply_the_voice_benchmark() -> None:
    options = parse(["--wav", "a.wav", "--wav", "b.wav"])
    assert options.chosen == (VOICE,) and options.wavs == [Path("a.wav"), Path("b.wav")]
    assert VOICE not in parse(["--barge-in", "--wav", "a.wav"]).chosen


class InterruptibleServer:
    """A fake voice session that answers immediately, until it receives speech."""

    api: Api

    def __init__(self, status: str = "cancelled") -> None:
        self.status = status
        self.detection: dict[str, Any] = {}

    def take(self, socket: ServerConnection) -> None:
        for raw in socket:
            event = json.loads(raw)
            if event["type"] == "session.update":
                self.detection = event["session"]["audio"]["input"]["turn_detection"]
                socket.send(json.dumps({"type": "session.updated"}))
            elif event["type"] == "response.create":
                self.api.held = ResourcesInUse(tasks=3, pages=40, slots=4)
                socket.send(json.dumps({"type": "response.output_audio.delta", "delta": AUDIO}))
            elif (
                event["type"] == "input_audio_buffer.append"
                and self.api.held.tasks
                and any(b64decode(event["audio"]))
            ):
                socket.send(json.dumps({"type": "input_audio_buffer.speech_started"}))
                socket.send(
                    json.dumps({"type": "response.done", "response": {"status": self.status}})
                )
                # the client has received the end of the response before its resources are free
                socket.ping().wait()
                self.api.held = ResourcesInUse(tasks=0, pages=2, slots=0)


def test_barge_in_is_measured_from_first_voiced_sample_to_freed_memory() -> None:
    fake, breath = InterruptibleServer(), np.full(9600, 90, "<i2")
    with serving(fake) as api:
        result = measure_barge_in(
            api, SpokenQuestion(name="q", samples=np.concatenate([breath, TONE])), 2, lambda: None
        )
    assert fake.detection["create_response"] is False, "the interruption itself is not answered"
    assert len(result.turns) == 2
    for turn in result.turns:
        assert (
            0 < turn.detected_ms <= turn.cancelled_ms <= turn.memory_ms
            and turn.idle_ms <= turn.memory_ms
        )


def test_answer_completed_before_barge_in_raises() -> None:
    with (
        serving(InterruptibleServer("completed")) as api,
        pytest.raises(BenchError, match="ended before it was interrupted"),
    ):
        measure_barge_in(api, SpokenQuestion(name="q", samples=TONE), 1, lambda: None)


def test_barge_in_targets_check_the_medians() -> None:
    turns = tuple(
        BargeIn(detected_ms=90, cancelled_ms=at_ms, idle_ms=200, memory_ms=at_ms + 400)
        for at_ms in (100.0, 120.0, 900.0)
    )
    cancelled, freed = BargeInResult(model="m", turns=turns).targets()
    assert (cancelled.value, cancelled.met, freed.value, freed.met) == (120, True, 400, False)
