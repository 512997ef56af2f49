"""Client of one of many concurrent voice sessions, like a browser page or a program: an open
microphone, and playback of audio as it arrives.

Speech is encoded before the measurement, and received events are decoded no further than needed,
since 50 sessions share one event loop. Knows no stage and no process.
"""

import asyncio
import random
import time
from base64 import b64decode
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from fleet.lab.client.audio import BYTES_PER_S, BYTES_PER_SAMPLE
from fleet.lab.client.errors import ApiError
from fleet.lab.client.realtime import (
    BLOCK_MS,
    SERIAL_BYTES,
    LatencyPart,
    RealtimeEvent,
    append_audio,
    decode_event,
    encode_event,
)
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.playback import START_S, PlaybackClock
from fleet.lab.measure.voice import SILENCE_MS, TIMEOUT_S, SpokenQuestion
from fleet.lab.measure.voice_format import PCM, VoiceFormat
from fleet.processing.voice_onset import FirstVoicedClock

PROGRAM_BLOCK_MS = 40
"""Length of audio blocks from programs, which send 40 to 100 ms; the Voice page sends 20."""
NOISE_BLOCKS = 16
NOISE = 30
"""Amplitude of background noise, of 32768: no microphone sends zeros."""
PLAYED_EVERY_S = 0.25
COMPLETE = ("completed", "incomplete")
"""Statuses of a whole answer; "incomplete" means that it ended at its length limit."""
PAUSE_S = (0.3, 1.5)
"""Range of the pause between an answer's end and the next question."""


class SessionTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A question and the latency and playback of its answer.

    `first_audio_ms`: like `voice_to_voice_ms`, but to the first audio of the answer, voiced or not.
    `late_ms`: arrival minus due time of each piece of audio but the first; negative if early.
    `parts`: parts of the latency that the fleet reports, on its own clock.
    """

    voice_to_voice_ms: float
    first_audio_ms: float
    parts: tuple[LatencyPart, ...]
    underruns: int
    answer_s: float
    late_ms: tuple[float, ...]


class SessionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one voice session. `console`: whether the session used the console's socket.
    `fault`: error that ended the session early, or "". `mic_late_ms`: delay of each audio block
    that this client sent.
    """

    console: bool
    turns: tuple[SessionTurn, ...]
    mic_late_ms: tuple[float, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSpeech:
    """Audio blocks in the form in which they are sent: background noise, and the questions."""

    block_ms: int
    form: VoiceFormat
    noise: tuple[str | bytes, ...]
    questions: tuple[tuple[str | bytes, ...], ...]

    @staticmethod
    def of(
        questions: Sequence[SpokenQuestion], *, console: bool, form: VoiceFormat = PCM
    ) -> "EncodedSpeech":
        """Encode questions for the console's socket (binary PCM) or for the API's socket (events
        with base64).
        """
        block_ms = BLOCK_MS if console else PROGRAM_BLOCK_MS
        size = BYTES_PER_S * block_ms // 1000
        noise = np.random.default_rng(1).integers(
            -NOISE, NOISE, NOISE_BLOCKS * size // BYTES_PER_SAMPLE
        )

        def encode(pcm: bytes) -> tuple[str | bytes, ...]:
            audio = form.encode(pcm)
            num_bytes = form.rate_hz * form.sample_bytes * block_ms // 1000
            blocks = [audio[at : at + num_bytes] for at in range(0, len(audio), num_bytes)]
            return tuple(blocks if console else map(append_audio, blocks))

        spoken = [question.samples.tobytes() for question in questions]
        return EncodedSpeech(
            block_ms=block_ms,
            form=form,
            noise=encode(noise.astype("<i2").tobytes()),
            questions=tuple(encode(bytes(-len(pcm) % size) + pcm) for pcm in spoken),
        )


class VoiceConnection(Protocol):
    """Connection of a voice session, which yields what it receives until the server closes it."""

    async def send(self, message: str | bytes, /) -> None: ...

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...


class VoiceClient:
    """Client of one voice session. Events: `opened` is set once the session is admitted, `left`
    once it is closed.
    """

    buffer_s: ClassVar = START_S
    """Length of audio buffered before playback starts, and after an underrun."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        speech: EncodedSpeech,
        model: str,
        *,
        console: bool,
        seed: int,
    ) -> None:
        self.opened, self.left = asyncio.Event(), asyncio.Event()
        self.position: int | None = None
        self.opened_s = self.left_s = 0.0
        self._url = url
        self._headers = headers
        self._speech = speech
        self._model = model
        self._console = console
        self._random = random.Random(seed)
        self._updated = asyncio.Event()
        self._done = asyncio.Event()
        self._to_send: deque[str | bytes] = deque()
        self._sent = asyncio.Event()
        self._sent_s = 0.0
        self._form = speech.form
        self._voiced = FirstVoicedClock(self._form.rate_hz)
        self._playback: PlaybackClock | None = None
        self._first_s = 0.0
        self._parts: tuple[LatencyPart, ...] = ()
        self._response = ""
        self._status = ""
        self._played_sent_s = 0.0
        self._turns: list[SessionTurn] = []
        self._mic_late_ms: list[float] = []

    async def run(self, num_turns: int, begin: asyncio.Event) -> SessionResult:
        """Open a session, wait for `begin`, take the turns, and return the result. An error ends
        the session early and is part of the result.
        """
        fault = ""
        try:
            async with self._connect() as socket:
                await self._converse(socket, num_turns, begin)
                self.left_s = time.perf_counter()
        except InvalidStatus as error:
            fault = f"refused with status {error.response.status_code}"
        except TimeoutError:
            fault = f"no event for {TIMEOUT_S:g} s; the last response was {self._status or 'none'}"
        except (OSError, WebSocketException, ApiError, BenchError) as error:
            fault = str(error) or type(error).__name__
        self.left.set()
        return SessionResult(
            console=self._console,
            turns=tuple(self._turns),
            mic_late_ms=tuple(self._mic_late_ms),
            fault=fault,
        )

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[VoiceConnection]:
        async with connect(
            self._url, additional_headers=self._headers, max_size=None, compression=None
        ) as socket:
            yield socket

    async def _converse(
        self, socket: VoiceConnection, num_turns: int, begin: asyncio.Event
    ) -> None:
        turns = asyncio.create_task(self._take_turns(socket, num_turns, begin))
        tasks = {turns, asyncio.create_task(self._receive(socket))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_turns(
        self, socket: VoiceConnection, num_turns: int, begin: asyncio.Event
    ) -> None:
        await self.opened.wait()
        await socket.send(self._settings())
        await asyncio.wait_for(self._updated.wait(), TIMEOUT_S)
        microphone = asyncio.create_task(self._send_microphone(socket))
        try:
            await begin.wait()
            for number in range(num_turns):
                await asyncio.sleep(self._random.uniform(*PAUSE_S) * (3 if number == 0 else 1))
                await self._take_turn(number)
        finally:
            microphone.cancel()
            await asyncio.gather(microphone, return_exceptions=True)

    async def _take_turn(self, number: int) -> None:
        self._done.clear()
        self._sent.clear()
        self._reset_answer()
        self._to_send.extend(self._speech.questions[number % len(self._speech.questions)])
        await self._sent.wait()
        await asyncio.wait_for(self._done.wait(), TIMEOUT_S)
        playback = self._playback
        voiced_s = self._voiced.at_s
        if playback is None or voiced_s is None or self._status not in COMPLETE:
            audio = "no" if playback is None else "only silent" if voiced_s is None else "voiced"
            raise BenchError(f"an answer was {self._status}, with {audio} audio")
        await asyncio.sleep(max(0.0, playback.ends_s - time.perf_counter()))
        self._turns.append(
            SessionTurn(
                voice_to_voice_ms=round((voiced_s - self._sent_s) * 1e3, 1),
                first_audio_ms=round((self._first_s - self._sent_s) * 1e3, 1),
                parts=self._parts,
                underruns=playback.underruns,
                answer_s=playback.num_samples / self._form.rate_hz,
                late_ms=tuple(round(late * 1e3, 1) for late in playback.late_s),
            )
        )

    def _reset_answer(self) -> None:
        self._voiced = FirstVoicedClock(self._form.rate_hz)
        self._playback = None
        self._parts = ()

    def _settings(self) -> str:
        """Return the event with the session settings. A console client asks for a transcription of
        the user's speech, as the Voice page does; other clients name their audio format if it is
        not the default.
        """
        heard: dict[str, object] = {
            "turn_detection": {"type": "server_vad", "silence_duration_ms": SILENCE_MS},
            **self._form.settings(),
        }
        if self._console:
            heard["transcription"] = {"model": self._model}
        audio = {"input": heard, "output": self._form.settings()}
        return encode_event("session.update", session={"type": "realtime", "audio": audio})

    async def _send_microphone(self, socket: VoiceConnection) -> None:
        """Send each audio block at the time at which a microphone would have recorded it. Every
        session has a random phase.
        """
        block_s = self._speech.block_ms / 1e3
        due_s = time.perf_counter() + self._random.uniform(0, block_s)
        number = 0
        while True:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if self._to_send:
                await socket.send(self._to_send.popleft())
                if not self._to_send:
                    self._sent_s = time.perf_counter()
                    self._sent.set()
            else:
                await socket.send(self._speech.noise[number % NOISE_BLOCKS])
            self._mic_late_ms.append(round((time.perf_counter() - due_s) * 1e3, 1))
            await self._report_playhead(socket)
            number += 1
            due_s += block_s

    async def _report_playhead(self, socket: VoiceConnection) -> None:
        """Report the playback position as often as the Voice page does, while audio plays."""
        now_s, playback = time.perf_counter(), self._playback
        if (
            not self._console
            or playback is None
            or now_s - self._played_sent_s < PLAYED_EVERY_S
            or now_s > playback.ends_s
        ):
            return
        self._played_sent_s = now_s
        samples = max(0, playback.num_samples - int((playback.ends_s - now_s) * self._form.rate_hz))
        await socket.send(encode_event("fleet.played", response_id=self._response, samples=samples))

    async def _receive(self, socket: VoiceConnection) -> None:
        async for frame in socket:
            if isinstance(frame, bytes):
                self._on_binary(frame)
            else:
                self._on_event(decode_event(frame))

    def _on_binary(self, frame: bytes) -> None:
        num_samples = (len(frame) - SERIAL_BYTES) // BYTES_PER_SAMPLE
        self._receive_audio(num_samples, lambda: frame[SERIAL_BYTES:])

    def _receive_audio(self, num_samples: int, audio: Callable[[], bytes]) -> None:
        """Add received audio to the playback clock, and search it for the first voiced sample.

        `num_samples`: length of the audio. `audio`: function that returns its bytes; called only
        until a voiced sample is found, so that later audio is not decoded.
        """
        now_s = time.perf_counter()
        if self._playback is None:
            self._first_s = now_s
            self._playback = PlaybackClock(self._form.rate_hz, self.buffer_s)
        self._playback.receive(num_samples, now_s)
        if self._voiced.at_s is None:
            self._voiced.add(self._form.pcm(audio()), now_s)

    def _on_event(self, event: RealtimeEvent) -> None:
        match event.type:
            case "response.output_audio.delta":
                num_bytes = len(event.delta) * 3 // 4 - event.delta[-2:].count("=")
                num_samples = num_bytes // self._form.sample_bytes
                self._receive_audio(num_samples, lambda: b64decode(event.delta))
            case "response.created":
                self._response = event.response.id
            case "response.done":
                self._status = event.response.status
                self._done.set()
            case "session.created":
                self.opened_s = time.perf_counter()
                self.opened.set()
            case "session.updated":
                self._updated.set()
            case "fleet.timing":
                self._parts = event.parts
            case "fleet.queue":
                self.position = self.position or event.position
            case _:
                pass
