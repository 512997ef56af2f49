"""Words of a spoken text with their times, as clients receive them. Knows no request."""

from collections.abc import Sequence

import msgspec

from web.gateway.answer_words import WordEnd


class WordTime(msgspec.Struct, frozen=True, kw_only=True):
    """A word as it is written, and its time in the audio. A word begins where the word before it
    ends, so that a pause belongs to the next word. A word that is not spoken takes no time. Source:
    vllm-omni's `word_timestamps`.
    """

    word: str
    start_ms: int
    end_ms: int


class WordTimes:
    """Words of one spoken text, each returned once with its time. `offset_samples`: length of the
    audio that precedes the audio of this text, added to all times.
    """

    def __init__(self, text: str, rate_hz: int, offset_samples: int = 0) -> None:
        self._text = text
        self._rate_hz = rate_hz
        self._offset = offset_samples
        self._num_taken = self._num_chars = self._end = 0

    def take(self, ends: Sequence[WordEnd]) -> list[WordTime]:
        """Return the words that were not returned before. `ends`: the ends of all words so far."""
        taken: list[WordTime] = []
        for num_chars, end in ends[self._num_taken :]:
            if word := self._text[self._num_chars : num_chars].strip():
                taken.append(
                    WordTime(word=word, start_ms=self._ms(self._end), end_ms=self._ms(end))
                )
            self._num_chars, self._end = num_chars, end
        self._num_taken = len(ends)
        return taken

    def _ms(self, sample: int) -> int:
        return round((self._offset + sample) * 1000 / self._rate_hz)
