"""Voice benchmark: spoken questions over `/v1/realtime`, sent in real time, and the wait for the
answer.

Voice to voice is measured on this client's clock: from the moment at which the last voiced sample
was sent to the moment at which the first voiced sample of the answer plays, without a playback
buffer. Knows no stage.
"""

import threading
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from rich.console import Group
from websockets.exceptions import ConnectionClosed

from fleet.lab.client.audio import BYTES_PER_S, PCM_RATE_HZ
from fleet.lab.client.client import ApiClient, SpeechCall
from fleet.lab.client.errors import ApiError
from fleet.lab.client.realtime import (
    BLOCK_BYTES,
    LatencyPart,
    RealtimeEvent,
    RealtimeResponse,
    RealtimeSession,
    update_audio_input,
)
from fleet.lab.measure.deployment import target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.measurement import BenchOptions, Context, Measurement, argument
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, Summary, at_most, summarise
from fleet.lab.report.tables import summary_table
from fleet.processing.voice_onset import FirstVoicedClock

SILENCE_MS = 500
"""Silence after which the server ends a turn. Source: OpenAI's default."""
LEAD_IN_MS = 300
QUIET = 0.02
"""Amplitude threshold of voiced samples, relative to the peak."""
TIMEOUT_S = 30.0
TARGET_P50_MS = 400.0
PEAK = 32767
QUESTIONS = (
    "what is two plus three",
    "what day comes after monday",
    "what is the opposite of hot",
    "what can you do",
    "count from one to five",
    "my name is anna",
    "what color is the sky",
    "say good night",
)

Samples = NDArray[np.int16]


class VoiceTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A spoken question and the latency of its answer.

    `voice_to_voice_ms` and `first_audio_ms` (first sample received, voiced or not) are measured on
    this client's clock. `parts`: parts of the latency that the fleet reports, on its own clock.
    """

    question: str
    request: str
    voice_to_voice_ms: float
    parts: tuple[LatencyPart, ...]
    answer_s: float
    transcript: str
    first_audio_ms: float | None = None


class VoiceResult(Result, frozen=True, kw_only=True):
    """Turns of one voice session. `silence_ms`: the session's end-of-turn silence, which is part of
    every `voice_to_voice_ms`.
    """

    model: str
    silence_ms: int
    turns: tuple[VoiceTurn, ...]
    others_cores: float | None = None

    @property
    def voice_to_voice_ms(self) -> Summary | None:
        return summarise([turn.voice_to_voice_ms for turn in self.turns])

    @property
    def fleet_ms(self) -> Summary | None:
        """Voice-to-voice latency without the end-of-turn silence."""
        return summarise([turn.voice_to_voice_ms - self.silence_ms for turn in self.turns])

    @property
    def first_audio_ms(self) -> Summary | None:
        return summarise([turn.first_audio_ms for turn in self.turns])

    def part_ms(self, name: str) -> Summary | None:
        return summarise(
            [part.ms for turn in self.turns for part in turn.parts if part.name == name]
        )

    @property
    def part_names(self) -> list[str]:
        return list(dict.fromkeys(part.name for turn in self.turns for part in turn.parts))

    def tables(self) -> list[Group]:
        """Return the tables. The latency parts are reported by the fleet on its own clock, and need
        not add up to the client's latency.
        """
        rows = [
            ("voice to voice (first voiced sample plays)", self.voice_to_voice_ms),
            (f"without {self.silence_ms} ms of silence", self.fleet_ms),
            ("first audio received, voiced or not", self.first_audio_ms),
            *((f"  {name}", self.part_ms(name)) for name in self.part_names),
        ]
        return [
            summary_table(
                f"{len(self.turns)} spoken turns of one session with {self.model}", "ms", rows
            )
        ]

    def targets(self) -> list[Ratio]:
        """Compare the median of voice to voice, without the end-of-turn silence, with its
        target.
        """
        if (fleet_ms := self.fleet_ms) is None:
            return []
        name = "voice turn without its silence, p50"
        return [at_most(name, fleet_ms.p50, TARGET_P50_MS, "ms")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenQuestion:
    """Recording of a question.

    Invariants: `samples` are 16-bit PCM at 24 kHz, and the last one is voiced.
    """

    name: str
    samples: Samples


def read_question(path: Path) -> SpokenQuestion:
    """Read an audio file. Raises: BenchError if it holds no audio, or only silence."""
    try:
        samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.LibsndfileError) as error:
        raise BenchError(f"--wav {path}: {error}", param="--wav") from error
    spoken = until_last_voiced(soxr.resample(samples.mean(axis=1), rate_hz, PCM_RATE_HZ))
    if not len(spoken):
        raise BenchError(f"--wav {path}: the file is silent; name one with speech", param="--wav")
    return SpokenQuestion(name=path.name, samples=(np.clip(spoken, -1, 1) * PEAK).astype("<i2"))


def spoken_questions(api: ApiClient, model: str, count: int) -> list[SpokenQuestion]:
    """Return recordings of up to `count` different questions, spoken by the fleet itself. Raises:
    ApiError, BenchError.
    """
    questions: list[SpokenQuestion] = []
    for text in QUESTIONS[:count]:
        file = api.speech(SpeechCall(model=model, input=text))
        samples, _ = soundfile.read(BytesIO(file), dtype="int16")
        spoken = until_last_voiced(samples)
        if not len(spoken):
            raise BenchError(
                f"the fleet speaks {text!r} as silence; name recordings with --wav", param="--wav"
            )
        questions.append(SpokenQuestion(name=text, samples=spoken.astype("<i2")))
    return questions


def until_last_voiced(samples: np.ndarray) -> np.ndarray:
    """Return the samples without the silence after the last voiced one."""
    level = np.abs(samples)
    voiced = np.flatnonzero(level > QUIET * float(level.max(initial=0)))
    return samples[: voiced[-1] + 1] if len(voiced) else samples[:0]


def measure_voice(
    api: ApiClient, questions: Sequence[SpokenQuestion], turns: int, step: Callable[[], None]
) -> VoiceResult:
    """Measure `turns` turns of one session, cycling through the questions, after one turn of
    warm-up.

    Raises: ApiError, BenchError.
    """
    model = api.model()
    with api.realtime(model) as session:
        conversation = _Conversation(session)
        conversation.open()
        measured: list[VoiceTurn] = []
        for number in range(turns + 1):
            turn = conversation.ask(questions[number % len(questions)])
            if number:
                measured.append(turn)
            step()
    return VoiceResult(model=model, silence_ms=SILENCE_MS, turns=tuple(measured))


@dataclass(slots=True)
class _Answer:
    """The audio answer received so far. `first_s`: arrival time of its first sample."""

    voiced: FirstVoicedClock
    first_s: float | None = None
    num_bytes: int = 0
    request: str = ""
    parts: tuple[LatencyPart, ...] = ()
    transcript: str = ""
    response: RealtimeResponse | None = None

    def receive(self, event: RealtimeEvent, now_s: float) -> None:
        match event.type:
            case "response.output_audio.delta":
                pcm = b64decode(event.delta)
                self.first_s = self.first_s or now_s
                self.voiced.add(pcm, now_s)
                self.num_bytes += len(pcm)
            case "response.output_audio_transcript.delta":
                self.transcript += event.delta
            case "fleet.timing":
                self.parts, self.request = event.parts, event.request_id
            case "response.done":
                self.response = event.response
            case _:
                pass


class EventReader:
    """Receives a session's events on a thread of its own, while the main thread speaks."""

    def __init__(self, session: RealtimeSession) -> None:
        self._session = session
        self._events: list[tuple[float, RealtimeEvent]] = []
        self._error: ApiError | None = None
        self._ended = False
        self._more = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def wait(self, event_type: str, remedy: str = "") -> tuple[float, RealtimeEvent]:
        """Return the first event of a type that `take` has not returned yet, with its arrival time;
        wait for the event if there is none. The event is not removed. `remedy`: advice for the
        error message. Raises: ApiError, BenchError.
        """
        with self._more:
            self._more.wait_for(lambda: self._first(event_type) or self._ended, TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if (found := self._first(event_type)) is None:
                raise BenchError(f"no {event_type} within {TIMEOUT_S:g} s{remedy}")
            return found

    def take(self) -> list[tuple[float, RealtimeEvent]]:
        """Remove and return the events received since the last call, with arrival times. Raises:
        ApiError.
        """
        with self._more:
            if self._error is not None:
                raise self._error
            taken, self._events = self._events, []
            return taken

    def _first(self, event_type: str) -> tuple[float, RealtimeEvent] | None:
        return next((received for received in self._events if received[1].type == event_type), None)

    def _receive(self) -> None:
        try:
            for event in self._session:
                with self._more:
                    self._events.append((time.perf_counter(), event))
                    self._more.notify_all()
        except ConnectionClosed:
            return  # the next call that sends reports it
        except ApiError as error:
            self._error = error
        finally:
            with self._more:
                self._ended = True
                self._more.notify_all()


class _Conversation:
    """A voice session with an open microphone, which sends silence between questions."""

    def __init__(self, session: RealtimeSession) -> None:
        self._session, self._events = session, EventReader(session)

    def open(self) -> None:
        detection = {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "silence_duration_ms": SILENCE_MS,
        }
        self._session.send(update_audio_input(turn_detection=detection))
        self._events.wait("session.updated")

    def ask(self, question: SpokenQuestion) -> VoiceTurn:
        """Speak the question, then send silence until the answer has arrived. Raises: ApiError,
        BenchError.
        """
        lead_in_s = self._session.speak(
            bytes(BYTES_PER_S * LEAD_IN_MS // 1000), time.perf_counter()
        )
        spoken_s = sent_s = last_audio_s = self._session.speak(
            question.samples.tobytes(), lead_in_s
        )
        answer = _Answer(FirstVoicedClock(PCM_RATE_HZ))
        while answer.response is None:
            sent_s = self._session.speak(bytes(BLOCK_BYTES), sent_s)
            for at_s, event in self._events.take():
                answer.receive(event, at_s)
                last_audio_s = at_s if event.type == "response.output_audio.delta" else last_audio_s
            if sent_s > last_audio_s + TIMEOUT_S:
                raise BenchError(
                    f"no answer to {question.name!r} within {TIMEOUT_S:g} s; if it was not "
                    "detected as speech, name recordings "
                    "with --wav"
                )
        return self._turn(question.name, answer, spoken_s)

    @staticmethod
    def _turn(name: str, answer: _Answer, spoken_s: float) -> VoiceTurn:
        assert answer.response is not None, "the answer has ended"
        if answer.response.status != "completed":
            raise BenchError(f"the answer to {name!r} was not completed: {answer.response.failure}")
        if answer.first_s is None:
            raise BenchError(f"the answer to {name!r} has no audio")
        if answer.voiced.at_s is None:
            raise BenchError(
                f"the answer to {name!r} is silent: none of its {answer.num_bytes} bytes is voiced"
            )
        return VoiceTurn(
            question=name,
            request=answer.request,
            voice_to_voice_ms=round((answer.voiced.at_s - spoken_s) * 1e3, 1),
            parts=answer.parts,
            answer_s=answer.num_bytes / BYTES_PER_S,
            transcript=answer.transcript,
            first_audio_ms=round((answer.first_s - spoken_s) * 1e3, 1),
        )


def questions_of(context: Context, api: ApiClient, count: int) -> list[SpokenQuestion]:
    """Return the recordings named by `--wav`, or else `count` questions spoken by the fleet."""
    if recorded := [read_question(path) for path in context.options.wavs]:
        return recorded
    done = context.steps("questions, spoken by the fleet")
    questions = spoken_questions(api, api.model(), count)
    done()
    return questions


def _measure(context: Context) -> VoiceResult:
    options, count = context.options, context.options.requests
    with target_fleet(context) as target:
        questions = questions_of(context, target.api, count)
        step = context.steps("voice turns", count + 1)
        return with_background_load(
            options.up, lambda: measure_voice(target.api, questions, count, step)
        )


def recordings_folder(options: BenchOptions) -> Path | None:
    """Return the folder named by `--wav`, which exists or whose name has no suffix such as `.wav`;
    None if `--wav` names files only.
    """
    return next((path for path in options.wavs if path.is_dir() or not path.suffix), None)


def _is_requested(options: BenchOptions) -> bool:
    """Return True if the options ask for the latency of a single voice session. The modules
    `voice_sessions`, `voice_beside_batch` and `assistant` serve the other options about voice.
    """
    if recordings_folder(options) is not None or options.voice_beside_batch:
        return False
    implied = bool(options.sessions) or (bool(options.wavs) and not options.barge_in)
    return (options.voice or implied) and (options.sessions or 1) == 1


MEASUREMENT = Measurement(
    place=130,
    key="voice",
    run=_measure,
    is_requested=_is_requested,
    of_gateway=True,
    about={
        "--voice": "spoken questions over the Realtime WebSocket in real time: from the last "
        "voiced sample to the first audio of the answer, and the parts of that time; questions in "
        "the fleet's own voice, or from --wav files. With --sessions N as many sessions run "
        "concurrently, over the API's and the console's sockets, each with real-time playback: "
        "underruns, late audio, CPU of each process. A fleet that is started for it gets one "
        "session beyond its limit, which is queued, and admitted when another leaves"
    },
    arguments=(
        argument(
            "--voice",
            action="store_true",
            help="measure --requests spoken turns over the Realtime WebSocket",
        ),
        argument(
            "--wav",
            dest="wavs",
            type=Path,
            action="append",
            default=[],
            metavar="PATH",
            help="a spoken question, repeatable; or a folder for the recordings of --voice",
        ),
    ),
)
