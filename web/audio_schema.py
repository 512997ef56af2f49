"""What clients send to the audio routes, checked. Knows no stage and no limit of the deployment."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from web.encoder import FileFormat
from web.errors import UnsupportedValue
from web.schema import Body, Seed, StageFields, Temperature, Voice, bad_input
from web.unserved import refuse_content

UNSERVED_FORMATS = ("srt", "vtt", "verbose_json", "diarized_json")


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
    fleet: dict[str, StageFields] | None = None

    @property
    def file_format(self) -> FileFormat:
        return self.response_format or "mp3"

    def ignored(self) -> list[str]:
        """Names of given fields that change nothing: the model hears no instructions about its voice."""
        known = {"instructions"} if self.instructions is not None else set[str]()
        return sorted(known | {name for name, value in (self.model_extra or {}).items() if value is not None})


class TranscriptionForm(Body):
    """The fields of POST /v1/audio/transcriptions beside its file. A form's values are texts."""

    model_config = ConfigDict(strict=False, extra="allow", allow_inf_nan=False, frozen=True)

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text"] = "json"
    temperature: Temperature | None = None
    stream: bool = False

    def ignored(self) -> list[str]:
        """Names of given fields that change nothing: the model hears which language it is, and takes no hints."""
        known = {name for name in ("language", "prompt") if getattr(self, name) is not None}
        return sorted(known | set(self.model_extra or {}))


def parse_speech(body: bytes) -> SpeechBody:
    """Raises: BadInput, UnsupportedValue naming the field."""
    try:
        speech = SpeechBody.model_validate_json(body)
    except ValidationError as error:
        raise bad_input(error) from error
    refuse_content(speech)
    return speech


def parse_transcription(fields: dict[str, str]) -> TranscriptionForm:
    """Raises: BadInput, UnsupportedValue naming the field."""
    kind = fields.get("response_format")
    if kind in UNSERVED_FORMATS:
        raise UnsupportedValue(
            f"response_format: {kind} needs the time of each word, which this model does not tell; use json or text",
            param="response_format",
        )
    try:
        form = TranscriptionForm.model_validate(fields)
    except ValidationError as error:
        raise bad_input(error) from error
    refuse_content(form)
    return form
