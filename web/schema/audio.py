"""Requests of the audio routes as types, and their validation. Knows no stage and no limit of the
deployment.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from fleet.core.errors import SHOWN_CHARS, UnsupportedValue
from web.schema.body import Body
from web.schema.chat import (
    AudioOptions,
    ChatOptions,
    Seed,
    StageSections,
    Temperature,
    Voice,
    bad_input,
    parse_json,
    voice_name,
)
from web.schema.fields.audio import HINTS, SPEECH, TRANSCRIPTION

FileFormat = Literal["wav", "pcm", "mp3", "flac", "opus", "aac"]
TIMED_FORMATS = ("srt", "vtt")
GRANULARITIES, PROMPT = "timestamp_granularities", "prompt"
MAX_PROMPT_CHARS = 8192


class SpeechFields(Body):
    """Fields of a speech, whole or streamed. `seed` and `fleet` have the same meaning as in a chat.
    With `word_timestamps` the events with audio have the times of its words.
    """

    voice: Voice | None = None
    response_format: FileFormat | None = None
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    word_timestamps: bool | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    fleet: StageSections | None = None

    def chat_options(self, model: str) -> ChatOptions:
        """Return the options of a request that speaks a text."""
        return ChatOptions(
            model=model,
            modalities=["audio"],
            audio=AudioOptions(voice=voice_name(self.voice)),
            temperature=self.temperature,
            seed=self.seed,
            fleet=self.fleet,
        )


class SpeechBody(SpeechFields):
    """Body of POST /v1/audio/speech."""

    model: str
    input: Annotated[str, Field(min_length=1)]
    stream_format: Literal["audio", "sse"] | None = None

    @property
    def file_format(self) -> FileFormat:
        return self.response_format or "mp3"


class TranscriptionForm(Body):
    """Text fields of the form of POST /v1/audio/transcriptions; the file is read separately.

    An empty `model` is the served model, since Open WebUI sends it if no model is chosen.
    `language` is validated by the frontend. `timestamp_granularities`: what
    `verbose_json` has times of.
    """

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False, frozen=True)

    model: str
    language: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Temperature | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    stream: bool = False
    timestamp_granularities: frozenset[Literal["word", "segment"]] = frozenset()

    @property
    def needs_times(self) -> bool:
        return self.response_format in ("verbose_json", *TIMED_FORMATS)


def parse_speech(body: bytes) -> SpeechBody:
    """Parse and validate the body of a speech request.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    speech = parse_json(SpeechBody, body)
    SPEECH.check(speech)
    if speech.word_timestamps and speech.stream_format != "sse":
        raise UnsupportedValue(
            "word_timestamps: the times of words are in the events of stream_format sse; set it, "
            "or leave this out",
            param="word_timestamps",
        )
    return speech


def parse_transcription(
    fields: Sequence[tuple[str, str]], *, has_times: bool = False
) -> TranscriptionForm:
    """Validate the text fields of a transcription form, given as (name, value) pairs; list fields
    may be repeated. `has_times`: the model recognises speech by itself: it gives the times of its
    words, and takes a prompt.

    Raises: BadInput, UnsupportedValue naming the field.
    """
    last = dict(fields)
    kind = last.get("response_format", "")
    granularities = {
        value.lower()
        for name, text in fields
        if _base(name) == GRANULARITIES
        for value in re.findall(r"\w+", text)
    }
    _check_format(last, kind, has_times=has_times)
    if kind == "verbose_json":
        _check_granularities(granularities, has_times=has_times)
    if last.get(PROMPT) and not has_times:
        raise UnsupportedValue(f"{PROMPT}: {HINTS}", param=PROMPT)
    TRANSCRIPTION.check(
        {
            _base(name): _json(value)
            for name, value in sorted(fields, key=lambda field: bool(field[1]))
            if _base(name) != PROMPT
        }
    )
    known = granularities & {"word", "segment"}
    try:
        return TranscriptionForm.model_validate({**last, **_language(fields), GRANULARITIES: known})
    except ValidationError as error:
        raise bad_input(error) from error


def _check_format(last: Mapping[str, str], kind: str, *, has_times: bool) -> None:
    """Raise UnsupportedValue for a format that the model, or a stream, does not have."""
    if kind == "diarized_json":
        cause = "needs the speakers, which this model does not give"
    elif kind in TIMED_FORMATS and not has_times:
        cause = "needs the time of each phrase, which this model does not give"
    elif kind in TIMED_FORMATS and _json(last.get("stream", "")) is True:
        cause = "is not streamed; send stream false"
    else:
        return
    raise UnsupportedValue(
        f"response_format: {kind} {cause}; use json, text or verbose_json", param="response_format"
    )


def _check_granularities(given: set[str], *, has_times: bool) -> None:
    served = {"segment", "word"} if has_times else {"segment"}
    if unserved := sorted(given - served):
        cause = "word needs the time of each word, which this model does not give"
        if unserved != ["word"]:
            cause = f"{unserved[0][:SHOWN_CHARS]} is not served"
        raise UnsupportedValue(
            f"{GRANULARITIES}: {cause}; use {' or '.join(sorted(served))}, or leave it out",
            param=GRANULARITIES,
        )


def ignored_of(form: TranscriptionForm) -> list[str]:
    """Return the names of the fields in a form that have no effect."""
    return [
        given.where
        for given in TRANSCRIPTION.ignored(
            {name: _json(value) for name, value in form.model_dump().items()}
        )
    ]


def _language(fields: Sequence[tuple[str, str]]) -> dict[str, str | None]:
    """Return the language of a form as a keyword argument, from the field `language` or the list
    `languages`. Raises: UnsupportedValue for several languages.
    """
    given = [
        value
        for name, value in fields
        if _base(name) in ("language", "languages") and value.strip()
    ]
    if len({value.strip().lower() for value in given}) > 1:
        raise UnsupportedValue(
            "languages: one language is served; send the one that is spoken", param="languages"
        )
    return {"language": given[0].strip() if given else None}


def _base(name: str) -> str:
    """Return the field name without list or object brackets: clients write list and object fields
    as `include[]` or `include[0]`.
    """
    return name.partition("[")[0] or name


def _json(value: object) -> object:
    """Return a form's value as JSON if it is JSON, such as `false` or `1.0`; otherwise
    unchanged.
    """
    text = (
        value.lower()
        if isinstance(value, str) and value.lower() in ("true", "false", "none", "null")
        else value
    )
    if text == "none" or not isinstance(text, str):
        return None if text == "none" else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
