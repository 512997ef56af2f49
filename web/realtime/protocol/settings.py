"""Settings of a session, the patch with which a client changes them, and how the two are merged.

The settings are stored in the form of the `session` object on the wire. Knows no voice of the model
and no socket.
"""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fleet.core.errors import BadInput, UnsupportedValue
from fleet.processing import RecognitionOptions
from web.realtime.audio.formats import (
    G711_FORMATS,
    OUTPUT_RATE_HZ,
    AudioFormat,
    PcmFormat,
)
from web.realtime.audio.turn_detector import TurnRules
from web.realtime.audio.turn_end import WAITS
from web.schema.audio import MAX_PROMPT_CHARS
from web.schema.unserved import EMPTY, UnservedValue

MIN_INPUT_RATE_HZ, MAX_INPUT_RATE_HZ = 8_000, 48_000
RECOGNIZE_MS = 96
"""Milliseconds of silence after which a turn under `semantic_vad` is recognised, if the graph has a
recogniser, so that its words are known when the shortest wait is over.
"""
MAX_INSTRUCTIONS = 32_768
VOICE_FIELD, SPEED_FIELD = "session.audio.output.voice", "session.audio.output.speed"
INPUT_FORMAT, OUTPUT_FORMAT = "session.audio.input.format", "session.audio.output.format"
SERVED_FORMAT = '{"type": "audio/pcm", "rate": 24000}'
"""The default audio format, as error messages show it."""


SessionType = Literal["realtime", "transcription"]
SessionObject = Literal["realtime.session", "realtime.transcription_session"]


class TranscriptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class ServerVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="server_vad"):
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="semantic_vad"):
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = ServerVad | SemanticVad


