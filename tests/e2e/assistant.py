"""A spoken assistant of published weights on a real fleet: Whisper base, SmolLM2 and hibari.

    python -m tests.e2e.assistant FOLDER

draws the Voice page during a conversation with it, as the README shows it (`assistant.png`). Its
weights are in the folders `whisper_base` and `smollm2` of FOLDER, and built if they are missing.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import soundfile
import soxr
from playwright.sync_api import expect

from fleet.lab.client.client import ApiClient, SpeechCall
from tests.e2e.talking import VoiceFleet, microphone, talking_fleet
from tests.oracle import smollm2, whisper_base
from tests.support import REPO
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, wait_js
from tests.web.voice.probe import Pcm

QUESTION, ANSWER = "What is the capital of France?", "Paris"
STORY = "Tell me a long story about a dragon and a castle."
"""A request whose answer outlasts the interruption."""
WIDTH, HEIGHT = 1200, 800
PATIENCE_S = 120.0
START_S = 480.0
"""Limit of the start, which reads 0.8 GB of weights and measures the precisions of the language
model.
"""


def build_weights(folder: Path) -> tuple[str, ...]:
    """Build the weights that are missing in `folder`; return the settings that name them."""
    asr, lm = folder / "whisper_base", folder / "smollm2"
    if not (asr / "preprocessor_config.json").exists():
        whisper_base.build(asr)
    smollm2.build_once(lm)
    return (
        f"stages.asr.checkpoint={asr}",
        f"stages.lm.checkpoint={lm}",
        # its first word is nearly a tie, which the precision that is fastest here may turn
        "stages.lm.extra.precision=float32",
        # its chat template writes no tools
        "web.tool_format=hermes",
    )


@contextmanager
def assistant_fleet(folder: Path, weights: tuple[str, ...]) -> Iterator[VoiceFleet]:
    file = ("--config", str(REPO / "configs" / "voice.yaml"))
    with talking_fleet(folder, *weights, options=file, start_s=START_S) as fleet:
        yield fleet


def spoken_question(api: ApiClient, text: str) -> Pcm:
    """Return a question in the fleet's own voice, at the microphone's rate."""
    wav = api.speech(SpeechCall(model=api.model(), input=text))
    samples, rate_hz = soundfile.read(BytesIO(wav), dtype="float32")
    resampled = soxr.resample(samples, rate_hz, MIC_RATE_HZ)
    return (np.clip(resampled, -1, 1) * 32767).astype(np.int16)


def draw(path: Path, browsers: Browsers, fleet: VoiceFleet) -> None:
    """Write a picture of a conversation: a spoken question with its answer, and a typed one."""
    question = spoken_question(fleet.api, QUESTION)
    size = {"width": WIDTH, "height": HEIGHT}
    with microphone(browsers, fleet, question, viewport=size) as page:
        page.locator("#talk-button").click()
        expect(page.locator(".latency:visible")).to_have_count(1)
        ended = "fleetVoice.conversation.current.done && !fleetVoice.player.playing"
        wait_js(page, ended, PATIENCE_S)
        ask(page, STORY)
        wait_js(page, "fleetVoice.conversation.current.played > 4 * 24000", PATIENCE_S)
        page.screenshot(path=str(path))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = build_weights(folder)
    with (
        tempfile.TemporaryDirectory() as scratch,
        assistant_fleet(Path(scratch), weights) as fleet,
        Browsers.started(Path(scratch)) as browsers,
    ):
        draw(folder / "assistant.png", browsers, fleet)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
