"""The Voice page's voice-to-voice latency against a recording of its microphone and its sound on
one clock.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from fleet.processing.voice_onset import VoicedSearch
from tests.web.conftest import Loaded, serving
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import QUESTION, speech
from tests.web.realtime.speech_samples import RATE_HZ as SPOKEN_HZ
from tests.web.voice import probe
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, js, visiting, wait_js

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

MAX_MEAN_MS = 50
"""Limit of the mean difference between the figure and the recording."""
GAP_S = 4.0
RECORD = """
async () => {
  const { player, mic } = fleetVoice;
  const sound = player.context.createMediaStreamDestination();
  player.node.connect(sound);
  window.recorder = new AudioContext({ sampleRate: 48000 });
  await probe(recorder, recorder.createMediaStreamSource(mic.stream), "room");
  await probe(recorder, recorder.createMediaStreamSource(sound.stream), "sound");
}
"""
FIGURES = """
[...fleetVoice.conversation.responses.byId.values()]
  .map(({ latency }) => latency && { totalMs: latency.totalMs, parts: latency.parts })
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A question and its answer in the recording. Units: samples of the recorder's context."""

    asked: int
    answered: int

    @property
    def ms(self) -> float:
        return 1000 * (self.answered - self.asked) / MIC_RATE_HZ


def voiced_from(pcm: probe.Pcm) -> int | None:
    search = VoicedSearch(MIC_RATE_HZ)
    search.feed(pcm.tobytes())
    return search.floor if search.found else None


def timeline(recorded: probe.RecordedAudio, first: int, last: int) -> probe.Pcm:
    """Return the samples of the context's frames in [first, last), with zeros where none were
    recorded.
    """
    whole = np.zeros(last - first, np.int16)
    for frame, block in zip(recorded.frames, recorded.pcm.reshape(-1, recorded.block), strict=True):
        at = int(frame) - first
        if 0 <= at <= len(whole) - len(block):
            whole[at : at + len(block)] = block
    return whole


def recorded_turns(page: Page) -> list[RecordedTurn]:
    room, sound = probe.read_recording(page, "room"), probe.read_recording(page, "sound")
    first = int(min(room.frames[0], sound.frames[0]))
    last = int(max(room.frames[-1], sound.frames[-1])) + room.block
    heard, played = timeline(room, first, last), timeline(sound, first, last)
    turns: list[RecordedTurn] = []
    at = 0
    while (begun := voiced_from(heard[at:])) is not None:
        asked_from = at + begun
        answered = voiced_from(played[asked_from:])
        if answered is None:
            break
        silent = voiced_from(heard[asked_from : asked_from + answered][::-1])
        assert silent is not None
        turns.append(
            RecordedTurn(asked=asked_from + answered - silent, answered=asked_from + answered)
        )
        quiet = np.flatnonzero(np.abs(played[asked_from + answered :][: 2 * MIC_RATE_HZ]) > 500)
        at = asked_from + answered + int(quiet[-1])
    return turns


def microphone(num_turns: int) -> probe.Pcm:
    spoken = np.repeat(np.frombuffer(speech(QUESTION), "<i2"), MIC_RATE_HZ // SPOKEN_HZ)
    gap = np.zeros(int(GAP_S * MIC_RATE_HZ), np.int16)
    return np.concatenate([gap, *[spoken, gap] * num_turns, np.zeros(60 * MIC_RATE_HZ, np.int16)])


@pytest.mark.parametrize("num_turns", [3, pytest.param(20, marks=pytest.mark.thorough)])
def test_figure_equals_the_recording(browsers: Browsers, loaded: Loaded, num_turns: int) -> None:
    """The figure is compared with the time between two samples of one recording: the last voiced
    sample of the microphone, and the first voiced one of the page's sound, which has the delay
    between two audio contexts in place of the loudspeaker's. All differences are printed; only the
    mean of many turns is asserted, since a loaded machine disturbs single ones.
    """
    with serving(loaded) as gateway:
        gateway.client.script = Script(num_samples=RATE_HZ // 2, lead_samples=RATE_HZ // 5)
        browser = browsers.with_microphone(f"turns-{num_turns}", microphone(num_turns))
        with visiting(browser, gateway.url, bypass_csp=True) as page:
            expect(page.locator("#state")).to_have_text("Ready")
            page.locator("#message").press("Shift")
            page.evaluate(probe.PREPARE, probe.SCRIPT.read_text())
            js(page, "() => Object.assign(probed, { room: [], sound: [] })")
            page.locator("#talk-button").click()
            expect(page.locator("#state")).to_have_text("Listening")
            js(page, RECORD)
            count = "[...fleetVoice.conversation.responses.byId.values()]"
            wait_js(
                page,
                f"{count}.filter(({{ latency, live }}) => latency && !live).length === {num_turns}",
                40 + 8 * num_turns,
            )
            figures = cast("list[dict[str, Any]]", js(page, FIGURES))
            turns = recorded_turns(page)
    assert len(turns) == len(figures) == num_turns, (turns, figures)
    off: list[float] = []
    for figure, turn in zip(figures, turns, strict=True):
        off.append(figure["totalMs"] - turn.ms)
        parts = " ".join(f"{part['name']} {part['ms']:.0f}" for part in figure["parts"])
        print(f"{figure['totalMs']:.0f} ms, recorded {turn.ms:.0f} ms, {off[-1]:+.0f} ms: {parts}")
    print(f"mean {np.mean(off):+.1f} ms, {min(off):+.1f} to {max(off):+.1f} ms")
    assert num_turns < 20 or abs(float(np.mean(off))) <= MAX_MEAN_MS
