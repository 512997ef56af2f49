"""Requests of the audio routes as types, and their validation. Knows no stage and no limit of the
deployment.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from fleet.core.errors import UnsupportedValue
from web.schema.chat import Body, Seed, StageSections, Temperature, Voice, bad_input, parse_json
from web.schema.fields.audio import SPEECH, TRANSCRIPTION

FileFormat = Literal["wav", "pcm", "mp3", "flac", "opus", "aac"]
UNSERVED_FORMATS = {
    "srt": "needs the time of each phrase",
    "vtt": "needs the time of each phrase",
    "diarized_json": "needs the speakers",
}
GRANULARITIES = "timestamp_granularities"


class SpeechBody(Body):
    """Body of POST /v1/audio/speech. `seed` and `fleet` have the same meaning as in a chat."""

    model: str
    input: Annotated[str, Field(min_length=1)]
    voice: Voice | None = None
    response_format: FileFormat | None = None
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    fleet: StageSections | None = None

    @property
    def file_format(self) -> FileFormat:
        return self.response_format or "mp3"


class TranscriptionForm(Body):
    """Text fields of the form of POST /v1/audio/transcriptions; the file is read separately.

    An empty `model` is the served model, since Open WebUI sends it if no model is chosen.
    `language` is validated by the frontend.
    """

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False, frozen=True)

    model: str
    language: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Temperature | None = None
    stream: bool = False


def parse_speech(body: bytes) -> SpeechBody:
    """Parse and validate the body of a speech request.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    speech = parse_json(SpeechBody, body)
    SPEECH.check(speech)
    return speech


def parse_transcription(fields: Sequence[tuple[str, str]]) -> TranscriptionForm:
    """Validate the text fields of a transcription form, given as (name, value) pairs; list fields
    may be repeated.

    Raises: BadInput, UnsupportedValue naming the field.
    """
    last = dict(fields)
    kind = last.get("response_format", "")
    if kind in UNSERVED_FORMATS:
        message = (
            f"{kind} {UNSERVED_FORMATS[kind]}, which this model does not give; use json, "
            "text or verbose_json"
        )
        raise UnsupportedValue(f"response_format: {message}", param="response_format")
    has_words = any(
        _base(name) == GRANULARITIES and "word" in re.findall(r"\w+", value.lower())
        for name, value in fields
    )
    if kind == "verbose_json" and has_words:
        message = (
            "word needs the time of each word, which this model does not give; use "
            "segment, or leave it out"
        )
        raise UnsupportedValue(f"{GRANULARITIES}: {message}", param=GRANULARITIES)
    TRANSCRIPTION.check(
        {
            _base(name): _json(value)
            for name, value in sorted(fields, key=lambda field: bool(field[1]))
        }
    )
    try:
        return TranscriptionForm.model_validate({**last, **_language(fields)})
    except ValidationError as error:
        raise bad_input(error) from error


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
