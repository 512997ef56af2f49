"""Default settings of a session, and the settings that the model cannot serve. Knows no session and no socket."""

import msgspec

from fleet.core.errors import BadInput, UnsupportedValue
from fleet.processing import TextPart
from web.gateway.gateway import Gateway
from web.realtime.protocol.settings import VOICE_FIELD, Settings


def default_settings(gateway: Gateway) -> Settings:
    settings = Settings(model=gateway.model)
    if not gateway.speaks:
        return msgspec.structs.replace(settings, output_modalities=("text",))
    return _with_voice(settings, gateway.frontend.voice(None))


def drop_unserved(gateway: Gateway, before: Settings, settings: Settings) -> tuple[Settings, list[BadInput]]:
    """Restore each field that the model cannot serve to its value before, and list the refusals. An empty voice becomes the
    default one.
    """
    refused: list[BadInput] = []
    try:
        check_speaks(gateway, "session.output_modalities", spoken="audio" in settings.output_modalities)
    except BadInput as error:
        refused.append(error)
        settings = msgspec.structs.replace(settings, output_modalities=before.output_modalities)
    try:
        gateway.frontend.check_text(TextPart(text=settings.instructions, where="session.instructions"))
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
    return settings, refused


def check_speaks(gateway: Gateway, where: str, *, spoken: bool) -> None:
    """Raises: UnsupportedValue."""
    if spoken and not gateway.speaks:
        raise UnsupportedValue(f'{where}: this model does not speak; use ["text"]', param=where)


def _with_voice(settings: Settings, voice: str) -> Settings:
    output = msgspec.structs.replace(settings.audio.output, voice=voice)
    return msgspec.structs.replace(settings, audio=msgspec.structs.replace(settings.audio, output=output))
