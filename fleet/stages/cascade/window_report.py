"""Segments and words of one recognised window, from the details of its tokens."""

import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from fleet.engine.base import TOKEN, Arrays
from fleet.engine.recognizer import BEGINS, ENDS, LOGPROBS, NO_SPEECH, PLACE
from fleet.processing.timed_text import Segment, TimedWord, WindowReport, segment_ranges
from fleet.processing.whisper_words import Decode, text_parts, words_of

FRAMES_PER_S = 100


class WindowReader(msgspec.Struct, frozen=True, kw_only=True):
    """Reader of the windows of one request. `end`: first token id that is not text. `rate_hz`:
    sample rate in which positions in `arrays` are counted. `temperature`: sampling temperature that
    the reports state.
    """

    decode: Decode
    end: int
    rate_hz: int
    temperature: float

    def report(self, arrays: Arrays, language: str) -> WindowReport:
        """Return the segments and words of a window; none for a window without details."""
        if BEGINS not in arrays:
            return WindowReport(language=language, segments=[], words=[])
        tokens = arrays[TOKEN].tolist()
        begins_s, ends_s = arrays[BEGINS] / self.rate_hz, arrays[ENDS] / self.rate_hz
        segments: list[Segment] = []
        words: list[TimedWord] = []
        for first, part in text_parts(tokens, self.end):
            runs = words_of(part, self.decode, language)
            found = [
                TimedWord(
                    word=run.text.strip(),
                    start=round(float(begins_s[first + run.begin]), 3),
                    end=round(float(ends_s[first + run.begin]), 3),
                )
                for run in runs
            ]
            words += found
            for each in segment_ranges(found):
                begin, end = runs[each[0]].begin, runs[each[-1]].end
                segments.append(
                    Segment(
                        seek=int(arrays[PLACE][0]) * FRAMES_PER_S // self.rate_hz,
                        start=found[each[0]].start,
                        end=found[each[-1]].end,
                        text="".join(runs[n].text for n in each),
                        tokens=part[begin:end],
                        **self._figures(arrays, tokens),
                    )
                )
        return WindowReport(language=language, segments=segments, words=words)

    def _figures(self, arrays: Arrays, tokens: Sequence[int]) -> Mapping[str, float]:
        raw = self.decode([token for token in tokens if token < self.end]).encode()
        return {
            "temperature": self.temperature,
            "avg_logprob": round(float(np.nanmean(arrays[LOGPROBS])), 4),
            "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 3),
            "no_speech_prob": round(float(arrays[NO_SPEECH][0]), 4),
        }
