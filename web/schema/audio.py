"""Requests of the audio routes and their validation. Knows no stage and no limit of the deployment."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from fleet.core.errors import UnsupportedValue
from web.schema.chat import Body, Seed, StageSections, Temperature, Voice, bad_input, parse_json
from web.schema.unserved import refuse_content

FileFormat = Literal["wav", "pcm", "mp3", "flac", "opus", "aac"]
UNSERVED_FORMATS = {
    "srt": "needs the time of each phrase", "vtt": "needs the time of each phrase", "diarized_json": "needs the speakers",
}  # fmt: skip
ONE_FILE = "one file is transcribed per request; send it as the field file"
_GRANULARITIES = re.compile(r"timestamp_granularities(?:\[\d*\])?")
"""Names of the field in a form: with brackets in OpenAI's clients, without them or with an index in others."""


class SpeechBody(Body):
    """POST /v1/audio/speech. `seed` and `fleet` are as in a chat."""

    model: str
    input: Annotated[str, Field(min_length=1)]
    voice: Voice | None = None
    instructions: str | None = None
    response_format: FileFormat | None = None
    speed: Annotated[float, Field(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    fleet: StageSections | None = None

    @property
    def file_format(self) -> FileFormat:
        return self.response_format or "mp3"

    def ignored(self) -> list[str]:
        """Names of the fields in this request that have no effect: the model accepts no instructions about its voice."""
        known = {"instructions"} if self.instructions is not None else set[str]()
        return sorted(known | {name for name, value in (self.model_extra or {}).items() if value is not None})


class TranscriptionForm(Body):
    """The fields of POST /v1/audio/transcriptions beside its file, as texts.

    An empty `model` is the served one: Open WebUI sends it if no model is chosen.
    """

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False, frozen=True)

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Temperature | None = None
    stream: bool = False

    def ignored(self) -> list[str]:
        """Names of the fields in this request that have no effect: the model detects the language and accepts no hints.

        `verbose_json` honours the granularity `segment` with its one segment.
        """
        verbose = self.response_format == "verbose_json"
        known = {name for name in ("language", "prompt") if getattr(self, name) is not None}
        return sorted(known | {name for name in self.model_extra or {} if not (verbose and _GRANULARITIES.fullmatch(name))})


def parse_speech(body: bytes) -> SpeechBody:
    """Raises: BadInput, InputTooLarge, UnsupportedValue naming the field."""
    speech = parse_json(SpeechBody, body)
    refuse_content(speech)
    return speech


def parse_transcription(fields: Sequence[tuple[str, str]]) -> TranscriptionForm:
    """Validate the form's fields, of which some may be repeated. Raises: BadInput, UnsupportedValue naming the field."""
    last = dict(fields)
    kind = last.get("response_format", "")
    if kind in UNSERVED_FORMATS:
        message = f"{kind} {UNSERVED_FORMATS[kind]}, which this model does not give; use json, text or verbose_json"
        raise UnsupportedValue(f"response_format: {message}", param="response_format")
    has_words = any(_GRANULARITIES.fullmatch(name) and "word" in re.findall(r"\w+", value.lower()) for name, value in fields)
    if kind == "verbose_json" and has_words:
        message = "word needs the time of each word, which this model does not give; use segment, or leave it out"
        raise UnsupportedValue(f"timestamp_granularities: {message}", param="timestamp_granularities")
    try:
        form = TranscriptionForm.model_validate(last)
    except ValidationError as error:
        raise bad_input(error) from error
    refuse_content(form, instead=ONE_FILE)
    return form
