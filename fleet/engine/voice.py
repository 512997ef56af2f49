"""The loop of a voice: text in, speech out, clause by clause.

A step speaks one clause of one request; requests take turns. Knows no model and no language: a
`Speaker` divides text into clauses and speaks them.
"""

import codecs
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, EngineError, FleetError, failure_of
from fleet.core.ids import RequestId, Walk
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest, EngineStats
from fleet.engine.unread import UnreadPieces

log = logging.getLogger(__name__)
TEXT, WAVE, WORD_ENDS, WORDS = "text", "wave", "word_ends", "words"
_BEFORE_ANY_INPUT = Walk("")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenClause:
    """Speech of one clause, which may be silent. `words`: the words of its text as written, which,
    joined, are its text. `word_ends`: for each word, number of samples of the clause at its end;
    the numbers never decrease.
    """

    wave: NDArray[np.int16]
    words: Sequence[str]
    word_ends: Sequence[int]


class Narration(Protocol):
    """Text of one request, being spoken."""

    def feed(self, text: str, *, final: bool) -> None:
        """Add text. `final`: it is the last."""
        ...

    @property
    def num_clauses(self) -> int:
        """Number of clauses that can be spoken without further text."""
        ...

    def speak(self) -> SpokenClause:
        """Speak the next clause; there must be one."""
        ...


