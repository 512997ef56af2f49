"""The eight requests of every comparison with the oracle, and their expected answers by
`transformers`.
"""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import soundfile
from numpy.typing import NDArray

from fleet.config.schema import Limits
from fleet.core.ids import EdgeName, StageName, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.processing.base import AudioPart, ChatRequest, Message, TextPart
from fleet.processing.qwen3_omni import OmniFrontend
from tests.oracle.oracle import Oracle, OracleAnswer

RATE_HZ = 16000
TEXT, AUDIO, CODES = EdgeName("text"), EdgeName("audio"), EdgeName("codes")
THINKER, TALKER, CODE2WAV = StageName("thinker"), StageName("talker"), StageName("code2wav")

Samplings = Mapping[StageName, Sampling]
OF_GENERATE: Samplings = {
    THINKER: Sampling(),
    TALKER: Sampling(repetition_penalty=1.05, top_k=50),
    CODE2WAV: Sampling(),
}
"""Default sampling parameters of `generate()` in `transformers`, by stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request to compare with the oracle. `tokens` and `frames`: max_tokens of the Thinker and
    the Talker.
    """

    name: str
    messages: tuple[Message, ...]
    tokens: int = 24
    frames: int = 60
    voice: str = "ethan"


def user(text: str, *audio: AudioPart) -> Message:
    content = (
        (*audio, TextPart(text=text, where="messages"))
        if audio
        else TextPart(text=text, where="messages")
    )
    return Message(role="user", content=content)


def said(role: str, text: str) -> Message:
    return Message(role=role, content=TextPart(text=text, where="messages"))


def speech_like(seconds: float, seed: int) -> NDArray[np.float32]:
    """Return a voiced glide with noise: unlike speech, but every mel band changes."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    pitch_hz = 120 + 60 * np.sin(2 * np.pi * 1.3 * time_s + seed)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    wave = sum(np.sin(k * phase) / k for k in range(1, 12)) * (
        0.5 + 0.5 * np.sin(2 * np.pi * 3 * time_s)
    )
    return (0.1 * wave + 0.01 * rng.standard_normal(len(time_s))).astype(np.float32)


def wav_part(samples: NDArray[np.float32]) -> AudioPart:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE_HZ, format="WAV", subtype="FLOAT")
    return AudioPart(data=base64.b64encode(buffer.getvalue()).decode(), where="messages")


CASES: tuple[Case, ...] = (
    Case(name="text", messages=(user("What is the colour of the sky today?"),)),
    Case(name="audio", messages=(user("What do you hear?", wav_part(speech_like(2.0, 1))),)),
    Case(
        name="three turns",
        messages=(
            said("system", "You are terse."),
            user("Name a fruit."),
            said("assistant", "An apple."),
            user("And a colour.", wav_part(speech_like(0.9, 2))),
            said("assistant", "Green."),
            user("Put them together."),
        ),
        voice="chelsie",
    ),
    Case(
        name="over 300 frames",
        messages=(user("Tell me a long story about the sea and the wind."),),
        tokens=40,
        frames=312,
    ),
    Case(name="one token", messages=(user("Say nothing much."),), tokens=1),
    Case(
        name="other voice",
        messages=(user("What is the colour of the sky today?"),),
        voice="chelsie",
    ),
    Case(
        name="text outlasts speech",
        messages=(user("Count up from one, please."),),
        tokens=70,
        frames=30,
    ),
    Case(name="speech outlasts text", messages=(user("Seven words or so."),), tokens=5, frames=70),
)


def spec_of(
    case: Case,
    frontend: OmniFrontend,
    *,
    temperature: float | None = 0.0,
    seed: int = 0,
    sampling: Samplings = OF_GENERATE,
) -> tuple[RequestSpec, bytes | None]:
    """Return the request as a gateway creates it, and its audio bytes, if any.

    `temperature`: 0 for greedy sampling; with None, the temperature in `sampling` applies.
    """
    said: dict[str, float] = (
        {"seed": seed} if temperature is None else {"seed": seed, "temperature": temperature}
    )
    resolved = {
        THINKER: msgspec.structs.replace(sampling[THINKER], max_tokens=case.tokens, **said),
        TALKER: msgspec.structs.replace(sampling[TALKER], max_tokens=case.frames, **said),
        CODE2WAV: sampling[CODE2WAV],
    }
    chat = ChatRequest(
        id=new_request_id(),
        graph="qwen3_omni",
        messages=case.messages,
        outputs=(TEXT, AUDIO),
        sampling=resolved,
        spoken=True,
        voice=case.voice,
    )
    return frontend.prepare(chat)


def expected(oracle: Oracle, spec: RequestSpec, blob: bytes | None, case: Case) -> OracleAnswer:
    """Return the oracle's answer to the same prompt ids and audio samples."""
    samples = np.frombuffer(blob or b"", dtype=np.float32)
    clips = [
        samples[clip.offset_samples : clip.offset_samples + clip.num_samples] for clip in spec.audio
    ]
    return oracle.answer(
        list(spec.prompt_ids),
        clips,
        speaker=case.voice,
        thinker_max_new_tokens=case.tokens,
        talker_max_new_tokens=case.frames,
        thinker_repetition_penalty=spec.sampling[THINKER].repetition_penalty,
        talker_repetition_penalty=spec.sampling[TALKER].repetition_penalty,
    )


def make_frontend(checkpoint: Path) -> OmniFrontend:
    return OmniFrontend(checkpoint, Limits())


def pcm16(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """Convert a float wave to the samples that a client receives."""
    return np.round(np.clip(wave, -1, 1) * 32767).astype(np.int16)
