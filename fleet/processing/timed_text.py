"""Segments and words of a transcript with their times, as a recogniser's stage sends them to the
gateway. Knows no model and no response format.
"""

from collections.abc import Sequence

import msgspec

SENTENCE_ENDS = ".?!…。？！"
CLOSING = "\"'”’)]}»」』"
MAX_GAP_S = 1.0
"""Silence between two words that ends a segment."""


class TimedWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word as it is written, punctuation included. Units: seconds in the clip."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence, or the text between two pauses. `seek`: start of the window in which the segment
    was recognised, in hundredths of a second. `avg_logprob`, `compression_ratio` (size of the text
    divided by the size of the compressed text) and `no_speech_prob` describe that whole window.

    Units: seconds in the clip.
    """

    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WindowReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a recogniser reports about one window of audio. `language`: ISO code; "" if the model
    reports none.
    """

    language: str
    segments: list[Segment]
    words: list[TimedWord]


_decode = msgspec.json.Decoder(WindowReport).decode


def encode_report(report: WindowReport) -> bytes:
    """Return a report as one line."""
    return msgspec.json.encode(report) + b"\n"


def decode_reports(lines: bytes) -> list[WindowReport]:
    return [_decode(line) for line in lines.splitlines()]


def shifted(report: WindowReport, seconds: float) -> WindowReport:
    """Return a report with all times moved later by `seconds`, the start of the clip within the
    recording.
    """
    replace = msgspec.structs.replace

    def later(at: float) -> float:
        return round(at + seconds, 3)

    return WindowReport(
        language=report.language,
        segments=[
            replace(
                one,
                seek=one.seek + round(seconds * 100),
                start=later(one.start),
                end=later(one.end),
            )
            for one in report.segments
        ],
        words=[replace(one, start=later(one.start), end=later(one.end)) for one in report.words],
    )


def ends_segment(word: TimedWord, following: TimedWord) -> bool:
    """Return True if a segment ends between two words."""
    is_sentence = word.word.rstrip(CLOSING).endswith(tuple(SENTENCE_ENDS))
    return is_sentence or following.start - word.end >= MAX_GAP_S


def segment_ranges(words: Sequence[TimedWord]) -> list[range]:
    """Return the range of indices into `words` of each segment, in order."""
    cuts = [n for n in range(1, len(words)) if ends_segment(words[n - 1], words[n])]
    if not words:
        return []
    return [range(*pair) for pair in zip([0, *cuts], [*cuts, len(words)], strict=True)]
