"""Events and frames with the audio of one clause of an utterance: a file in one frame, a file in
several frames, or PCM in events with the times of its words. Source: vllm-omni. Knows no socket.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec

from web.gateway.answer import BYTES_PER_SAMPLE
from web.gateway.word_times import WordTime
from web.openai.audio_encoder import encode_whole, open_encoder
from web.schema.audio import FileFormat
from web.speech_stream.client_events import SessionConfig


class AudioStart(msgspec.Struct, frozen=True, kw_only=True):
    """The audio of a clause begins. `utterance_index`: number of the text in the session.
    `sentence_index`: number of the clause in its text. `sentence_text`: the clause as it was sent;
    joined, the clauses are the text.
    """

    type: Literal["audio.start"] = "audio.start"
    utterance_index: int
    sentence_index: int
    sentence_text: str
    format: FileFormat
    sample_rate: int
    channels: int = 1


class TimedAudio(msgspec.Struct, frozen=True, kw_only=True):
    """Audio of a clause as base64, with the words that end in it. Times count from the beginning of
    the clause.
    """

    type: Literal["audio.chunk"] = "audio.chunk"
    utterance_index: int
    sentence_index: int
    chunk_id: int
    chunk_start_ms: int
    chunk_end_ms: int
    sample_rate: int
    channels: int = 1
    audio_b64: str
    timestamps: list[WordTime]


class AudioDone(msgspec.Struct, frozen=True, kw_only=True):
    """The audio of a clause is complete, or was ended by an `error`. `total_bytes`: size of its
    audio, before base64.
    """

    type: Literal["audio.done"] = "audio.done"
    utterance_index: int
    sentence_index: int
    total_bytes: int
    error: bool


SendFrame = Callable[[TimedAudio | bytes], Awaitable[None]]
"""Function that sends an event, or a binary frame."""


class ClauseAudio(Protocol):
    """Sender of the audio of one clause. `num_bytes`: size of the audio that was sent."""

    num_bytes: int

    async def add(self, pcm: bytes, words: list[WordTime]) -> None: ...

    async def finish(self) -> None:
        """Send the rest of the audio after the last `add`."""
        ...


def open_audio(
    send: SendFrame, config: SessionConfig, rate_hz: int, utterance: int, clause: int
) -> ClauseAudio:
    """Return the sender that a session's configuration asks for. `utterance`, `clause`: number of
    the utterance in the session, and of the clause in the utterance.
    """
    if config.word_timestamps:
        return _TimedChunks(send, rate_hz, utterance, clause)
    kind = _StreamedFile if config.stream_audio else _WholeFile
    return kind(send, config.file_format, rate_hz)


class _WholeFile:
    def __init__(self, send: SendFrame, kind: FileFormat, rate_hz: int) -> None:
        self.num_bytes = 0
        self._send = send
        self._kind: FileFormat = kind
        self._rate_hz = rate_hz
        self._pcm = bytearray()

    async def add(self, pcm: bytes, words: list[WordTime]) -> None:
        self._pcm += pcm

    async def finish(self) -> None:
        if self._pcm:
            file = await asyncio.to_thread(
                encode_whole, bytes(self._pcm), self._rate_hz, self._kind
            )
            self.num_bytes = len(file)
            await self._send(file)


class _StreamedFile:
    def __init__(self, send: SendFrame, kind: FileFormat, rate_hz: int) -> None:
        self.num_bytes = 0
        self._send = send
        self._encoder = open_encoder(kind, rate_hz)
        self._has_audio = False

    async def add(self, pcm: bytes, words: list[WordTime]) -> None:
        if pcm:
            self._has_audio = True
            await self._send_data(await asyncio.to_thread(self._encoder.feed, pcm))

    async def finish(self) -> None:
        if self._has_audio:
            await self._send_data(await asyncio.to_thread(self._encoder.finish))

    async def _send_data(self, data: bytes) -> None:
        if data:
            self.num_bytes += len(data)
            await self._send(data)


class _TimedChunks:
    def __init__(self, send: SendFrame, rate_hz: int, utterance: int, clause: int) -> None:
        self.num_bytes = 0
        self._send = send
        self._rate_hz = rate_hz
        self._utterance, self._clause = utterance, clause
        self._num_chunks = 0

    async def add(self, pcm: bytes, words: list[WordTime]) -> None:
        start_ms = self._now_ms()
        self.num_bytes += len(pcm)
        chunk = TimedAudio(
            utterance_index=self._utterance,
            sentence_index=self._clause,
            chunk_id=self._num_chunks,
            chunk_start_ms=start_ms,
            chunk_end_ms=self._now_ms(),
            sample_rate=self._rate_hz,
            audio_b64=base64.b64encode(pcm).decode("ascii"),
            timestamps=words,
        )
        self._num_chunks += 1
        await self._send(chunk)

    async def finish(self) -> None: ...

    def _now_ms(self) -> int:
        return round(self.num_bytes // BYTES_PER_SAMPLE * 1000 / self._rate_hz)
