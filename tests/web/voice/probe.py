"""What the Voice page's microphone and loudspeaker really carried, sample by sample, and when: for tests that trust no counter.

Knows no server.
"""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Page

from tests.web.voice.browsers import js, wait_js

Pcm = NDArray[np.int16]
SCRIPT = Path(__file__).with_name("probe.js")
VOICED = 64
"""Of 32767: what is louder is voice, and not the noise that echo cancelling leaves."""
FADE = 128
"""Samples of a ramp, where sound stops or begins in mid-answer."""
PREPARE = """
(script) => {
  window.probed = { mic: [], player: [], heard: [] };
  const { createMediaStreamSource } = AudioContext.prototype;
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    return (window.source = createMediaStreamSource.call(this, stream));
  };
  window.probe = async (context, source, name) => {
    await context.audioWorklet.addModule(`data:text/javascript,${encodeURIComponent(script)}`);
    const node = new AudioWorkletNode(context, "probe", { numberOfInputs: 1, outputChannelCount: [1] });
    node.port.onmessage = ({ data }) => probed[name].push(data);
    source.connect(node);
    const mute = new GainNode(context, { gain: 0 });
    node.connect(mute).connect(context.destination);
  };
}
"""
PLAYER = """
async () => {
  const { player } = fleetVoice;
  player.addEventListener("playback", ({ detail }) => probed.heard.push(detail));
  await player.open();
  await probe(player.context, player.node, "player");
}
"""
MIC = """() => probe(fleetVoice.mic.context, window.source, "mic")"""
TAKE = """
(name) => {
  const blocks = probed[name];
  const bytes = new Uint8Array(blocks.reduce((sum, { pcm }) => sum + pcm.byteLength, 0));
  let at = 0;
  for (const { pcm } of blocks) {
    bytes.set(new Uint8Array(pcm.buffer), at);
    at += pcm.byteLength;
  }
  let text = "";
  for (let n = 0; n < bytes.length; n += 8192) text += String.fromCharCode(...bytes.subarray(n, n + 8192));
  return { pcm: btoa(text), frames: blocks.map(({ frame }) => frame), walls: blocks.map(({ wall }) => wall) };
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the player told. Units: samples, but `at` in ms of the page's clock and `time` in seconds of its context's."""

    kind: str
    serial: int
    played: int
    at: float
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Shapes: `pcm` are blocks one after another; `frames` is the context's place of each block's first sample, `walls` when it
    came, in ms since 1970.
    """

    pcm: Pcm
    frames: NDArray[np.int64]
    walls: NDArray[np.float64]

    @property
    def block(self) -> int:
        return len(self.pcm) // max(1, len(self.frames))

    def from_frame(self, first: int, last: int) -> Pcm:
        """The samples of the context's frames in [first, last)."""
        at = self.frames.repeat(self.block) + np.tile(np.arange(self.block), len(self.frames))
        return self.pcm[(at >= first) & (at < last)]


def prepare(page: Page) -> None:
    """The player's end of the probe. The page's context must have been made with `bypass_csp`: the probe is a script of ours."""
    page.locator("#message").press("Shift")
    page.evaluate(PREPARE, SCRIPT.read_text())
    js(page, PLAYER)


def watch_mic(page: Page) -> None:
    wait_js(page, "fleetVoice.mic.node != null")
    js(page, MIC)


def carried(page: Page, name: str) -> Carried:
    told = cast("dict[str, Any]", page.evaluate(TAKE, name))
    return Carried(
        pcm=np.frombuffer(b64decode(told["pcm"]), "<i2"),
        frames=np.asarray(told["frames"], np.int64),
        walls=np.asarray(told["walls"], np.float64),
    )


def heard(page: Page) -> list[Heard]:
    told = cast("list[dict[str, Any]]", js(page, "probed.heard"))
    return [
        Heard(kind=one["kind"], serial=one["serial"], played=one.get("played", 0), at=one["at"], time=one.get("time") or 0.0)
        for one in told
    ]


def first_voiced(mic: Carried, page: Page, after_ms: float) -> float:
    """When the first voiced sample after `after_ms` entered the microphone's worklet. Units: ms of the page's clock."""
    origin = float(str(js(page, "performance.timeOrigin")))
    rate_hz = float(str(js(page, "fleetVoice.mic.rateHz")))
    for block, wall in zip(mic.pcm.reshape(-1, mic.block), mic.walls - origin, strict=True):
        voiced = np.flatnonzero(np.abs(block.astype(np.int32)) > VOICED)
        if wall >= after_ms and len(voiced):
            return float(wall + 1000 * voiced[0] / rate_hz)
    raise AssertionError("nobody spoke into the microphone")


def runs_of(told: Sequence[Heard], serial: int) -> list[tuple[int, int]]:
    """The stretches of an answer that were played without a break, in its own samples."""
    runs: list[tuple[int, int]] = []
    begun: int | None = None
    for one in told:
        if one.serial != serial:
            continue
        if one.kind == "started":
            begun = one.played
        elif one.kind in ("dry", "ended", "flushed") and begun is not None:
            runs.append((begun, one.played))
            begun = None
    return runs


def assert_played(player: Carried, whole: Pcm, runs: Sequence[tuple[int, int]]) -> None:
    """Each stretch was played sample for sample, in order, and together they are the whole: nothing lost, nothing twice.

    Only where sound stopped or began in mid-answer is it faded.
    """
    ends = [end for _, end in runs]
    assert [start for start, _ in runs] == [0, *ends[:-1]] and ends[-1:] == [len(whole)], (runs, len(whole))
    at = 0
    for start, end in runs:
        first = start + (FADE if start else 0)
        last = end - (FADE if end < len(whole) else 0)
        place = find(player.pcm, whole[first:last], at)
        assert place is not None, f"samples {first} to {last} of the answer were not played as they are"
        at = place + last - first


def find(samples: Pcm, wanted: Pcm, start: int = 0) -> int | None:
    """Where `wanted` is in the samples, as it is."""
    found = -1
    while (found := samples.tobytes().find(wanted.tobytes(), max(2 * start, found + 1))) % 2:
        if found < 0:
            return None
    return found // 2


def quiet_at_ms(page: Page) -> tuple[float, float]:
    """When the answer that was interrupted was first heard, and when its last sample was; it is silent from then on.

    Units: ms of the page's clock.
    """
    flushed = next(one for one in heard(page) if one.kind == "flushed" and one.serial)
    player = carried(page, "player")
    begun = next(one for one in heard(page) if one.serial == flushed.serial and one.kind == "started")
    end = round(flushed.time * 24_000)
    sound = player.from_frame(round(begun.time * 24_000), end)
    last = end - len(sound) + int(np.flatnonzero(sound)[-1]) + 1
    assert not player.from_frame(end, end + 2400).any(), "sound after the answer was silenced"
    # The place of the two clocks to each other is that of the moment: a context whose machine is busy falls behind.
    return begun.at, flushed.at - (end - last) / 24


def barge_in_ms(page: Page) -> float:
    """From the first voiced sample that entered the microphone's worklet over an answer, to the last one of it that was audible.

    Means nothing where the machine was so busy that the probe came to the microphone after the voice.
    """
    begun_ms, quiet_ms = quiet_at_ms(page)
    return quiet_ms - first_voiced(carried(page, "mic"), page, begun_ms)
