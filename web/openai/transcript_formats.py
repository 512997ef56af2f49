"""Response formats of a transcription: `json`, `text`, `verbose_json`, `srt` and `vtt`. Knows no
request and no recogniser.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from fleet.processing.languages import language_name
from fleet.processing.timed_text import Segment, TimedWord, WindowReport
from web.http.json_response import json_response
from web.schema.audio import TranscriptionForm

UNKNOWN_LANGUAGE = "unknown"


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class TranscriptionTokenUsage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tokens"
):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="duration"):
    seconds: float


TranscriptionUsage = TranscriptionTokenUsage | DurationUsage
"""Usage of a transcription: tokens of a model that answers with the transcript, otherwise the
duration of the audio.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A complete transcript. `reports`: segments and words with their times; None if
    the model gives none.

    Units: `seconds` is the duration of the recording.
    """

    text: str
    seconds: float
    usage: TranscriptionUsage
    reports: Sequence[WindowReport] | None = field(default=None)

    @property
    def segments(self) -> list[Segment]:
        return [one for report in self.reports or () for one in report.segments]

    @property
    def words(self) -> list[TimedWord]:
        return [one for report in self.reports or () for one in report.words]

    @property
    def language(self) -> str:
        """Code of the recognised language; "" if the model does not report a language."""
        return next((one.language for one in self.reports or () if one.language), "")


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    usage: TranscriptionUsage


class TranscriptionSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a `verbose_json` transcript.

    A model without times has one segment, which covers the whole clip. The `tokens`, `avg_logprob`
    and `no_speech_prob` of this segment are not measured, but constants with which clients that
    filter by these values keep the segment.
    Units: seconds. Source: openai 3.54, `TranscriptionSegment`.
    """

    id: int = 0
    seek: int = 0
    start: float = 0.0
    end: float
    text: str
    tokens: list[int] = []
    temperature: float
    avg_logprob: float = 0.0
    compression_ratio: float
    no_speech_prob: float = 0.0


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """Response in the format `verbose_json`. `language`: English name of the language that was
    recognised; without one, the language that the client sent, or a placeholder for an unknown
    language.
    Units: seconds. Source: openai 3.54, `TranscriptionVerbose`.
    """

    task: Literal["transcribe"] = "transcribe"
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: list[TimedWord] | UnsetType = UNSET
    usage: DurationUsage


def response_of(
    form: TranscriptionForm, transcript: Transcript, headers: dict[str, str]
) -> Response:
    """Return the response in the format that the form asks for."""
    match form.response_format:
        case "json":
            body = Transcription(text=transcript.text, usage=transcript.usage)
            return json_response(body, headers=headers)
        case "verbose_json":
            return json_response(_verbose(form, transcript), headers=headers)
        case "text":
            return Response(transcript.text, headers=headers, media_type="text/plain")
        case "srt":
            return Response(srt_of(transcript), headers=headers, media_type="text/plain")
        case "vtt":
            return Response(vtt_of(transcript), headers=headers, media_type="text/vtt")


def _verbose(form: TranscriptionForm, transcript: Transcript) -> VerboseTranscription:
    wanted = form.timestamp_granularities or {"segment"}
    return VerboseTranscription(
        language=language_name(transcript.language) or form.language or UNKNOWN_LANGUAGE,
        duration=transcript.seconds,
        text=transcript.text,
        segments=_segments(form, transcript) if "segment" in wanted else UNSET,
        words=transcript.words if "word" in wanted else UNSET,
        usage=DurationUsage(seconds=transcript.seconds),
    )


def _segments(form: TranscriptionForm, transcript: Transcript) -> list[TranscriptionSegment]:
    if transcript.reports is not None:
        return [
            TranscriptionSegment(id=number, **msgspec.structs.asdict(one))
            for number, one in enumerate(transcript.segments)
        ]
    raw = transcript.text.encode()
    segment = TranscriptionSegment(
        end=transcript.seconds,
        text=transcript.text,
        temperature=form.temperature or 0.0,
        compression_ratio=round(len(raw) / len(zlib.compress(raw)), 3),
    )
    return [segment] if transcript.text else []


def srt_of(transcript: Transcript) -> str:
    """Return the segments as SubRip subtitles."""
    cues = enumerate(_cues(transcript, ",", lambda text: text), 1)
    return "".join(f"{number}\n{cue}\n\n" for number, cue in cues)


def vtt_of(transcript: Transcript) -> str:
    """Return the segments as WebVTT subtitles, in whose text `&`, `<` and `>` are escaped."""
    cues = _cues(transcript, ".", _escaped)
    return "WEBVTT\n\n" + "".join(f"{cue}\n\n" for cue in cues)


def _cues(transcript: Transcript, point: str, written: Callable[[str], str]) -> list[str]:
    return [
        f"{_clock(one.start, point)} --> {_clock(one.end, point)}\n"
        f"{written(' '.join(one.text.split()))}"
        for one in transcript.segments
    ]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, point: str) -> str:
    """Return a time as `HH:MM:SS` and milliseconds after `point`."""
    whole, ms = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{point}{ms:03}"
