"""Default settings of a session, and the check of settings against the abilities of the model.
Knows no session and no socket.
"""

import msgspec

from fleet.core.errors import BadInput, UnsupportedValue
from fleet.processing import TextPart
from web.gateway.gateway import Gateway
from web.realtime.protocol.settings import (
    SPEED_FIELD,
    VOICE_FIELD,
    AudioInput,
    SessionPatch,
    Settings,
)
from web.realtime.session_tools import drop_unserved_tools
from web.schema.fields.audio import HINTS

NO_AUDIO = AudioInput(format=None, turn_detection=None)
"""Input settings of a session with a model that takes text only."""
_INPUT = "session.audio.input"


def default_settings(gateway: Gateway) -> Settings:
    settings = Settings(model=gateway.model)
    if not gateway.hears:
        settings = _with_input(settings, NO_AUDIO)
    if not gateway.speaks:
        return msgspec.structs.replace(settings, output_modalities=("text",))
    return _with_voice(settings, gateway.frontend.voice(None))


def drop_unserved(
    gateway: Gateway, before: Settings, settings: Settings, patch: SessionPatch
) -> tuple[Settings, list[BadInput]]:
    """Check `settings`, the result of applying `patch` to `before`, against the abilities of the
    model. Returns the settings with each unserved field as it was in `before`, and a refusal for
    each such field. An empty voice becomes the default voice.
    """
    refused: list[BadInput] = []
    try:
        gateway.check_model(patch.model or gateway.model, "session.model")
    except BadInput as error:
        refused.append(error)
    settings, unheard = _drop_unheard(gateway, before, settings, patch)
    settings, uncalled = drop_unserved_tools(gateway.call_format, before, settings, patch)
    refused += [*unheard, *uncalled]
    try:
        check_speaks(
            gateway, "session.output_modalities", spoken="audio" in settings.output_modalities
        )
    except BadInput as error:
        refused.append(error)
        settings = msgspec.structs.replace(settings, output_modalities=before.output_modalities)
    try:
        gateway.frontend.check_text(
            TextPart(text=settings.instructions, where="session.instructions")
        )
    except BadInput as error:
        refused.append(error)
        settings = msgspec.structs.replace(settings, instructions=before.instructions)
    try:
        gateway.frontend.voice(settings.audio.output.voice or None, VOICE_FIELD)
    except BadInput as error:
        refused.append(error)
        settings = _with_voice(settings, before.audio.output.voice)
    if not settings.audio.output.voice and gateway.speaks:
        settings = _with_voice(settings, gateway.frontend.voice(None))
    if settings.audio.output.speed != 1 and not gateway.speaks_texts:
        message = f"{SPEED_FIELD}: this model's voice has one speed; use 1.0"
        refused.append(UnsupportedValue(message, param=SPEED_FIELD))
        settings = _with_output(settings, speed=before.audio.output.speed)
    return settings, refused


def _drop_unheard(
    gateway: Gateway, before: Settings, settings: Settings, patch: SessionPatch
) -> tuple[Settings, list[BadInput]]:
    """Check the fields of the audio input, as `drop_unserved` does for all fields."""
    given = patch.audio.input if patch.audio is not None else None
    if not gateway.hears:
        names = ("format", "transcription", "turn_detection")
        unheard = [
            takes_text_only(f"{_INPUT}.{name}")
            for name in names
            if getattr(given, name, None) is not None
        ]
        return _with_input(settings, NO_AUDIO), [*unheard]
    transcription = settings.audio.input.transcription
    if transcription is None:
        return settings, []
    refused: list[BadInput] = []
    former = before.audio.input.transcription
    try:
        gateway.check_model(transcription.model or gateway.model, f"{_INPUT}.transcription.model")
    except BadInput as error:
        refused.append(error)
        transcription = msgspec.structs.replace(
            transcription, model=former.model if former is not None else None
        )
    try:
        gateway.frontend.transcription_prompt(
            transcription.language or None, f"{_INPUT}.transcription.language"
        )
    except BadInput as error:
        refused.append(error)
        transcription = msgspec.structs.replace(
            transcription, language=former.language if former is not None else None
        )
    if transcription.prompt and gateway.edges.heard is None:
        where = f"{_INPUT}.transcription.prompt"
        refused.append(UnsupportedValue(f"{where}: {HINTS}", param=where))
        transcription = msgspec.structs.replace(
            transcription, prompt=former.prompt if former is not None else None
        )
    return _with_input(
        settings, msgspec.structs.replace(settings.audio.input, transcription=transcription)
    ), refused


def takes_text_only(where: str) -> UnsupportedValue:
    """Return the refusal of an audio field by a model that takes text only; `where` names the
    field.
    """
    return UnsupportedValue(
        f"{where}: this model takes text only; send items with input_text", param=where
    )


def check_speaks(gateway: Gateway, where: str, *, spoken: bool) -> None:
    """Check that the model can speak if a `spoken` response is requested. Raises: UnsupportedValue
    naming the field `where`.
    """
    if spoken and not gateway.speaks:
        raise UnsupportedValue(f'{where}: this model does not speak; use ["text"]', param=where)


def _with_input(settings: Settings, changed: AudioInput) -> Settings:
    return msgspec.structs.replace(
        settings, audio=msgspec.structs.replace(settings.audio, input=changed)
    )


def _with_voice(settings: Settings, voice: str) -> Settings:
    return _with_output(settings, voice=voice)


def _with_output(settings: Settings, **changes: object) -> Settings:
    output = msgspec.structs.replace(settings.audio.output, **changes)
    return msgspec.structs.replace(
        settings, audio=msgspec.structs.replace(settings.audio, output=output)
    )
