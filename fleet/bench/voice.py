"""Voice turns over `/v1/realtime`: spoken questions sent as a microphone sends them, and how long the speaker then waits.

The clock is this client's: from the moment the last voiced sample was sent to that at which the first voiced sample of the answer
is heard, by a listener who plays what comes without delay. Knows no stage.
"""

import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from fleet.bench.chat import BYTES_PER_SAMPLE, PCM_RATE_HZ, ChatApi
from fleet.bench.errors import BenchError
from fleet.bench.stats import Summary, summarise
from fleet.processing.voice_onset import FirstVoicedClock

BLOCK_MS = 20
"""What a browser sends at a time."""
BLOCK_BYTES = PCM_RATE_HZ * BLOCK_MS // 1000 * BYTES_PER_SAMPLE
SILENCE_MS = 500
"""For how long nobody speaks before a turn is over. Source: OpenAI's default."""
LEAD_IN_MS = 300
QUIET = 0.02
"""Of the peak: what lies below at the end is no voice."""
PATIENCE_S = 30.0
PEAK = 32767
QUESTIONS = (
    "what is two plus three", "what day comes after monday", "what is the opposite of hot", "what can you do",
    "count from one to five", "my name is anna", "what color is the sky", "say good night",
)  # fmt: skip

Samples = NDArray[np.int16]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ms: float


class VoiceTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `voice_to_voice_ms` and `first_sound_ms` (to the first sample received, voiced or not) by this client's
    clock; `parts` as the fleet reports them, of its own share of the former.
    """

    question: str
    request: str
    voice_to_voice_ms: float
    parts: tuple[Part, ...]
    answer_s: float
    transcript: str
    first_sound_ms: float | None = None


class VoiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """`silence_ms`: the wait that is the session's setting, a part of every turn."""

    model: str
    silence_ms: int
    turns: tuple[VoiceTurn, ...]
    others_cores: float | None = None

    @property
    def whole_ms(self) -> Summary | None:
        return summarise([turn.voice_to_voice_ms for turn in self.turns])

    @property
    def ours_ms(self) -> Summary | None:
        """All but the silence that was waited for."""
        return summarise([turn.voice_to_voice_ms - self.silence_ms for turn in self.turns])

    @property
    def first_sound_ms(self) -> Summary | None:
        return summarise([turn.first_sound_ms for turn in self.turns])

    def part_ms(self, name: str) -> Summary | None:
        return summarise([part.ms for turn in self.turns for part in turn.parts if part.name == name])

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(part.name for turn in self.turns for part in turn.parts))


class _Problem(msgspec.Struct, frozen=True):
    message: str


class _Details(msgspec.Struct, frozen=True):
    error: _Problem | None = None


class _Response(msgspec.Struct, frozen=True):
    status: str = ""
    status_details: _Details | None = None


class _Event(msgspec.Struct, frozen=True):
    """What is read of any event."""

    type: str
    delta: str = ""
    request_id: str = ""
    parts: tuple[Part, ...] = ()
    response: _Response | None = None
    error: _Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Invariant: `samples` end with a voiced one, PCM16 at 24 kHz."""

    name: str
    samples: Samples


_event = msgspec.json.Decoder(_Event)
_encode = msgspec.json.Encoder().encode


def read_question(path: Path) -> Question:
    """Raises: BenchError if it is no sound, or silence."""
    try:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.LibsndfileError) as error:
        raise BenchError(f"--wav {path}: {error}", param="--wav") from error
    mono = soxr.resample(samples.mean(axis=1), rate_hz, PCM_RATE_HZ)
    voiced = np.flatnonzero(np.abs(mono) > QUIET * float(np.abs(mono).max(initial=0.0)))
    if not len(voiced):
        raise BenchError(f"--wav {path}: there is nothing to hear in it", param="--wav")
    spoken = mono[: voiced[-1] + 1]
    return Question(name=path.name, samples=(np.clip(spoken, -1, 1) * PEAK).astype("<i2"))


def spoken_questions(api: ChatApi, model: str, count: int) -> list[Question]:
    """Questions in the fleet's own voice, `count` different ones at most. Raises: BenchError."""
    made: list[Question] = []
    for text in QUESTIONS[:count]:
        pcm = api.speech({"model": model, "input": text, "response_format": "wav"})
        samples, _ = soundfile.read(BytesIO(pcm), dtype="int16")
        voiced = np.flatnonzero(np.abs(samples) > QUIET * int(np.abs(samples).max(initial=0)))
        if not len(voiced):
            raise BenchError(f"the fleet speaks {text!r} as silence; name recordings with --wav", param="--wav")
        made.append(Question(name=text, samples=samples[: voiced[-1] + 1].astype("<i2")))
    return made


