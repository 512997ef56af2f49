"""Description of the served model: modalities, languages, formats, voices and limits.

Knows no model: the frontend and the deployment's limits say what it can do.
"""

from typing import get_args

from web.gateway.gateway import Gateway
from web.openai.audio_encoder import MEDIA_TYPES
from web.openai.chat import STREAMED_FORMATS
from web.schema.capabilities import AudioIntake, Capabilities, SpeechOutput
from web.schema.chat import AudioFormat, InputFormat

STRUCTURED_OUTPUT = True
"""True, since every stage that answers enforces the rule that a request sets for its answer."""


def capabilities_of(gateway: Gateway) -> Capabilities:
    limits = gateway.config.limits
    return Capabilities(
        input_modalities=["text", "audio"] if gateway.hears else ["text"],
        output_modalities=["text", "audio"] if gateway.speaks else ["text"],
        structured_output=STRUCTURED_OUTPUT,
        tools=bool(gateway.call_format),
        max_prompt_tokens=_max_prompt_tokens(gateway),
        max_answer_tokens=limits.max_answer_tokens,
        max_messages=limits.max_messages,
        hearing=_hearing(gateway) if gateway.hears else None,
        speech=_speech(gateway) if gateway.speaks else None,
    )


def context_tokens(gateway: Gateway) -> int:
    """Return the greatest number of tokens that a prompt and its answer may have together."""
    wanted = _max_prompt_tokens(gateway) + gateway.config.limits.max_answer_tokens
    return min(wanted, gateway.frontend.positions or wanted)


def _max_prompt_tokens(gateway: Gateway) -> int:
    wanted, positions = gateway.config.limits.max_prompt_tokens, gateway.frontend.positions
    return wanted if positions is None else min(wanted, positions - 1)


def _hearing(gateway: Gateway) -> AudioIntake:
    limits = gateway.config.limits
    longest_s = limits.max_transcription_s if gateway.edges.heard is not None else 0
    return AudioIntake(
        formats=list(get_args(InputFormat)),
        languages=gateway.frontend.languages(),
        max_audio_s=limits.max_audio_s,
        max_transcription_s=max(limits.max_audio_s, longest_s),
    )


def _speech(gateway: Gateway) -> SpeechOutput:
    return SpeechOutput(
        voices=gateway.frontend.voices(),
        formats=list(get_args(AudioFormat)),
        streamed_formats=list(STREAMED_FORMATS),
        file_formats=list(MEDIA_TYPES),
        sample_rate_hz=gateway.frontend.sample_rate_hz,
        max_chars=gateway.config.limits.max_speech_chars,
    )
