"""One voice session of many, as a page or a program has it: a microphone that never stops, and a listener who plays what comes.

What it sends is encoded before the measuring, and what comes is read no further than needed: 50 of these share one event loop.
Knows no stage and no process.
"""

import asyncio
import random
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from fleet.bench.chat import BYTES_PER_SAMPLE, PCM_RATE_HZ, Headers
from fleet.bench.errors import BenchError
from fleet.bench.playback import Playback
from fleet.bench.voice import BLOCK_MS, PATIENCE_S, SILENCE_MS, Part, Question
from fleet.bench.voices_result import Talk, Turn
from fleet.processing.voice_onset import FirstVoicedClock

PROGRAM_BLOCK_MS = 40
"""What programs send at a time: 40 to 100 ms; our page sends 20."""
HUM_BLOCKS = 16
HUM = 30
"""Of 32768: a quiet room. Nobody's microphone gives zeros."""
PLAYED_EVERY_S = 0.25
SERIAL_BYTES = 8
ANSWERED = ("completed", "incomplete")
"""Incomplete is what an answer of bounded length is called that would have gone on."""
PAUSE_S = (0.3, 1.5)
"""From the end of an answer to the next question, at least and at most."""


class _Response(msgspec.Struct, frozen=True):
    id: str = ""
    status: str = ""


class _Problem(msgspec.Struct, frozen=True):
    message: str


class _Event(msgspec.Struct, frozen=True):
    type: str
    delta: str = ""
    position: int | None = None
    parts: tuple[Part, ...] = ()
    response: _Response | None = None
    error: _Problem | None = None


