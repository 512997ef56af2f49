"""An answer as it arrives: chunks of the client edges become pieces of text and audio, with token
counts. Knows no HTTP.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from fleet.control.client import ClientStream
from fleet.core.chunk import PROMPT_TOKENS, Chunk
from fleet.core.errors import BadInput, FleetError, GatewayStopping
from fleet.core.ids import EdgeName, RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.processing import Frontend
from fleet.processing.detokenize import StopTrimmer
from fleet.processing.timed_text import WindowReport, decode_reports
from fleet.processing.transcripts import Transcripts
from fleet.processing.voice_onset import LeadingSilenceTrimmer
from fleet.telemetry.trace import SoundGaps
from web.gateway.answer_calls import AnswerCalls, CallPiece
from web.gateway.answer_logprobs import AnswerLogprobs, TokenLogprob
from web.gateway.answer_words import AnswerWords, WordEnd
from web.gateway.metrics import Metrics, PlaybackContinuity
from web.gateway.sound_gaps import GapFinder
from web.schema.responses import CompletionDetails, PromptDetails, Usage

log = logging.getLogger("fleet.web")

GROUP_BYTES = 6
"""Divisor of the size of every audio piece but the last. As a multiple of 3, it lets clients
concatenate the base64 of the pieces before they decode it; as a multiple of 2, it cuts no sample.
"""
MAX_PIECE_BYTES = 48_000
BYTES_PER_SAMPLE = 2
MAX_DIGITS = 15


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Next text of an answer. `logprobs`: log probabilities of the tokens that begin in this text;
    empty unless the request asks for log probabilities.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Audio of an answer, PCM16 little-endian mono. Invariants: the size is a multiple of
    `GROUP_BYTES`, except for the answer's last piece.
    """

    pcm: bytes


@dataclass(frozen=True, slots=True)
class HeardPiece:
    """Next text of the transcript of the prompt's audio. `clip`: number of the clip in the prompt.
    `is_last`: True for the last piece, which may be empty. `reports`: segments and words that the
    transcript gained, if the request asks for them.
    """

    text: str
    clip: int = 0
    is_last: bool = False
    reports: tuple[WindowReport, ...] = ()


Piece = TextPiece | AudioPiece | HeardPiece | CallPiece


