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

from fleet.core.errors import EngineError, FleetError, failure_of
from fleet.core.ids import RequestId
from fleet.engine.base import Arrays, EngineOutput, EngineRequest
from fleet.engine.turns import RequestStream, TurnsEngine
from fleet.engine.unread import UnreadPieces

log = logging.getLogger(__name__)
TEXT, WAVE, WORD_ENDS, WORDS = "text", "wave", "word_ends", "words"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenClause:
    """Speech of one clause, which may be silent. `words`: the words of the clause as written, white
    space included; joined, they are the clause's text. `word_ends`: number of samples of the clause
    at the end of each word; the numbers never decrease.
    """

    wave: NDArray[np.int16]
    words: Sequence[str]
    word_ends: Sequence[int]


class Narration(Protocol):
    """Text of one request, being spoken."""

    def feed(self, text: str, *, final: bool) -> None:
        """Add text. `final`: True for the last text of the request."""
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
        """Return the narration of a new request. Invariants: the speech depends on the arguments
        and the text alone, and not on how the text arrives. Raises: BadInput for invalid `params`.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _VoiceStream(RequestStream):
    """State of a request. `known`: first samples of the answer, which an earlier owner has sent.
    `num_samples`: samples returned so far. `num_waiting`: bytes of text fed and not yet spoken.
    `words`, `word_ends`: words spoken since the last output.
    """

    narration: Narration
    known: NDArray[np.int16]
    decoder: codecs.IncrementalDecoder
    num_samples: int = 0
    num_waiting: int = 0
    words: list[str] = field(default_factory=list[str])
    word_ends: list[int] = field(default_factory=list[int])
    unread: UnreadPieces = field(default_factory=UnreadPieces)

    def is_spoken(self) -> bool:
        """Return True if only the end of the request is left."""
        return self.error is not None or (self.ended and not self.narration.num_clauses)

    def read(self, arrays: Arrays) -> None:
        """Add a piece of text. Raises: EngineError if it is not UTF-8."""
        data = arrays.get(TEXT, np.zeros(0, np.uint8)).astype(np.uint8, copy=False).tobytes()
        self.unread.add(len(data))
        self.num_waiting += len(data)
        try:
            text = self.decoder.decode(data, self.ended)
        except UnicodeDecodeError as error:
            raise EngineError(f"text: not UTF-8 ({error})", param=TEXT) from error
        self.narration.feed(text, final=self.ended)

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


class VoiceEngine(TurnsEngine[_VoiceStream]):
    """Engine that speaks text. Input arrays: `text` uint8, UTF-8, cut anywhere. Output arrays:
    `wave` int16 [samples]; `word_ends` int32 [words]: for each word that ends in this output, the
    number of samples of the answer up to the word's end; `words` uint8: the UTF-8 of these words as
    written, white space included, each ended by a zero byte; zero bytes of the text become spaces.

    A request's history is the `wave` of its first samples. The engine speaks the clauses of the
    history again to learn their lengths, and returns the samples of the history in place of the new
    ones.
    """

    def __init__(self, speaker: Speaker) -> None:
        super().__init__()
        self._speaker = speaker

    def _open(self, request: EngineRequest) -> _VoiceStream:
        return _VoiceStream(
            request_id=request.request_id,
            narration=self._speaker.open(request.params, request.sampling.seed),
            known=request.history.get(WAVE, np.zeros(0, np.int16)),
            decoder=codecs.getincrementaldecoder("utf-8")(),
        )

    def _read(self, stream: _VoiceStream, arrays: Arrays) -> None:
        stream.read(arrays)

    def _has_work(self, stream: _VoiceStream) -> bool:
        return stream.is_spoken() or stream.narration.num_clauses > 0

    def num_unread(self, request_id: RequestId) -> int:
        stream = self._requests.get(request_id)
        if stream is None or not stream.narration.num_clauses:
            return 0
        return stream.unread.count(stream.num_waiting)

    def step(self) -> Sequence[EngineOutput]:
        """Speak the next clause of the request that has waited longest, and end the requests that
        are spoken.
        """
        able = self._able()
        outputs = [self._end(stream) for stream in able if stream.is_spoken()]
        for stream in able:
            if stream.request_id in self._requests:
                return outputs + self._speak(stream)
        return outputs

    def check(self) -> None:
        """Do nothing: a voice runs on the CPU, which does not fail for good."""

    def _speak(self, stream: _VoiceStream) -> list[EngineOutput]:
        """Speak the next clause that is not silent, if any."""
        wave = np.zeros(0, np.int16)
        try:
            while not len(wave) and stream.narration.num_clauses:
                wave = stream.say()
        except (FleetError, RuntimeError, ValueError, MemoryError) as error:
            log.exception("a clause of request %s could not be spoken", stream.request_id)
            stream.error = failure_of("speaking a clause failed", error)
        if stream.error is None and len(wave):
            arrays = {WAVE: wave, **stream.take_words()}
            return [self._serve(stream, arrays, final=stream.is_spoken())]
        if stream.is_spoken():
            return [self._end(stream)]
        self._requests[stream.request_id] = self._requests.pop(stream.request_id)
        return []

    def _end(self, stream: _VoiceStream) -> EngineOutput:
        """Return the last output, with the words since the last sound, if any."""
        if stream.error is not None or not stream.words:
            return super()._end(stream)
        return self._serve(stream, {WAVE: np.zeros(0, np.int16), **stream.take_words()}, final=True)
