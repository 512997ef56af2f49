"""An utterance of a speech socket: a text that is spoken while it grows, clause by clause. Knows no
socket.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Literal

import msgspec

from fleet.core.errors import FleetError
from fleet.core.ids import new_request_id
from fleet.processing.spoken.clauses import Clause
from fleet.processing.spoken.given_clause import place_of
from web.gateway.answer import AudioPiece
from web.gateway.gateway import Gateway
from web.gateway.speech_requests import SpeechRequests
from web.gateway.word_times import WordTime, WordTimes
from web.http.errors import ErrorBody, envelope_of
from web.speech_stream.clause_audio import AudioDone, AudioStart, TimedAudio, open_audio
from web.speech_stream.client_events import SessionConfig
from web.speech_stream.growing_text import GrowingText


class UtteranceDone(msgspec.Struct, frozen=True, kw_only=True):
    """The utterance is spoken; the session goes on. `total_sentences`: number of its clauses."""

    type: Literal["session.done"] = "session.done"
    utterance_index: int
    total_sentences: int


class SpeechError(msgspec.Struct, frozen=True, kw_only=True):
    """A failure. `message` repeats the message of `error` where vllm-omni's clients read it."""

    type: Literal["error"] = "error"
    message: str
    error: ErrorBody


ServerEvent = AudioStart | TimedAudio | AudioDone | UtteranceDone | SpeechError
Send = Callable[[ServerEvent | bytes], Awaitable[None]]
"""Function that sends an event, or a binary frame."""


def speech_error(error: FleetError) -> SpeechError:
    return SpeechError(message=error.message, error=envelope_of(error).error)


class GrowingUtterance:
    """A text that is spoken while it grows, by one request per clause.

    A single request that speaks the whole text has the same samples: there too the voice speaks
    each clause alone, and the clauses depend on the text alone.
    """

    def __init__(self, gateway: Gateway, config: SessionConfig, number: int) -> None:
        self.text = GrowingText()
        self._gateway = gateway
        self._config = config
        self._number = number
        self._rate_hz = gateway.frontend.sample_rate_hz
        self._num_clauses = 0
        self._has_sound = False

    async def speak(self, send: Send) -> None:
        """Speak the text until it ends. After a failure, of which the client is told, the rest of
        the text is read and not spoken.
        """
        failed = False
        async with AsyncExitStack() as answer:
            requests = SpeechRequests(
                self._gateway,
                self._config.chat_options(self._gateway.model),
                1.0 if self._config.speed is None else self._config.speed,
                answer,
                where="text",
            )
            async for clause in self.text.clauses():
                if not failed:
                    failed = not await self._speak_clause(clause, requests, send)
                    await answer.aclose()
        await send(UtteranceDone(utterance_index=self._number, total_sentences=self._num_clauses))

    async def _speak_clause(self, clause: Clause, requests: SpeechRequests, send: Send) -> bool:
        """Speak a clause; return False after a failure."""
        number, error = self._num_clauses, None
        self._num_clauses += 1
        start = AudioStart(
            utterance_index=self._number,
            sentence_index=number,
            sentence_text=clause.text,
            format=self._config.file_format,
            sample_rate=self._rate_hz,
        )
        audio = open_audio(send, self._config, self._rate_hz, self._number, number)
        await send(start)
        try:
            async for pcm, words in self._say(clause, requests):
                await audio.add(pcm, words)
            await audio.finish()
        except FleetError as failure:
            error = failure
            await send(speech_error(failure))
        done = AudioDone(
            utterance_index=self._number,
            sentence_index=number,
            total_bytes=audio.num_bytes,
            error=error is not None,
        )
        await send(done)
        return error is None

    async def _say(
        self, clause: Clause, requests: SpeechRequests
    ) -> AsyncIterator[tuple[bytes, list[WordTime]]]:
        """Yield the PCM16 of a clause, with the words that end in it. Raises: FleetError."""
        if clause.is_code or not clause.text.strip():
            return
        place = place_of(clause)
        if self._has_sound:
            active = await requests.submit_next(clause.text, clause=place)
        else:
            active = await requests.submit(clause.text, new_request_id(), clause=place)
        words = WordTimes(clause.text, self._rate_hz)
        async for piece in active.answer.pieces():
            if isinstance(piece, AudioPiece):
                self._has_sound = True
                yield piece.pcm, words.take(active.answer.word_ends or ())
        if rest := words.take(active.answer.word_ends or ()):
            yield b"", rest