@dataclass(slots=True)
class Position:
    """Amount of an answer that was sent: `chars` counts Unicode characters of text and function
    calls, `audio_bytes` counts bytes of PCM16. Written as `CHARS.BYTES`, such as `120.48000`.
    """

    chars: int = 0
    audio_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.chars}.{self.audio_bytes}"

    @staticmethod
    def parse(text: str) -> "Position":
        """Read a position written as `CHARS.BYTES`. Raises: BadInput if `text` has another form."""
        chars, dot, sound_bytes = text.partition(".")
        numbers = all(
            digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
            for digits in (chars, sound_bytes)
        )
        if not (dot and numbers) or int(sound_bytes) % BYTES_PER_SAMPLE:
            raise BadInput(
                f"Last-Event-ID: {text[:40]!r} is not the id of an event of this stream",
                param="Last-Event-ID",
            )
        return Position(int(chars), int(sound_bytes))

    def advance(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            self.chars += len(piece.text)
        elif isinstance(piece, CallPiece):
            self.chars += piece.num_chars
        elif isinstance(piece, AudioPiece):
            self.audio_bytes += len(piece.pcm)


async def skip_sent(pieces: AsyncIterator[Piece], sent: Position) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer without the part before position `sent`. The transcript of the
    prompt is not a part of the answer, and is always yielded.
    """
    first, skip = sent.chars, Position(sent.chars, sent.audio_bytes)
    async for piece in pieces:
        if isinstance(piece, HeardPiece):
            yield piece
        elif isinstance(piece, TextPiece):
            skipped = min(skip.chars, len(piece.text))
            skip.chars -= skipped
            if skipped < len(piece.text):
                unsent = tuple(one for one in piece.logprobs if one.begin >= first)
                yield TextPiece(piece.text[skipped:], unsent)
        elif isinstance(piece, CallPiece):
            skipped = min(skip.chars, piece.num_chars)
            skip.chars -= skipped
            if (rest := piece.without(skipped)) is not None:
                yield rest
        else:
            skipped = min(skip.audio_bytes, len(piece.pcm))
            skip.audio_bytes -= skipped
            if skipped < len(piece.pcm):
                yield AudioPiece(piece.pcm[skipped:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEdges:
    """Names of the graph's edges to the client, by medium; None for a medium that the graph does
    not have. `heard` carries the transcript of the prompt's audio.
    """

    text: EdgeName
    audio: EdgeName | None
    heard: EdgeName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContext:
    """Parts of the gateway that every answer uses.

    `closing` is set when the gateway stops. `num_cached` counts the prompt positions of a finished
    request that were reused from the previous turn of its conversation. `tells_prompt` returns True
    if a stage reports the number of prompt tokens, since the prompt contains a transcript that the
    gateway does not know. `note_gaps` stores the gaps in the sound of a complete answer.
    """

    edges: ClientEdges
    frontend: Frontend
    metrics: Metrics
    closing: asyncio.Event
    num_cached: Callable[[RequestSpec], Awaitable[int]]
    note_gaps: Callable[[RequestId, SoundGaps | None], Awaitable[None]]
    tells_prompt: Callable[[RequestSpec], bool] = lambda _: False


class AnswerStream:
    """The answer to one request, as text and audio pieces. An async context manager: leaving the
    context before the end of the answer aborts the request.

    The request is not aborted in two cases: when the gateway stops (GatewayStopping, or `closing`
    is set), so that the client can resume the answer at another gateway; and when `is_stalled`
    returns True, since a client that was disconnected because it did not read may resume the answer
    too.

    The audio begins with at most `max_leading_silence_ms` of silence, None for no limit;
    `num_samples` counts the samples received, before trimming. `main` is the sampling of the main
    stage. `first_audio_at` is the time when the first audio arrived, in seconds of
    `time.monotonic`. `on_complete` is called with the token ids of a complete answer.
    """

    def __init__(
        self,
        context: AnswerContext,
        spec: RequestSpec,
        main: Sampling,
        stream: ClientStream,
        *,
        max_leading_silence_ms: int | None,
        on_complete: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self._on_complete = on_complete
        self.is_stalled: Callable[[], bool] = lambda: False
        self.num_samples = 0
        self.first_audio_at: float | None = None
        self._silence = LeadingSilenceTrimmer(
            context.frontend.sample_rate_hz, max_leading_silence_ms
        )
        self._words = AnswerWords()
        self._text_ids: list[int] = []
        self._num_prompt = 0 if context.tells_prompt(spec) else len(spec.prompt_ids)
        self._heard = HeardText(len(spec.audio))
        self._num_cached = 0
        self._read_num_cached = context.num_cached
        self._main = main
        self._stream = stream
        self._edges = context.edges
        self._frontend = context.frontend
        self._metrics = context.metrics
        self._closing = context.closing
        self._detokenizer = context.frontend.detokenizer(spec.tools)
        self._detokenizer.begin_after(spec.continued_ids)
        self._calls = AnswerCalls(spec)
        self._trimmer = StopTrimmer(main.stop)
        self._last_ids = context.frontend.end_ids().union(main.stop_token_ids)
        self._logprobs = AnswerLogprobs() if main.top_logprobs is not None else None
        self._pcm = bytearray()
        self._num_sent = 0
        self._started = time.monotonic()
        self._ended = False
        self._outcome = ""
        self._media_seen: set[str] = set()
        self._continuity = PlaybackContinuity()
        self._gaps = GapFinder(context.frontend.sample_rate_hz)
        self._note_gaps = context.note_gaps

    async def __aenter__(self) -> Self:
        self._metrics.in_flight.inc()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.in_flight.dec()
        if (
            not self._ended
            and self._closing.is_set()
            and self._outcome in ("", GatewayStopping.code)
        ):
            self._outcome = "left"
        elif not self._ended and not self._outcome and self.is_stalled():
            self._outcome = "left"
            self._stream.run_on()
        elif not self._ended:
            self._outcome = self._outcome or "aborted"
            # also after a failure: if Redis was unreachable, the request may still run
            await self._stream.abort(
                "the client left" if self._outcome == "aborted" else self._outcome
            )
        self._metrics.observe_request_end(
            self._outcome,
            time.monotonic() - self._started,
            self.audio_s,
            num_frames=self._frontend.num_answer_audio_tokens(self.num_samples),
            continuous=self._continuity.ok,
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield text and audio in order of arrival, no empty pieces.

        Raises: FleetError if the request fails.
        """
        try:
            async for chunk in self._stream:
                self._metrics.edge_chunks.labels(edge=chunk.edge).inc()
                self._num_prompt = chunk.figures.get(PROMPT_TOKENS, self._num_prompt)
                for piece in self._pieces_of(chunk):
                    yield piece
        except FleetError as error:
            self._outcome = error.code
            raise
        # an incomplete character stays incomplete, and the beginning of a stop string is ordinary
        # text
        rest = self._trimmer.add(self._detokenizer.finish()) + self._trimmer.finish()
        for piece in self._read_calls(rest, is_whole=True):
            yield piece
        self._pcm += self._silence.finish()
        for piece in self._audio_pieces(final=True):
            yield piece
        self._num_cached = min(await self._read_num_cached(self.spec), self._num_prompt)
        await self._note_gaps(self.spec.id, self._gaps.gaps)
        self._ended, self._outcome = True, self.finish_reason
        self._metrics.cached_tokens.inc(self._num_cached)
        self._metrics.prompt_tokens.inc(self._num_prompt)
        self._metrics.answer_tokens.inc(self._num_text_tokens)
        self._on_complete(self._text_ids)

    @property
    def _num_text_tokens(self) -> int:
        return len(self._text_ids)

    @property
    def num_trimmed(self) -> int:
        """Number of samples of leading silence that were removed from the audio."""
        return self._silence.num_trimmed

    @property
    def word_ends(self) -> list[WordEnd] | None:
        """Ends of the answer's words in the text and in the audio, as far as the audio has arrived;
        None if the voice does not report the times of its words.
        """
        return self._words.ends(self.num_trimmed)

    @property
    def tells_logprobs(self) -> bool:
        """True if the request asks for the log probabilities of the answer's tokens."""
        return self._logprobs is not None

    @property
    def finish_reason(self) -> str:
        """`length` if max_tokens ended the text; `tool_calls` if it calls functions, otherwise
        `stop`: after an end token, a stop token or a stop string.
        """
        cut = self._num_text_tokens >= self._main.max_tokens
        ended = self._trimmer.stopped or (cut and self._text_ids[-1] in self._last_ids)
        if cut and not ended:
            return "length"
        return "tool_calls" if self._calls.num_calls else "stop"

    @property
    def audio_s(self) -> float:
        rate_hz = self._frontend.sample_rate_hz
        return self.num_samples / rate_hz if rate_hz else 0.0

    def usage(self) -> Usage:
        prompt = self._num_prompt
        prompt_audio = self._frontend.num_prompt_audio_tokens(self.spec)
        text, audio = (
            self._num_text_tokens,
            self._frontend.num_answer_audio_tokens(self.num_samples),
        )
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=text + audio,
            total_tokens=prompt + text + audio,
            prompt_tokens_details=PromptDetails(
                audio_tokens=prompt_audio,
                text_tokens=prompt - prompt_audio,
                cached_tokens=self._num_cached,
            ),
            completion_tokens_details=CompletionDetails(audio_tokens=audio, text_tokens=text),
        )

    def _pieces_of(self, chunk: Chunk) -> list[Piece]:
        if chunk.edge == self._edges.text:
            return self._text_pieces(chunk)
        if chunk.edge == self._edges.heard:
            return self._heard.add(chunk)
        if chunk.edge == self._edges.audio:
            samples, now = _array(chunk, "pcm", "<i2"), time.monotonic()
            self._words.add(chunk)
            self.num_samples += len(samples)
            if len(samples):
                self._gaps.add(chunk.produced_us, len(samples))
                self.first_audio_at = now if self.first_audio_at is None else self.first_audio_at
            if pcm := self._silence.feed(samples.tobytes()):
                self._num_sent += len(pcm) // BYTES_PER_SAMPLE
                self._continuity.add(self._num_sent / self._frontend.sample_rate_hz, now)
                self._pcm += pcm
            return self._audio_pieces(final=False)
        return []

    def _text_pieces(self, chunk: Chunk) -> list[Piece]:
        ids = [int(token) for token in _array(chunk, "ids", "<i4")]
        num_unchecked = max(
            0, max(len(self.spec.given), self._main.min_tokens) - self._num_text_tokens
        )
        self._text_ids += ids
        # as in the stage, stop strings end the text only in generated tokens, and only after
        # `min_tokens`
        if self._logprobs is not None:
            text = self._decode_one_by_one(self._logprobs, chunk, ids, num_unchecked)
        else:
            unchecked, checked = (
                self._decode(ids[:num_unchecked]),
                self._decode(ids[num_unchecked:]),
            )
            text = unchecked + self._trimmer.add(checked)
        if not text:
            return []
        self._observe_first("text")
        return self._read_calls(text)

    def _read_calls(self, text: str, *, is_whole: bool = False) -> list[Piece]:
        pieces = self._calls.add(text, is_whole=is_whole)
        return [self._text_piece(each) if isinstance(each, str) else each for each in pieces]

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text that the next tokens add to the answer. Stop tokens add no text."""
        hidden = self._main.stop_token_ids
        return self._detokenizer.add([id for id in ids if id not in hidden] if hidden else ids)

    def _decode_one_by_one(
        self, logprobs: AnswerLogprobs, chunk: Chunk, ids: Sequence[int], num_unchecked: int
    ) -> str:
        """Return the text of a chunk's tokens up to a stop string; note where each token begins."""
        text = ""
        for number, (token, told) in enumerate(
            zip(ids, logprobs.told(chunk, len(ids)), strict=True)
        ):
            added = self._decode([token])
            logprobs.put(token, None if token in self._last_ids else told, len(added))
            text += added if number < num_unchecked else self._trimmer.add(added)
        return text

    def _text_piece(self, text: str) -> TextPiece:
        taken = self._logprobs.take(len(text)) if self._logprobs is not None else ()
        return TextPiece(text, taken)

    def _audio_pieces(self, *, final: bool) -> list[Piece]:
        end = len(self._pcm) if final else len(self._pcm) - len(self._pcm) % GROUP_BYTES
        if end:
            self._observe_first("audio")
        pieces: list[Piece] = [
            AudioPiece(bytes(self._pcm[start : min(start + MAX_PIECE_BYTES, end)]))
            for start in range(0, end, MAX_PIECE_BYTES)
        ]
        del self._pcm[:end]
        return pieces

    def _observe_first(self, medium: str) -> None:
        if medium not in self._media_seen:
            self._media_seen.add(medium)
            self._metrics.observe_first_output(medium, time.monotonic() - self._started)