class Speaker(Protocol):
    def open(self, params: Mapping[str, str], seed: int) -> Narration:
        """Return the narration of a new request. Invariants: what it says depends on the arguments
        and the text alone, and not on how the text arrives. Raises: BadInput for invalid `params`.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _VoiceStream:
    """State of a request. `known`: first samples of the answer, which an earlier owner has sent.
    `num_samples`: samples returned so far. `num_waiting`: bytes of text fed and not yet spoken.
    `words`, `word_ends`: words spoken since the last output.
    """

    request_id: RequestId
    narration: Narration
    known: NDArray[np.int16]
    decoder: codecs.IncrementalDecoder
    num_samples: int = 0
    num_waiting: int = 0
    words: list[str] = field(default_factory=list[str])
    word_ends: list[int] = field(default_factory=list[int])
    unread: UnreadPieces = field(default_factory=UnreadPieces)
    walk: Walk = _BEFORE_ANY_INPUT
    ended: bool = False
    paused: bool = False
    error: FleetError | None = None

    def is_spoken(self) -> bool:
        """Return True if only the end of the request is left."""
        return self.error is not None or (self.ended and not self.narration.num_clauses)

    def can_step(self) -> bool:
        return not self.paused and (self.is_spoken() or self.narration.num_clauses > 0)

    def read(self, arrays: Arrays, *, final: bool) -> None:
        """Add a piece of text. Raises: EngineError if it is not UTF-8."""
        data = arrays.get(TEXT, np.zeros(0, np.uint8)).astype(np.uint8, copy=False).tobytes()
        self.unread.add(len(data))
        self.num_waiting += len(data)
        try:
            text = self.decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise EngineError(f"text: not UTF-8 ({error})", param=TEXT) from error
        self.narration.feed(text, final=final)

    def say(self) -> NDArray[np.int16]:
        """Speak the next clause and note its words; return its samples."""
        clause = self.narration.speak()
        begin = self.num_samples
        self.words += clause.words
        self.word_ends += [begin + end for end in clause.word_ends]
        self.num_waiting -= sum(len(word.encode()) for word in clause.words)
        self.num_samples += len(clause.wave)
        known = self.known[begin : self.num_samples]
        return np.concatenate((known, clause.wave[len(known) :])) if len(known) else clause.wave

    def take_words(self) -> Arrays:
        words = "".join(word.replace("\0", " ") + "\0" for word in self.words)
        ends = np.array(self.word_ends, np.int32)
        self.words, self.word_ends = [], []
        return {WORD_ENDS: ends, WORDS: np.frombuffer(words.encode(), np.uint8)}


class VoiceEngine(Engine):
    """Engine that speaks text. Input arrays: `text` uint8, UTF-8, cut anywhere. Output arrays:
    `wave` int16 [samples]; `word_ends` int32 [words]: for each word that ends in this output, the
    position in the answer of the sample after it; `words` uint8: the UTF-8 of these words as
    written, white space included, each ended by a zero byte; a zero byte within is a space.

    A request's history is the `wave` of its first samples. The engine speaks its clauses again,
    since it must know their lengths, and returns the samples of the history in their place.
    """

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        # Least recently served first.
        self._streams: dict[RequestId, _VoiceStream] = {}

    def submit(self, request: EngineRequest) -> None:
        """Add a request. Raises: BadInput if a request with this id is in the loop already, or its
        parameters are invalid.
        """
        if request.request_id in self._streams:
            raise BadInput(f"request {request.request_id} was submitted twice")
        self._streams[request.request_id] = _VoiceStream(
            request_id=request.request_id,
            narration=self._speaker.open(request.params, request.sampling.seed),
            known=request.history.get(WAVE, np.zeros(0, np.int16)),
            decoder=codecs.getincrementaldecoder("utf-8")(),
        )

    def feed(self, request_id: RequestId, piece: EngineInput) -> int:
        stream = self._streams.get(request_id)
        if stream is None:
            return 0
        assert not stream.ended, "input after the final one"
        stream.walk, stream.ended = piece.walk, piece.final
        try:
            stream.read(piece.arrays, final=piece.final)
        except EngineError as error:
            stream.error = error
        return 0

    def num_unread(self, request_id: RequestId) -> int:
        stream = self._streams.get(request_id)
        if stream is None or not stream.narration.num_clauses:
            return 0
        return stream.unread.count(stream.num_waiting)

    def pause(self, request_id: RequestId, *, paused: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.paused = paused

    def is_ready(self) -> bool:
        return any(stream.can_step() for stream in self._streams.values())

    def step(self) -> Sequence[EngineOutput]:
        """Speak the next clause of the request that has waited longest, and end the requests that
        are spoken.
        """
        able = [stream for stream in self._streams.values() if stream.can_step()]
        outputs = [self._end(stream) for stream in able if stream.is_spoken()]
        for stream in able:
            if stream.request_id in self._streams:
                return outputs + self._speak(stream)
        return outputs

    def finish(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def abort(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)

    def check(self) -> None:
        """Do nothing: a voice runs on the CPU, which does not fail for good."""

    def stats(self) -> EngineStats:
        ready = sum(stream.can_step() for stream in self._streams.values())
        return EngineStats(running=len(self._streams), ready=ready)

    def _speak(self, stream: _VoiceStream) -> list[EngineOutput]:
        """Speak the next clause that is not silent, if any."""
        del self._streams[stream.request_id]
        wave = np.zeros(0, np.int16)
        try:
            while not len(wave) and stream.narration.num_clauses:
                wave = stream.say()
        except (FleetError, RuntimeError, ValueError, MemoryError) as error:
            log.exception("a clause of request %s could not be spoken", stream.request_id)
            stream.error = failure_of("speaking a clause failed", error)
            return [_last_output(stream)]
        if stream.is_spoken():
            return [_last_output(stream, wave)]
        self._streams[stream.request_id] = stream
        if not len(wave):
            return []
        return [
            EngineOutput(
                request_id=stream.request_id,
                walk=stream.walk,
                arrays={WAVE: wave, **stream.take_words()},
            )
        ]

    def _end(self, stream: _VoiceStream) -> EngineOutput:
        del self._streams[stream.request_id]
        return _last_output(stream)


def _last_output(stream: _VoiceStream, wave: NDArray[np.int16] | None = None) -> EngineOutput:
    """Return the last output: the error, or the last samples and words, if there are any."""
    arrays: Arrays = {}
    if stream.error is None and (stream.words or (wave is not None and len(wave))):
        arrays = {WAVE: np.zeros(0, np.int16) if wave is None else wave, **stream.take_words()}
    return EngineOutput(
        request_id=stream.request_id,
        walk=stream.walk,
        arrays=arrays,
        final=stream.error is None,
        error=stream.error,
    )