def measure_voice(api: ChatApi, questions: Sequence[Question], turns: int, step: Callable[[], None]) -> VoiceResult:
    """`turns` turns of one session, the questions in order and again; one more before them that does not count.

    Raises: BenchError.
    """
    model = api.model()
    try:
        with connect(api.realtime_url(model), additional_headers=api.headers(), max_size=None) as socket:
            session = _Session(socket)
            session.open()
            measured: list[VoiceTurn] = []
            for number in range(turns + 1):
                turn = session.ask(questions[number % len(questions)])
                if number:
                    measured.append(turn)
                step()
    except InvalidStatus as error:
        raise BenchError(f"{api.url} refuses a voice session with status {error.response.status_code}") from error
    except (OSError, WebSocketException) as error:
        raise BenchError(f"the voice session at {api.url} broke off: {error}") from error
    return VoiceResult(model=model, silence_ms=SILENCE_MS, turns=tuple(measured))


class _Session:
    """One conversation. Its microphone never stops: where nothing is said, silence is sent."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._next_block_s = 0.0

    def open(self) -> None:
        turns = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": SILENCE_MS}
        session = {"type": "realtime", "audio": {"input": {"turn_detection": turns}}}
        self._socket.send(_encode({"type": "session.update", "session": session}).decode())
        deadline_s = time.monotonic() + PATIENCE_S
        while self._receive(deadline_s - time.monotonic(), "a voice session").type != "session.updated":
            pass

    def ask(self, question: Question) -> VoiceTurn:
        """Speak, then be silent and listen to the end of the answer. Raises: BenchError."""
        self._next_block_s = time.perf_counter()
        self._speak(bytes(LEAD_IN_MS * PCM_RATE_HZ // 1000 * BYTES_PER_SAMPLE))
        self._speak(question.samples.tobytes())
        return self._listen(question.name, self._next_block_s)

    def _speak(self, pcm: bytes) -> None:
        """In real time: a block is sent once it would have been recorded."""
        for start in range(0, len(pcm), BLOCK_BYTES):
            block = pcm[start : start + BLOCK_BYTES]
            self._next_block_s += len(block) / BYTES_PER_SAMPLE / PCM_RATE_HZ
            time.sleep(max(0.0, self._next_block_s - time.perf_counter()))
            self._socket.send(_encode({"type": "input_audio_buffer.append", "audio": b64encode(block).decode()}).decode())

    def _listen(self, name: str, spoken_s: float) -> VoiceTurn:
        first_s, num_bytes, request = None, 0, ""
        voiced = FirstVoicedClock(PCM_RATE_HZ)
        parts: tuple[Part, ...] = ()
        words: list[str] = []
        deadline_s = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < deadline_s:
            event = self._heard_while_silent()
            if event is None:
                continue
            if event.type == "response.output_audio.delta":
                now_s, pcm = time.perf_counter(), b64decode(event.delta)
                first_s = first_s or now_s
                voiced.add(pcm, now_s)
                num_bytes += len(pcm)
                deadline_s = now_s + PATIENCE_S
            elif event.type == "response.output_audio_transcript.delta":
                words.append(event.delta)
            elif event.type == "fleet.timing":
                parts, request = event.parts, event.request_id
            elif event.type == "response.done":
                self._check(name, event)
                if first_s is None:
                    raise BenchError(f"the answer to {name!r} was without sound")
                if voiced.at_s is None:
                    raise BenchError(f"the answer to {name!r} was silent: nothing in {num_bytes} bytes of it is voiced")
                return VoiceTurn(
                    question=name, request=request, voice_to_voice_ms=round((voiced.at_s - spoken_s) * 1e3, 1), parts=parts,
                    answer_s=num_bytes / BYTES_PER_SAMPLE / PCM_RATE_HZ, transcript="".join(words),
                    first_sound_ms=round((first_s - spoken_s) * 1e3, 1),
                )  # fmt: skip
        raise BenchError(f"nobody answered {name!r} within {PATIENCE_S:g} s: was it heard as speech? Name recordings with --wav")

    @staticmethod
    def _check(name: str, event: _Event) -> None:
        response = event.response or _Response()
        if response.status != "completed":
            details = response.status_details
            why = details.error.message if details is not None and details.error is not None else response.status
            raise BenchError(f"the answer to {name!r} did not come to its end: {why}")

    def _heard_while_silent(self) -> _Event | None:
        """The next event, or None when it is time for a block of silence, which is sent."""
        left_s = self._next_block_s + BLOCK_MS / 1e3 - time.perf_counter()
        if left_s > 0:
            try:
                return self._event(self._socket.recv(timeout=left_s))
            except TimeoutError:
                pass
        self._speak(bytes(BLOCK_BYTES))
        return None

    def _receive(self, timeout_s: float, what: str) -> _Event:
        try:
            return self._event(self._socket.recv(timeout=max(0.0, timeout_s)))
        except TimeoutError as error:
            raise BenchError(f"{what} was not opened within {PATIENCE_S:g} s") from error

    @staticmethod
    def _event(raw: str | bytes) -> _Event:
        event = _event.decode(raw)
        if event.type == "error":
            raise BenchError(f"the session says: {event.error.message if event.error else 'an error without a message'}")
        return event
