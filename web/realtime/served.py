"""What of a session's settings this server can do: its defaults, and what its model refuses. Knows no session and no socket."""

import msgspec

from fleet.core.errors import BadInput
from fleet.processing import TextPart
from web.gateway import Gateway
from web.realtime.settings import VOICE_FIELD, Settings


def default_settings(gateway: Gateway) -> Settings:
    settings = Settings(model=gateway.model)
    if not gateway.speaks:
        return msgspec.structs.replace(settings, output_modalities=("text",))
    return _with_voice(gateway, settings)


def served(gateway: Gateway, settings: Settings) -> Settings:
    """With the default voice where none is named. Raises: BadInput naming the field."""
    check_speaks(gateway, "session.output_modalities", spoken="audio" in settings.output_modalities)
    gateway.frontend.check_text(TextPart(text=settings.instructions, where="session.instructions"))
    gateway.frontend.voice(settings.audio.output.voice or None, VOICE_FIELD)
    return settings if settings.audio.output.voice or not gateway.speaks else _with_voice(gateway, settings)


def check_speaks(gateway: Gateway, where: str, *, spoken: bool) -> None:
    """Raises: BadInput."""
    if spoken and not gateway.speaks:
        raise BadInput(f'{where}: this model does not speak; use ["text"]', param=where)


def _with_voice(gateway: Gateway, settings: Settings) -> Settings:
    output = msgspec.structs.replace(settings.audio.output, voice=gateway.frontend.voice(None))
    return msgspec.structs.replace(settings, audio=msgspec.structs.replace(settings.audio, output=output))