_event = msgspec.json.Decoder(_Event)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Blocks as they go over the wire: a room's hum, and questions."""

    block_ms: int
    hum: tuple[str | bytes, ...]
    questions: tuple[tuple[str | bytes, ...], ...]

    @staticmethod
    def of(questions: Sequence[Question], *, console: bool) -> "Frames":
        """The console's socket takes sound as it is, the API's in base64."""
        block_ms = BLOCK_MS if console else PROGRAM_BLOCK_MS
        size = PCM_RATE_HZ * block_ms // 1000 * BYTES_PER_SAMPLE
        noise = np.random.default_rng(1).integers(-HUM, HUM, HUM_BLOCKS * size // BYTES_PER_SAMPLE)

        def frames(pcm: bytes) -> tuple[str | bytes, ...]:
            blocks = [pcm[start : start + size] for start in range(0, len(pcm), size)]
            return tuple(blocks if console else map(_append, blocks))

        spoken = [question.samples.tobytes() for question in questions]
        return Frames(
            block_ms=block_ms, hum=frames(noise.astype("<i2").tobytes()),
            questions=tuple(frames(bytes(-len(pcm) % size) + pcm) for pcm in spoken),
        )  # fmt: skip


def _append(block: bytes) -> str:
    return _encode({"type": "input_audio_buffer.append", "audio": b64encode(block).decode()}).decode()


class Caller:
    """A session. `opened` once it may talk, `waiting` once it knows its place in line, `left` once its connection is closed."""

    def __init__(self, url: str, headers: Headers, frames: Frames, model: str, *, console: bool, seed: int) -> None:
        self.opened, self.waiting, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.position: int | None = None
        self.opened_s = self.left_s = 0.0
        self._url, self._headers, self._frames, self._model, self._console = url, headers, frames, model, console
        self._random = random.Random(seed)
        self._updated = asyncio.Event()
        self._over = asyncio.Event()
        self._to_say: deque[str | bytes] = deque()
        self._said = asyncio.Event()
        self._said_s = 0.0
        self._voiced = FirstVoicedClock(PCM_RATE_HZ)
        self._playback: Playback | None = None
        self._parts: tuple[Part, ...] = ()
        self._response = ""
        self._status = ""
        self._told_s = 0.0
        self._turns: list[Turn] = []
        self._mic_late_ms: list[float] = []

    async def talk(self, num_turns: int, begin: asyncio.Event) -> Talk:
        """Open a session, wait for `begin`, and take so many turns. What goes wrong is told in the result."""
        fault = ""
        try:
            async with connect(self._url, additional_headers=self._headers, max_size=None, compression=None) as socket:
                await self._converse(socket, num_turns, begin)
                self.left_s = time.perf_counter()
        except InvalidStatus as error:
            fault = f"refused with status {error.response.status_code}"
        except TimeoutError:
            fault = f"nothing came for {PATIENCE_S:g} s; the last response was {self._status or 'none'}"
        except (OSError, WebSocketException, BenchError) as error:
            fault = str(error) or type(error).__name__
        self.left.set()
        return Talk(console=self._console, turns=tuple(self._turns), mic_late_ms=tuple(self._mic_late_ms), fault=fault)

    async def _converse(self, socket: ClientConnection, num_turns: int, begin: asyncio.Event) -> None:
        talking = asyncio.create_task(self._take_turns(socket, num_turns, begin))
        jobs = {talking, asyncio.create_task(self._listen(socket))}
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _take_turns(self, socket: ClientConnection, num_turns: int, begin: asyncio.Event) -> None:
        await self.opened.wait()
        await socket.send(self._settings())
        await asyncio.wait_for(self._updated.wait(), PATIENCE_S)
        microphone = asyncio.create_task(self._microphone(socket))
        try:
            await begin.wait()
            for number in range(num_turns):
                await asyncio.sleep(self._random.uniform(*PAUSE_S) * (3 if number == 0 else 1))
                await self._take_turn(number)
        finally:
            microphone.cancel()
            await asyncio.gather(microphone, return_exceptions=True)

    async def _take_turn(self, number: int) -> None:
        self._over.clear()
        self._said.clear()
        self._hush()
        self._to_say.extend(self._frames.questions[number % len(self._frames.questions)])
        await self._said.wait()
        await asyncio.wait_for(self._over.wait(), PATIENCE_S)
        playback = self._playback
        voiced_s = self._voiced.at_s
        if playback is None or voiced_s is None or self._status not in ANSWERED:
            sound = "no" if playback is None else "only silent" if voiced_s is None else "voiced"
            raise BenchError(f"an answer was {self._status}, with {sound} sound")
        await asyncio.sleep(max(0.0, playback.ends_s - time.perf_counter()))
        self._turns.append(
            Turn(
                voice_to_voice_ms=round((voiced_s - self._said_s) * 1e3, 1), parts=self._parts, underruns=playback.underruns,
                answer_s=playback.num_samples / PCM_RATE_HZ, late_ms=tuple(round(late * 1e3, 1) for late in playback.late_s),
            )
        )  # fmt: skip

    def _hush(self) -> None:
        """Nothing has been heard of the next answer yet."""
        self._voiced, self._playback, self._parts = FirstVoicedClock(PCM_RATE_HZ), None, ()

    def _settings(self) -> str:
        """As our page has them on the console's socket, where what the user says is written down too."""
        heard: dict[str, object] = {"turn_detection": {"type": "server_vad", "silence_duration_ms": SILENCE_MS}}
        if self._console:
            heard["transcription"] = {"model": self._model}
        return _encode({"type": "session.update", "session": {"type": "realtime", "audio": {"input": heard}}}).decode()

    async def _microphone(self, socket: ClientConnection) -> None:
        """A block when it would have been recorded; the sessions' beats differ, as those of people do."""
        block_s = self._frames.block_ms / 1e3
        due_s = time.perf_counter() + self._random.uniform(0, block_s)
        number = 0
        while True:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if self._to_say:
                await socket.send(self._to_say.popleft())
                if not self._to_say:
                    self._said_s = time.perf_counter()
                    self._said.set()
            else:
                await socket.send(self._frames.hum[number % HUM_BLOCKS])
            self._mic_late_ms.append(round((time.perf_counter() - due_s) * 1e3, 1))
            await self._tell_played(socket)
            number += 1
            due_s += block_s

    async def _tell_played(self, socket: ClientConnection) -> None:
        """As our page does while it plays."""
        now_s, playback = time.perf_counter(), self._playback
        if not self._console or playback is None or now_s - self._told_s < PLAYED_EVERY_S or now_s > playback.ends_s:
            return
        self._told_s = now_s
        samples = max(0, playback.num_samples - int((playback.ends_s - now_s) * PCM_RATE_HZ))
        await socket.send(_encode({"type": "fleet.played", "response_id": self._response, "samples": samples}).decode())

    async def _listen(self, socket: ClientConnection) -> None:
        async for frame in socket:
            if isinstance(frame, bytes):
                self._hear((len(frame) - SERIAL_BYTES) // BYTES_PER_SAMPLE, lambda frame=frame: frame[SERIAL_BYTES:])
            else:
                self._on_event(_event.decode(frame))

    def _hear(self, num_samples: int, pcm: Callable[[], bytes]) -> None:
        """`pcm` decodes the samples, which only the search for the first voiced one needs."""
        now_s = time.perf_counter()
        self._playback = self._playback or Playback(PCM_RATE_HZ)
        self._playback.came(num_samples, now_s)
        if self._voiced.at_s is None:
            self._voiced.add(pcm(), now_s)

    def _on_event(self, event: _Event) -> None:
        match event.type:
            case "response.output_audio.delta":
                num_bytes = len(event.delta) * 3 // 4 - event.delta[-2:].count("=")
                self._hear(num_bytes // BYTES_PER_SAMPLE, lambda: b64decode(event.delta))
            case "response.created" if event.response is not None:
                self._response = event.response.id
            case "response.done" if event.response is not None:
                self._status = event.response.status
                self._over.set()
            case "session.created":
                self.opened_s = time.perf_counter()
                self.opened.set()
            case "session.updated":
                self._updated.set()
            case "fleet.timing":
                self._parts = event.parts
            case "fleet.queue":
                self.position = self.position or event.position
                self.waiting.set()
            case "error":
                raise BenchError(f"the session says: {event.error.message if event.error else 'an error without a message'}")
            case _:
                pass
