"""Records the samples of the Voice page's microphone and loudspeaker with their times, independent
of the page's own counters.
"""

from base64 import b64decode
from bisect import bisect_left
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
"""Threshold level, on the scale to 32767, above the noise that echo cancellation leaves."""
FADE = 128
"""Length in samples of a fade where audio stops or begins in mid-answer."""
PREPARE = """
(script) => {
  window.probed = { mic: [], player: [], heard: [] };
  const { createMediaStreamSource } = AudioContext.prototype;
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    return (window.source = createMediaStreamSource.call(this, stream));
  };
  window.probe = async (context, source, name) => {
    await context.audioWorklet.addModule(`data:text/javascript,${encodeURIComponent(script)}`);
    const node = new AudioWorkletNode(context, "probe", {
      numberOfInputs: 1, outputChannelCount: [1] });
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
  for (let n = 0; n < bytes.length; n += 8192)
    text += String.fromCharCode(...bytes.subarray(n, n + 8192));
  return {
    pcm: btoa(text),
    frames: blocks.map(({ frame }) => frame),
    walls: blocks.map(({ wall }) => wall),
  };
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaybackEvent:
    """Playback report of the page's player. Units: `played` in samples, `at` in ms of the page's
    clock, `time` in seconds of the audio context's clock.
    """

    kind: str
    serial: int
    played: int
    at: float
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAudio:
    """Samples that passed an audio worklet, in equal blocks.

    Shapes: `pcm` is all blocks joined; `frames` has the position of each block's first sample in
    the audio context; `walls` has the arrival time of each block in ms since 1970.
    """

    pcm: Pcm
    frames: NDArray[np.int64]
    walls: NDArray[np.float64]

    @property
    def block(self) -> int:
        return len(self.pcm) // max(1, len(self.frames))

    def gaps(self) -> list[int]:
        """Return the last recorded context frame before each gap, where blocks were not
        recorded.
        """
        return [int(frame) for frame in self.frames[:-1][np.diff(self.frames) != self.block]]

    def from_frame(self, first: int, last: int) -> Pcm:
        """Return the samples of the context frames in [first, last)."""
        at = self.frames.repeat(self.block) + np.tile(np.arange(self.block), len(self.frames))
        return self.pcm[(at >= first) & (at < last)]


def prepare(page: Page) -> None:
    """Attach the probe to the page's player. The browser context needs `bypass_csp`, since the
    probe is an inline script.
    """
    page.locator("#message").press("Shift")
    page.evaluate(PREPARE, SCRIPT.read_text())
    js(page, PLAYER)


def wait_until_recorded(page: Page) -> None:
    """Wait until the recording includes all samples that the player has reported as played."""
    wait_js(
        page,
        "probed.player.at(-1)?.frame > 24000 * Math.max(0, ...probed.heard.map(({ time }) => "
        "time ?? 0))",
    )


def watch_mic(page: Page) -> None:
    wait_js(page, "fleetVoice.mic.node != null")
    js(page, MIC)


def read_recording(page: Page, name: str) -> RecordedAudio:
    probed = cast("dict[str, Any]", page.evaluate(TAKE, name))
    return RecordedAudio(
        pcm=np.frombuffer(b64decode(probed["pcm"]), "<i2"),
        frames=np.asarray(probed["frames"], np.int64),
        walls=np.asarray(probed["walls"], np.float64),
    )


def playback_events(page: Page) -> list[PlaybackEvent]:
    events = cast("list[dict[str, Any]]", js(page, "probed.heard"))
    return [
        PlaybackEvent(
            kind=event["kind"],
            serial=event["serial"],
            played=event.get("played", 0),
            at=event["at"],
            time=event.get("time") or 0.0,
        )
        for event in events
    ]


def first_voiced(mic: RecordedAudio, page: Page, after_ms: float) -> float:
    """Return the time of the first voiced sample after `after_ms` at the microphone's worklet.
    Units: ms of the page's clock.
    """
    origin = float(str(js(page, "performance.timeOrigin")))
    rate_hz = float(str(js(page, "fleetVoice.mic.rateHz")))
    for block, wall in zip(mic.pcm.reshape(-1, mic.block), mic.walls - origin, strict=True):
        voiced = np.flatnonzero(np.abs(block.astype(np.int32)) > VOICED)
        if wall >= after_ms and len(voiced):
            return float(wall + 1000 * voiced[0] / rate_hz)
    raise AssertionError("no speech in the microphone's audio")


def find_runs(events: Sequence[PlaybackEvent], serial: int) -> list[tuple[int, int]]:
    """Return the ranges [first, last) of an answer's samples that were played without a break."""
    runs: list[tuple[int, int]] = []
    begun: int | None = None
    for event in events:
        if event.serial != serial:
            continue
        if event.kind == "started":
            begun = event.played
        elif event.kind in ("dry", "ended", "flushed") and begun is not None:
            runs.append((begun, event.played))
            begun = None
    return runs


