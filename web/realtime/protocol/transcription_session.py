"""Sessions of the type `transcription`: the user's speech becomes text, and no response begins.

Inside, they have the settings of a conversation, with the fields of responses at their defaults; a
client sees only its own fields. Source: openai 3.57 types. Knows no socket.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from fleet.core.errors import BadInput, UnsupportedValue
from web.realtime.protocol.settings import (
    AudioInput,
    AudioPatch,
    ServerVad,
    SessionObject,
    SessionPatch,
    Settings,
    TranscriptionSettings,
)
from web.schema.fields.table import is_neutral

TRANSCRIPTION: Final = "transcription"
OBJECT: SessionObject = "realtime.transcription_session"
EVENTS = frozenset(
    {
        "session.update",
        "input_audio_buffer.append",
        "input_audio_buffer.commit",
        "input_audio_buffer.clear",
        "conversation.item.retrieve",
        "conversation.item.delete",
    }
)
"""Events that the client of such a session may send."""
_OF_RESPONSES = (
    "output_modalities",
    "instructions",
    "tools",
    "tool_choice",
    "truncation",
    "max_output_tokens",
)
_CAUSE = "a transcription session has no responses"


class TranscriptionAudio(msgspec.Struct, frozen=True, kw_only=True):
    input: AudioInput


class TranscriptionSession(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=TRANSCRIPTION
):
    """The `session` object of a transcription session on the wire."""

    object: SessionObject = OBJECT
    id: str
    include: tuple[str, ...] | None
    expires_at: int
    audio: TranscriptionAudio


SessionBody = Settings | TranscriptionSession


def session_body(settings: Settings) -> SessionBody:
    """Return the `session` object that the client receives."""
    if settings.type != TRANSCRIPTION:
        return settings
    return TranscriptionSession(
        id=settings.id,
        include=settings.include,
        expires_at=settings.expires_at,
        audio=TranscriptionAudio(input=settings.audio.input),
    )


def only_transcribing(settings: Settings, heard: AudioInput) -> Settings:
    """Return the settings of a transcription session with the audio input `heard`: every turn is
    transcribed, and none is answered.
    """
    detection = heard.turn_detection
    if detection is not None:
        detection = replace(detection, create_response=False, interrupt_response=False)
    if isinstance(detection, ServerVad):
        detection = replace(detection, idle_timeout_ms=None)
    heard = replace(
        heard,
        turn_detection=detection,
        transcription=heard.transcription or TranscriptionSettings(),
    )
    return replace(settings, object=OBJECT, audio=replace(settings.audio, input=heard))


def refusals(patch: SessionPatch) -> Iterator[BadInput]:
    """Yield the refusal of each field of a patch that a transcription session does not have and
    that is not at its default.
    """
    for name in _OF_RESPONSES:
        value = getattr(patch, name)
        if not is_neutral(value) and value != getattr(Settings(), name):
            yield _refused(f"session.{name}")
    audio = patch.audio or AudioPatch()
    if audio.output is not None and not is_neutral(audio.output.model_dump(exclude_unset=True)):
        yield _refused("session.audio.output")
    detection = audio.input.turn_detection if audio.input is not None else None
    if getattr(detection, "idle_timeout_ms", None) is not None:
        yield _refused("session.audio.input.turn_detection.idle_timeout_ms")


def check_event(settings: Settings, kind: str) -> None:
    """Check that a client's event is one of the session's type. Raises: UnsupportedValue."""
    if settings.type == TRANSCRIPTION and kind not in EVENTS:
        raise UnsupportedValue(
            f"type: {kind} is for conversations; this session only transcribes", param="type"
        )


def _refused(where: str) -> UnsupportedValue:
    return UnsupportedValue(f"{where}: {_CAUSE}; remove it", param=where)
