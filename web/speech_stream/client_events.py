"""Events of the client of WS /v1/audio/speech/stream as types, and their validation. Source:
vllm-omni. Knows no deployment.
"""

from collections.abc import Mapping
from typing import Literal, cast

from pydantic import ValidationError

from fleet.core.errors import BadInput, UnsupportedValue, quoted
from web.schema.audio import FileFormat, SpeechFields
from web.schema.body import Body
from web.schema.chat import bad_input, read_json
from web.schema.fields.audio import SPEECH_EVENTS


class SessionConfig(SpeechFields):
    """How the next utterances are spoken. With `stream_audio` the audio of a clause is sent in
    several frames, as it is generated.
    """

    type: Literal["session.config"]
    model: str | None = None
    stream_audio: bool | None = None

    @property
    def file_format(self) -> FileFormat:
        return self.response_format or "wav"


class InputTextEvent(Body):
    """Next piece of the utterance's text."""

    type: Literal["input.text"]
    text: str


class InputDone(Body):
    """End of the utterance."""

    type: Literal["input.done"]


class SessionClose(Body):
    """End of the session, once its utterances are spoken."""

    type: Literal["session.close"]


SpeechEvent = SessionConfig | InputTextEvent | InputDone | SessionClose
EVENTS: Mapping[str, type[SpeechEvent]] = {
    "session.config": SessionConfig,
    "input.text": InputTextEvent,
    "input.done": InputDone,
    "session.close": SessionClose,
}


def parse_event(frame: bytes) -> SpeechEvent:
    """Parse and validate one event.

    Raises: BadInput, InputTooLarge, UnsupportedValue naming the field.
    """
    value = read_json(frame)
    if not isinstance(value, dict):
        raise BadInput("an event is a JSON object with a type")
    fields = cast("dict[str, object]", value)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise BadInput(
            f"type: no event {quoted(str(kind))}; use one of {', '.join(EVENTS)}", param="type"
        )
    try:
        event = EVENTS[kind].model_validate(fields)
    except ValidationError as error:
        raise bad_input(error) from error
    SPEECH_EVENTS[kind].check(event)
    if isinstance(event, SessionConfig):
        _check_word_times(event)
    return event


def _check_word_times(config: SessionConfig) -> None:
    if config.word_timestamps and not (config.stream_audio and config.file_format == "pcm"):
        raise UnsupportedValue(
            "word_timestamps: the times of words come with streamed PCM; set stream_audio true and "
            "response_format pcm, or leave this out",
            param="word_timestamps",
        )
