"""One answer as it arrives: chunks of the client edges to pieces of text and sound, with its counts. Knows no HTTP."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from fleet.control.client import ClientStream
from fleet.core.chunk import Chunk
from fleet.core.errors import BadInput, FleetError, GatewayStopping
from fleet.core.ids import EdgeName
from fleet.core.request import RequestSpec, Sampling
from fleet.processing import Frontend
from fleet.processing.detokenize import StopTrimmer
from fleet.processing.voice_onset import LeadingSilenceTrimmer
from web.gateway.metrics import Continuity, Metrics
from web.schema.responses import CompletionDetails, PromptDetails, Usage

log = logging.getLogger("fleet.web")

GROUP_BYTES = 6
"""Whole samples and a multiple of 3: clients join the base64 of pieces before decoding it."""
MAX_PIECE_BYTES = 48_000
BYTES_PER_SAMPLE = 2
MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """PCM16 little-endian mono. Invariants: a multiple of `GROUP_BYTES`, but for the answer's last piece."""

    pcm: bytes


Piece = TextPiece | AudioPiece


@dataclass(slots=True)
class Position:
    """How much of an answer was sent: Unicode characters of text, bytes of sound. Written `CHARS.BYTES`."""

    chars: int = 0
    sound_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.chars}.{self.sound_bytes}"

    @staticmethod
    def parse(text: str) -> "Position":
        """Raises: BadInput."""
        chars, dot, sound_bytes = text.partition(".")
        numbers = all(digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS for digits in (chars, sound_bytes))
        if not (dot and numbers) or int(sound_bytes) % BYTES_PER_SAMPLE:
            raise BadInput(f"Last-Event-ID: {text[:40]!r} is not the id of an event of this stream", param="Last-Event-ID")
        return Position(int(chars), int(sound_bytes))

    def take(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            self.chars += len(piece.text)
        else:
            self.sound_bytes += len(piece.pcm)


async def rest_of(pieces: AsyncIterator[Piece], sent: Position) -> AsyncIterator[Piece]:
    """What an answer has beyond what was sent of it."""
    skip = Position(sent.chars, sent.sound_bytes)
    async for piece in pieces:
        if isinstance(piece, TextPiece):
            skipped = min(skip.chars, len(piece.text))
            skip.chars -= skipped
            if skipped < len(piece.text):
                yield TextPiece(piece.text[skipped:])
        else:
            skipped = min(skip.sound_bytes, len(piece.pcm))
            skip.sound_bytes -= skipped
            if skipped < len(piece.pcm):
                yield AudioPiece(piece.pcm[skipped:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEdges:
    """The graph's edges to the client, by what they carry."""

    text: EdgeName
    audio: EdgeName | None


class Answer:
    """An answer under way; use as an async context manager, which aborts the request when left before its end.

    But not where it is the gateway that leaves (GatewayStopping, or `closing` is set): the client may go on at another. Nor where
    `is_stalled` says that the client was disconnected because it read nothing: the request runs to its end, to be resumed.

    Its sound is sent with at most `max_leading_silence_ms` of silence first; `num_samples` counts what was made.
    `first_sound_at`: when the first of it arrived here, in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        *,
        spec: RequestSpec,
        main: Sampling,
        stream: ClientStream,
        edges: ClientEdges,
        frontend: Frontend,
        metrics: Metrics,
        closing: asyncio.Event,
        num_cached: Callable[[RequestSpec], Awaitable[int]],
        max_leading_silence_ms: int | None,
    ) -> None:
        self.spec = spec
        self.is_stalled: Callable[[], bool] = lambda: False
        self.num_samples = 0
        self.first_sound_at: float | None = None
        self._silence = LeadingSilenceTrimmer(frontend.sample_rate_hz, max_leading_silence_ms)
        self._num_text_tokens = 0
        self._num_cached = 0
        self._ask_num_cached = num_cached
        self._last_id: int | None = None
        self._main = main
        self._stream = stream
        self._edges = edges
        self._frontend = frontend
        self._metrics = metrics
        self._closing = closing
        self._detokenizer = frontend.detokenizer()
        self._trimmer = StopTrimmer(main.stop)
        self._pcm = bytearray()
        self._num_kept = 0
        self._started = time.monotonic()
        self._ended = False
        self._outcome = ""
        self._heard: set[str] = set()
        self._continuity = Continuity()

    async def __aenter__(self) -> Self:
        self._metrics.in_flight.inc()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._metrics.in_flight.dec()
        if not self._ended and self._closing.is_set() and self._outcome in ("", GatewayStopping.code):
            self._outcome = "left"
        elif not self._ended and not self._outcome and self.is_stalled():
            self._outcome = "left"
            self._stream.run_on()
        elif not self._ended:
            self._outcome = self._outcome or "aborted"
            await self._abort()
        self._metrics.request_ended(
            self._outcome, time.monotonic() - self._started, self.answer_s,
            num_frames=self._frontend.num_answer_audio_tokens(self.num_samples), continuous=self._continuity.ok,
        )  # fmt: skip

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text and sound in the order they are made, no empty ones.

        Raises: FleetError if the request fails.
        """
        try:
            async for chunk in self._stream:
                self._metrics.edge_chunks.labels(edge=chunk.edge).inc()
                for piece in self._pieces_of(chunk):
                    yield piece
        except FleetError as error:
            self._outcome = error.code
            raise
        # A character still incomplete here will never be whole; a stop string begun is text after all.
        rest = self._trimmer.add(self._detokenizer.finish()) + self._trimmer.finish()
        if rest:
            yield TextPiece(rest)
        self._pcm += self._silence.finish()
        for piece in self._sound(final=True):
            yield piece
        self._num_cached = await self._ask_num_cached(self.spec)
        self._ended, self._outcome = True, self.finish_reason
        self._metrics.cached_tokens.inc(self._num_cached)
        self._metrics.prompt_tokens.inc(len(self.spec.prompt_ids))
        self._metrics.answer_tokens.inc(self._num_text_tokens)

    @property
    def num_trimmed(self) -> int:
        """Samples of leading silence that are not sent."""
        return self._silence.num_trimmed

    @property
    def finish_reason(self) -> str:
        """`length` where the bound cut the text; the end token and a stop string are `stop`."""
        cut = self._num_text_tokens >= self._main.max_tokens
        ended = self._trimmer.stopped or self._last_id in self._frontend.end_ids()
        return "length" if cut and not ended else "stop"

    @property
    def answer_s(self) -> float:
        rate_hz = self._frontend.sample_rate_hz
        return self.num_samples / rate_hz if rate_hz else 0.0

    def usage(self) -> Usage:
        prompt = len(self.spec.prompt_ids)
        prompt_audio = self._frontend.num_prompt_audio_tokens(self.spec)
        text, audio = self._num_text_tokens, self._frontend.num_answer_audio_tokens(self.num_samples)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=text + audio,
            total_tokens=prompt + text + audio,
            prompt_tokens_details=PromptDetails(
                audio_tokens=prompt_audio, text_tokens=prompt - prompt_audio, cached_tokens=self._num_cached
            ),
            completion_tokens_details=CompletionDetails(audio_tokens=audio, text_tokens=text),
        )

    async def _abort(self) -> None:
        """A request that failed by itself is aborted too: its failure may be that Redis could not be reached."""
        try:
            await self._stream.abort("the client left" if self._outcome == "aborted" else self._outcome)
        except FleetError as error:
            log.warning("request %s: abort failed: %s", self.spec.id, error.message)

    def _pieces_of(self, chunk: Chunk) -> list[Piece]:
        if chunk.edge == self._edges.text:
            return self._text(chunk)
        if chunk.edge == self._edges.audio:
            samples, now = _array(chunk, "pcm", "<i2"), time.monotonic()
            self.num_samples += len(samples)
            if len(samples) and self.first_sound_at is None:
                self.first_sound_at = now
            if kept := self._silence.feed(samples.tobytes()):
                self._num_kept += len(kept) // BYTES_PER_SAMPLE
                self._continuity.came(self._num_kept / self._frontend.sample_rate_hz, now)
                self._pcm += kept
            return self._sound(final=False)
        return []

    def _text(self, chunk: Chunk) -> list[Piece]:
        ids = [int(token) for token in _array(chunk, "ids", "<i4")]
        num_unwatched = max(0, max(len(self.spec.given), self._main.min_tokens) - self._num_text_tokens)
        self._num_text_tokens += len(ids)
        if ids:
            self._last_id = ids[-1]
        # as the stage does, look for stop strings only in what is drawn, and only after `min_tokens`
        unwatched, watched = ids[:num_unwatched], ids[num_unwatched:]
        text = self._detokenizer.add(unwatched) + self._trimmer.add(self._detokenizer.add(watched))
        if not text:
            return []
        self._note_first("text")
        return [TextPiece(text)]

    def _sound(self, *, final: bool) -> list[Piece]:
        whole = len(self._pcm) if final else len(self._pcm) - len(self._pcm) % GROUP_BYTES
        if whole:
            self._note_first("audio")
        pieces: list[Piece] = [
            AudioPiece(bytes(self._pcm[start : min(start + MAX_PIECE_BYTES, whole)]))
            for start in range(0, whole, MAX_PIECE_BYTES)
        ]
        del self._pcm[:whole]
        return pieces

    def _note_first(self, medium: str) -> None:
        if medium not in self._heard:
            self._heard.add(medium)
            self._metrics.first(medium, time.monotonic() - self._started)


def _array(chunk: Chunk, name: str, dtype: str) -> np.ndarray:
    """A chunk's inline tensor, flat; empty where a final chunk carries nothing."""
    tensor = chunk.tensors.get(name)
    return np.frombuffer(tensor.data if tensor is not None and tensor.data is not None else b"", dtype)