class HeardText:
    """The transcripts of a prompt's clips as pieces of text, without surrounding blanks. The pieces
    of two clips are separated by a space at the beginning of the second.
    """

    def __init__(self, num_clips: int) -> None:
        self._transcripts = Transcripts(num_clips)
        self._clip: int | None = None
        self._at_start = True
        self._blank = ""
        """Blanks before the next word, if there is one."""

    def add(self, chunk: Chunk) -> list[Piece]:
        """Add a chunk of the transcript; return the text that is new."""
        added = self._transcripts.add(_transcript_arrays(chunk))
        texts = [(clip, self._add_text(clip, text)) for clip, text in added]
        pieces: list[Piece] = [HeardPiece(text, clip) for clip, text in texts if text]
        reports = tuple(decode_reports(_array(chunk, "report", "u1").tobytes()))
        if chunk.final or reports:
            pieces.append(HeardPiece("", self._clip or 0, is_last=chunk.final, reports=reports))
        return pieces

    def _add_text(self, clip: int, text: str) -> str:
        if clip != self._clip:
            self._blank = " " if self._clip is not None and not self._at_start else self._blank
            self._clip, self._at_start = clip, True
        word = text.strip()
        if not word:
            self._blank += "" if self._at_start else text
            return ""
        before = "" if self._at_start else text[: len(text) - len(text.lstrip())]
        new = self._blank + before + word
        self._blank, self._at_start = text[len(text.rstrip()) :], False
        return new


def transcripts_of(chunks: Iterable[Chunk], num_clips: int) -> list[str]:
    """Return the transcript of each audio clip of a prompt. `chunks`: all chunks of the client edge
    that carries transcripts.
    """
    transcripts = Transcripts(num_clips)
    for chunk in chunks:
        transcripts.add(_transcript_arrays(chunk))
    return transcripts.texts()


def _transcript_arrays(chunk: Chunk) -> dict[str, np.ndarray]:
    dtypes = {"clip": "<i4", "sizes": "<i4", "text": "u1"}
    return {
        name: _array(chunk, name, dtype) for name, dtype in dtypes.items() if name in chunk.tensors
    }


def _array(chunk: Chunk, name: str, dtype: str) -> np.ndarray:
    """Return the inline tensor `name` of a chunk as a flat array; empty for a final chunk without
    data.
    """
    tensor = chunk.tensors.get(name)
    return np.frombuffer(
        tensor.data if tensor is not None and tensor.data is not None else b"", dtype
    )
