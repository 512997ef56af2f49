"""Speech with the Thinker on vLLM, whole and split, compared with a fleet on torch alone: real
processes, through the REST API.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from tests.e2e.fleets import ProcessFleet, fleet_up

MAX_TOKENS, MAX_FRAMES = 24, 40
SETTINGS = (
    *("checkpoint=tiny", "device=cpu", "web.port=0"),
    # Greedy codes: a rounding of the rows changes no code, and with that no sample by more than its
    # own rounding.
    *("stages.talker.sampling.temperature=0", f"stages.talker.sampling.max_tokens={MAX_FRAMES}"),
)
ON_VLLM = ("stages.thinker.engine=vllm", "stages.thinker.vllm.kv_mib=64")
SPLIT = (*ON_VLLM, "stages.thinker.split={}")
ROUNDING = 1
"""Largest difference between two 16-bit samples that rounding explains."""
HOP, POSITION = 160, 1230
"""Number of audio samples per mel frame, and about per audio position."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str
    samples: NDArray[np.int16]

    def equals(self, other: "Spoken") -> bool:
        if self.text != other.text or len(self.samples) != len(other.samples):
            return False
        return (
            int(np.abs(self.samples.astype(int) - other.samples.astype(int)).max(initial=0))
            <= ROUNDING
        )


def clip(seed: int, length: int) -> Json:
    samples = (np.sin(np.arange(length) * 0.02 * (1 + seed)) * 0.3).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="PCM_16")
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"},
    }


def prompts() -> list[list[Json]]:
    """Return single turns: of text, of clips with every remainder of a position in mel frames, and
    of two clips with different lengths.
    """
    said = {"type": "text", "text": "What is this?"}
    turns: list[list[Json] | str] = [
        f"Say {number}. " + "word " * 9 * number for number in range(4)
    ]
    turns += [[clip(number, 16000 + number * HOP), said] for number in range(POSITION // HOP + 1)]
    turns += [[clip(1, 9001), clip(2, 41011), said]]
    return [[{"role": "user", "content": content}] for content in turns]


def speak(fleet: ProcessFleet, messages: Sequence[Mapping[str, Any]], **more: object) -> Spoken:
    body = {
        "model": fleet.get("/v1/models")["data"][0]["id"],
        "messages": messages,
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **more,
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.is_success, answer.text
    audio = answer.json()["choices"][0]["message"]["audio"]
    return Spoken(audio["transcript"], np.frombuffer(base64.b64decode(audio["data"]), "<i2"))


def hold_session(fleet: ProcessFleet) -> list[Spoken]:
    """Return the answers of three turns of a session, of which the first has a clip."""
    messages: list[Json] = [
        {"role": "user", "content": [clip(3, 30011), {"type": "text", "text": "Remember this."}]}
    ]
    spoken: list[Spoken] = []
    for turn in range(3):
        spoken.append(speak(fleet, messages, session="conversation"))
        messages += [
            {"role": "assistant", "content": spoken[-1].text},
            {"role": "user", "content": f"Then {turn}?"},
        ]
    return spoken


def answers_of(folder: Path, *settings: str) -> tuple[list[Spoken], list[Spoken], list[Spoken]]:
    """Return the answers of a fleet to the prompts: one at a time, all concurrently, and in a
    session.
    """
    with fleet_up(folder, *SETTINGS, *settings) as fleet, ThreadPoolExecutor(8) as pool:
        alone = [speak(fleet, messages) for messages in prompts()]
        together = list(pool.map(lambda messages: speak(fleet, messages), prompts()))
        return alone, together, hold_session(fleet)


@pytest.fixture(scope="module")
def on_torch(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[Spoken], list[Spoken], list[Spoken]]]:
    yield answers_of(tmp_path_factory.mktemp("torch"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [ON_VLLM, SPLIT], ids=["whole", "split"])
def test_speech_with_the_thinker_on_vllm_equals_that_of_torch(
    tmp_path: Path,
    on_torch: tuple[list[Spoken], list[Spoken], list[Spoken]],
    settings: Sequence[str],
) -> None:
    on_vllm = answers_of(tmp_path, *settings)
    for name, ours, theirs in zip(("alone", "together", "session"), on_vllm, on_torch, strict=True):
        differ = [
            number
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
            if not one.equals(other)
        ]
        assert not differ, f"{name}: answers {differ} of {len(ours)} differ"
    assert len({spoken.text for spoken in on_torch[0]}) > len(on_torch[0]) // 2, (
        "the answers depend on the prompts"
    )
