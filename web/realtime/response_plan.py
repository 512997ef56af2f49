"""Parameters of a response, as the session and the client set them, and the times of its turn."""

from dataclasses import dataclass, replace

from fleet.core.errors import UnsupportedValue
from web.realtime.audio.formats import AudioFormat, PcmFormat
from web.realtime.context import SessionContext
from web.realtime.protocol.capabilities import check_speaks
from web.realtime.protocol.client_events import ResponsePatch
from web.realtime.protocol.settings import (
    OUTPUT_FORMAT,
    RESPONSE_BETA,
    SAME_IN_BETA,
    SERVED_FORMAT,
    Settings,
    beta_refusal,
    output_format,
    voice_name,
)
from web.realtime.session_tools import ToolSettings, tools_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """Parameters of a response. `form` is the format in which the client gets its audio.
    `skip_samples` and `skip_chars` are the part of the generation that an earlier response has
    sent, if this response continues it. `instructions` replace the session's instructions unless
    None. `own_input` is True if the response answers the input of its own request instead of the
    conversation. `ignored` lists fields of the request that have no effect. `tools`: functions that
    the response may call.
    """

    spoken: bool
    in_conversation: bool
    conversation_id: str
    max_output_tokens: int | str = "inf"
    voice: str = ""
    form: AudioFormat = PcmFormat()
    speed: float = 1.0
    instructions: str | None = None
    own_input: bool = False
    metadata: dict[str, str] | None = None
    skip_samples: int = 0
    skip_chars: int = 0
    ignored: tuple[str, ...] = ()
    tools: ToolSettings = ToolSettings()


@dataclass(slots=True, kw_only=True)
class TurnTimestamps:
    """Times of a turn and its response, for their latency. Units: seconds of the session's clock;
    None if unknown or not reached.

    `voiced_end` is the time at which the last voiced sample of the user's turn arrived,
    `voiced_end_ms` its position in the session's input. `decided` is the time at which the turn was
    found to be over, `first_sent` the time of the first output, and `first_voiced` the time at
    which a client that plays without delay plays the first voiced sample.
    """

    voiced_end: float | None = None
    voiced_end_ms: int | None = None
    decided: float
    first_sent: float | None = None
    first_voiced: float | None = None


def default_plan(context: SessionContext, settings: Settings) -> ResponsePlan:
    """Return the parameters of a response for which the client asks nothing in particular."""
    return ResponsePlan(
        spoken="audio" in settings.output_modalities,
        in_conversation=True,
        conversation_id=context.conversation_id,
        max_output_tokens=settings.max_output_tokens,
        voice=settings.audio.output.voice,
        form=settings.audio.output.format or PcmFormat(),
        speed=settings.audio.output.speed,
        tools=tools_of(context.gateway.call_format, settings, None),
    )


def requested_plan(
    context: SessionContext, settings: Settings, patch: ResponsePatch
) -> ResponsePlan:
    """Return the parameters of the response that a `response.create` requests.

    Raises: BadInput naming the field.
    """
    call_format = context.gateway.call_format
    ignored = ("response.tools",) if patch.tools and not call_format else ()
    in_conversation = patch.conversation != "none"
    plan = replace(
        default_plan(context, settings),
        in_conversation=in_conversation,
        metadata=patch.metadata,
        ignored=ignored,
        instructions=patch.instructions,
        own_input=patch.input is not None,
        tools=tools_of(call_format, settings, patch),
    )
    if patch.output_modalities is not None:
        plan = replace(plan, spoken="audio" in patch.output_modalities)
    if patch.max_output_tokens is not None:
        plan = replace(plan, max_output_tokens=patch.max_output_tokens)
    output = patch.audio.output if patch.audio is not None else None
    has_format = settings.audio.output.format is not None
    if output is not None and output.format is not None:
        form = output_format(output.format, "response.audio.output.format")
        plan, has_format = replace(plan, form=form), True
    if plan.spoken and not has_format:
        raise no_output_format()
    if output is not None and output.voice is not None:
        plan = replace(plan, voice=voice_name(output.voice))
        context.gateway.frontend.voice(plan.voice or None, "response.audio.output.voice")
    check_speaks(context.gateway, "response.output_modalities", spoken=plan.spoken)
    return plan


def check_dialect(patch: ResponsePatch) -> None:
    """Refuse fields of the beta protocol (before GA), except for the audio format that is sent
    anyway.

    Raises: UnsupportedValue.
    """
    for name, ga_name in RESPONSE_BETA.items():
        value = getattr(patch, name)
        if value is not None and (name, value) != ("output_audio_format", SAME_IN_BETA):
            raise beta_refusal("response", name, ga_name)


def no_output_format() -> UnsupportedValue:
    message = (
        f"{OUTPUT_FORMAT}: no audio is sent while it is refused; set it to "
        f"{SERVED_FORMAT}, or ask for text"
    )
    return UnsupportedValue(message, param=OUTPUT_FORMAT)