class AudioInput(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the user's audio. `format` is null while the requested format is refused, since
    audio of one format must not be read as another. All fields are null for a model that takes text
    only.
    """

    format: AudioFormat | None = PcmFormat()
    transcription: TranscriptionSettings | None = None
    noise_reduction: None = None
    turn_detection: TurnDetection | None = ServerVad()


class AudioOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the spoken response. `format` is null while the requested format is refused,
    since the client would play audio of another format as noise.
    """

    format: AudioFormat | None = PcmFormat()
    voice: str = ""
    speed: float = 1.0


class SessionAudio(msgspec.Struct, frozen=True, kw_only=True):
    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class Settings(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="realtime"):
    """Settings of a session: the `session` object on the wire, except for a transcription session,
    which has another `object`; see `transcription_session`. The server sets `id`, `model` and
    `warnings`, the client the other fields. `store`, an extension, is False if nothing that was
    said may be kept once the session has ended. `warnings`, an extension that is omitted while
    empty, is about fields that were ignored although the client may count on them.
    """

    object: SessionObject = "realtime.session"
    id: str = ""
    model: str = ""
    output_modalities: tuple[Literal["audio", "text"], ...] = ("audio",)
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool | msgspec.UnsetType = msgspec.UNSET
    store: bool | msgspec.UnsetType = msgspec.UNSET
    max_output_tokens: int | Literal["inf"] = "inf"
    truncation: Literal["auto", "disabled"] = "auto"
    tracing: None = None
    prompt: None = None
    include: tuple[str, ...] | None = None
    expires_at: int = 0
    audio: SessionAudio = SessionAudio()
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def type(self) -> SessionType:
        return "realtime" if self.object == "realtime.session" else "transcription"

    @property
    def detection(self) -> TurnDetection | None:
        return self.audio.input.turn_detection

    @property
    def store_option(self) -> bool | None:
        """Field `store` of the session's requests: False if nothing of the requests may be kept,
        otherwise None.
        """
        return False if self.store is False else None

    @property
    def hearing(self) -> RecognitionOptions:
        """Return the options with which the user's audio is recognised."""
        wanted = self.audio.input.transcription or TranscriptionSettings()
        return RecognitionOptions(language=wanted.language or None, prompt=wanted.prompt or "")

    def rules(
        self, speculate_ms: int, longest_ms: int, *, recognizes: bool = False
    ) -> TurnRules | None:
        """Return the parameters of turn detection; None if the client commits its turns.
        `speculate_ms` and `longest_ms` are the deployment's values of these parameters.
        `recognizes`: the words of a turn become known while it is under way.
        """
        match self.detection:
            case ServerVad() as vad:
                return TurnRules(
                    threshold=vad.threshold,
                    prefix_ms=vad.prefix_padding_ms,
                    silence_ms=vad.silence_duration_ms,
                    speculate_ms=speculate_ms,
                    longest_ms=longest_ms,
                )
            case SemanticVad() as semantic:
                waits = WAITS[semantic.eagerness]
                return TurnRules(
                    silence_ms=waits.unknown_ms,
                    speculate_ms=min(speculate_ms, RECOGNIZE_MS) if recognizes else speculate_ms,
                    longest_ms=longest_ms,
                    waits=waits,
                )
            case None:
                return None


class Patch(BaseModel):
    """Base of all objects that clients send: known fields are validated strictly, unknown fields
    are kept for the check against the route's field table.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class FormatPatch(Patch):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Annotated[int, Field(ge=MIN_INPUT_RATE_HZ, le=MAX_INPUT_RATE_HZ)] | None = None


class TranscriptionPatch(Patch):
    model: Annotated[str, Field(max_length=256)] | None = None
    language: Annotated[str, Field(max_length=64)] | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None


class ServerVadPatch(Patch):
    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] | None = None
    silence_duration_ms: Annotated[int, Field(ge=32, le=10_000)] | None = None
    idle_timeout_ms: Annotated[int, Field(ge=1_000, le=120_000)] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class SemanticVadPatch(Patch):
    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class VoiceId(Patch):
    id: Annotated[str, Field(max_length=128)]


class AudioInputPatch(Patch):
    format: FormatPatch | None = None
    transcription: TranscriptionPatch | None = None
    turn_detection: (
        Annotated[ServerVadPatch | SemanticVadPatch, Field(discriminator="type")] | None
    ) = None


class AudioOutputPatch(Patch):
    format: FormatPatch | None = None
    voice: Annotated[str, Field(max_length=128)] | VoiceId | None = None
    speed: Annotated[float, Field(ge=0.25, le=1.5)] | None = None


class AudioPatch(Patch):
    input: AudioInputPatch | None = None
    output: AudioOutputPatch | None = None


Modalities = Annotated[
    list[Literal["audio", "text"]], Field(min_length=1, max_length=2, fail_fast=True)
]


def _truncation(value: object) -> object:
    if isinstance(value, dict):
        raise UnservedValue("a retention ratio is not served; use auto or disabled")
    return value


OutputTokens = Annotated[int, Field(ge=1, le=1_000_000)] | Literal["inf"]


class SessionPatch(Patch):
    """The `session` object of a `session.update`. An absent field leaves the setting unchanged; a
    null field turns it off or restores its default.
    """

    type: SessionType | None = None
    model: Annotated[str, Field(max_length=256)] | None = None
    output_modalities: Modalities | None = None
    instructions: Annotated[str, Field(max_length=MAX_INSTRUCTIONS)] | None = None
    tools: list[object] | None = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, BeforeValidator(_truncation)] = None
    max_output_tokens: OutputTokens | None = None
    audio: AudioPatch | None = None
    modalities: object = None
    input_audio_format: object = None
    output_audio_format: object = None
    turn_detection: object = None


BETA = {
    "modalities": "output_modalities",
    "input_audio_format": "audio.input.format",
    "output_audio_format": "audio.output.format",
    "turn_detection": "audio.input.turn_detection",
}
"""Names of session fields in the beta protocol (before GA) -> their GA names. Such fields are
refused.
"""
RESPONSE_BETA = {
    "modalities": "output_modalities",
    "output_audio_format": "audio.output.format",
    "voice": "audio.output.voice",
    "max_response_output_tokens": "max_output_tokens",
}
"""Names of response fields in the beta protocol (before GA) -> their GA names."""
SAME_IN_BETA = "pcm16"
"""Name of the default audio format in the beta protocol (before GA); audio is sent in this format
anyway.
"""


def beta_refusal(whole: str, name: str, ga_name: str) -> UnsupportedValue:
    """Return the refusal of the beta protocol's field `name` in the object `whole`; the error names
    the GA field.
    """
    return UnsupportedValue(
        f"{whole}.{name}: a field of the beta dialect; use {whole}.{ga_name}",
        param=f"{whole}.{name}",
    )


def merge_settings(settings: Settings, patch: SessionPatch) -> tuple[Settings, list[BadInput]]:
    """Merge a patch into the settings. Returns the merged settings, and a refusal for each field
    that is not served and stays unchanged.
    """
    refused: list[BadInput] = []
    for name, ga_name in BETA.items():
        # A null turn_detection asks for push to talk; any other null is a field without a value.
        if getattr(patch, name) is not None or (
            name == "turn_detection" and name in patch.model_fields_set
        ):
            refused.append(beta_refusal("session", name, ga_name))
    given = patch.model_fields_set
    changes: dict[str, object] = {}
    if "output_modalities" in given:
        # Audio includes its transcript, so both mean audio; OpenAI's service does not accept both.
        changes["output_modalities"] = (
            ("audio",) if "audio" in (patch.output_modalities or ["audio"]) else ("text",)
        )
    if "instructions" in given:
        changes["instructions"] = patch.instructions or ""
    if "max_output_tokens" in given:
        changes["max_output_tokens"] = patch.max_output_tokens or "inf"
    if "tools" in given:
        changes["tools"] = tuple(patch.tools or ())
    if "tool_choice" in given:
        changes["tool_choice"] = "auto" if patch.tool_choice in EMPTY else patch.tool_choice
    if "parallel_tool_calls" in given:
        parallel = patch.parallel_tool_calls
        changes["parallel_tool_calls"] = msgspec.UNSET if parallel is None else parallel
    if "store" in given:
        changes["store"] = msgspec.UNSET if patch.store is None else patch.store
    if "truncation" in given:
        changes["truncation"] = patch.truncation or "auto"
    audio = settings.audio
    if patch.audio is not None and patch.audio.input is not None:
        audio = msgspec.structs.replace(
            audio, input=_input(audio.input, patch.audio.input, refused)
        )
    if patch.audio is not None and patch.audio.output is not None:
        audio = msgspec.structs.replace(
            audio, output=_output(audio.output, patch.audio.output, refused)
        )
    return msgspec.structs.replace(settings, audio=audio, **changes), refused


def _input(now: AudioInput, patch: AudioInputPatch, refused: list[BadInput]) -> AudioInput:
    given = patch.model_fields_set
    changes: dict[str, object] = {}
    if "format" in given:
        try:
            changes["format"] = audio_format(patch.format, INPUT_FORMAT)
        except BadInput as error:
            refused.append(error)
    if "transcription" in given:
        changes["transcription"] = _transcription(now.transcription, patch.transcription)
    if "turn_detection" in given:
        changes["turn_detection"] = _detection(now.turn_detection, patch.turn_detection)
    return msgspec.structs.replace(now, **changes)


def _transcription(
    now: TranscriptionSettings | None, patch: TranscriptionPatch | None
) -> TranscriptionSettings | None:
    if patch is None:
        return None
    given = patch.model_dump(include=set(TranscriptionPatch.model_fields), exclude_unset=True)
    return msgspec.structs.replace(now or TranscriptionSettings(), **given)


def _detection(
    now: TurnDetection | None, patch: ServerVadPatch | SemanticVadPatch | None
) -> TurnDetection | None:
    """Merge a patch into the settings of turn detection. A patch of another type is merged into the
    defaults of that type.
    """
    if patch is None:
        return None
    kind = ServerVad if isinstance(patch, ServerVadPatch) else SemanticVad
    base = now if isinstance(now, kind) else kind()
    fields = patch.model_dump(include=set(type(patch).model_fields) - {"type"}, exclude_unset=True)
    optional = {"idle_timeout_ms"}
    changes = {
        name: value for name, value in fields.items() if value is not None or name in optional
    }
    return msgspec.structs.replace(base, **changes)


def _output(now: AudioOutput, patch: AudioOutputPatch, refused: list[BadInput]) -> AudioOutput:
    given = patch.model_fields_set
    changes: dict[str, object] = {}
    if "format" in given:
        try:
            changes["format"] = output_format(patch.format, OUTPUT_FORMAT)
        except BadInput as error:
            refused.append(error)
    if "voice" in given:
        changes["voice"] = voice_name(patch.voice) if patch.voice is not None else ""
    if "speed" in given:
        changes["speed"] = 1.0 if patch.speed is None else patch.speed
    return msgspec.structs.replace(now, **changes)


def audio_format(given: FormatPatch | None, where: str) -> AudioFormat:
    """Return a requested format; the default format for None. Raises: UnsupportedValue for G.711 at
    another rate than its own, naming the field `where`.
    """
    if given is None:
        return PcmFormat()
    if (form := G711_FORMATS.get(given.type)) is None:
        return PcmFormat(rate=given.rate or OUTPUT_RATE_HZ)
    if given.rate not in (None, form.rate):
        message = f"{where}.rate: {given.rate} is not served; {given.type} has {form.rate} Hz"
        raise UnsupportedValue(message, param=f"{where}.rate")
    return form


def output_format(given: FormatPatch | None, where: str) -> AudioFormat:
    """Return a requested output format as `audio_format` does. Raises: UnsupportedValue naming the
    field `where`, also for PCM16 at another rate than `OUTPUT_RATE_HZ`.
    """
    form = audio_format(given, where)
    if isinstance(form, PcmFormat) and form.rate != OUTPUT_RATE_HZ:
        message = f"{where}.rate: {form.rate} is not served; audio is sent at {OUTPUT_RATE_HZ} Hz"
        raise UnsupportedValue(message, param=f"{where}.rate")
    return form


def voice_name(voice: str | VoiceId) -> str:
    return voice if isinstance(voice, str) else voice.id