def assert_played(player: RecordedAudio, whole: Pcm, runs: Sequence[tuple[int, int]]) -> None:
    """Assert that the ranges in `runs` were played sample by sample, in order, and together are the
    whole answer.

    Samples may be faded only where audio stopped or began in mid-answer.
    """
    ends = [end for _, end in runs]
    assert [start for start, _ in runs] == [0, *ends[:-1]] and ends[-1:] == [len(whole)], (
        runs,
        len(whole),
    )
    at = 0
    for start, end in runs:
        first = start + (FADE if start else 0)
        last = end - (FADE if end < len(whole) else 0)
        position = find(player.pcm, whole[first:last], at)
        assert position is not None, (
            f"samples {first} to {last} of the answer were not played as they are: a recording "
            f"of {len(player.pcm)} samples has "
            f"{longest_prefix(player.pcm, whole[first:last], at)} of them in a row, and lacks "
            f"frames after {player.gaps()}"
        )
        at = position + last - first


def longest_prefix(samples: Pcm, wanted: Pcm, start: int) -> int:
    """Return the length of the longest prefix of `wanted` that is in `samples` from position
    `start` on.
    """
    return (
        bisect_left(
            range(len(wanted) + 1),
            True,
            key=lambda size: find(samples, wanted[:size], start) is None,
        )
        - 1
    )


def find(samples: Pcm, wanted: Pcm, start: int = 0) -> int | None:
    """Return the position of `wanted` in `samples`, from `start` on; None if it is not there."""
    found = -1
    while (found := samples.tobytes().find(wanted.tobytes(), max(2 * start, found + 1))) % 2:
        if found < 0:
            return None
    return found // 2


def quiet_at_ms(page: Page) -> tuple[float, float]:
    """Return the times of the first and last audible sample of the interrupted answer, and assert
    that silence follows.

    Units: ms of the page's clock.
    """
    flushed = next(
        event for event in playback_events(page) if event.kind == "flushed" and event.serial
    )
    player = read_recording(page, "player")
    begun = next(
        event
        for event in playback_events(page)
        if event.serial == flushed.serial and event.kind == "started"
    )
    end = round(flushed.time * 24_000)
    samples = player.from_frame(round(begun.time * 24_000), end)
    last = end - len(samples) + int(np.flatnonzero(samples)[-1]) + 1
    assert not player.from_frame(end, end + 2400).any(), "audio after the answer was silenced"
    # the offset of the two clocks is not constant: on a loaded machine the audio context falls
    # behind
    return begun.at, flushed.at - (end - last) / 24


def barge_in_ms(page: Page) -> float:
    """Return the barge-in latency in ms: from the first voiced sample at the microphone's worklet
    to the answer's last audible sample.

    The result is meaningless if the machine was so loaded that the probe was attached after the
    speech.
    """
    begun_ms, quiet_ms = quiet_at_ms(page)
    return quiet_ms - first_voiced(read_recording(page, "mic"), page, begun_ms)
