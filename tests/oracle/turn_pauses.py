"""Measure the end of turns on spoken pauses:
`python -m tests.oracle.turn_pauses HALF WHISPER CACHE VOICE...`.

`HALF` is `dev`, the sentences that rules may be developed on, or `report`, those that only measure
them. `WHISPER` is a folder with a recogniser; `CACHE` a file that keeps what it heard, so that
rules are measured again without it. Each `VOICE` is `espeak-ng` or `FOLDER:NAME`.

Sentences are spoken; at each mark the speech so far is recognised, as a session does when the user
pauses, and the words decide how long the turn waits. A pause within a sentence that lasts longer is
a false end. Silence is counted in whole frames of voice detection.
"""

import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path

import numpy as np
import soundfile
import soxr

from fleet.graphs.cascade import ASR
from fleet.models.voices.load import load_voice
from fleet.processing.transcripts import Transcripts
from fleet.processing.voice_activity import FRAME_MS
from fleet.stages.base import BuiltStage
from fleet.stages.cascade.asr import build as build_stage
from tests.oracle.test_whisper_base import RATE_HZ, Samples, recognise
from tests.stage_options import stage_options
from web.realtime.audio.turn_end import WAITS, SentenceEnd, ending_of

SENTENCES = Path(__file__).with_name("turn_sentences.txt")
"""A sentence a line. `|` marks a pause, and the letter after it the place of the pause."""
PLACES = {
    "s": "after a subject",
    "c": "after a conjunction",
    "l": "in a list",
    "n": "before a number's rest",
    "u": "after a hesitation",
    "k": "after a complete clause",
    "p": "after a preposition or an article",
    "v": "after a verb",
    "b": "after a subordinate clause",
    "o": "after an opening",
}
ESPEAK, ESPEAK_WPM = "espeak-ng", 160
FIXED_MS = (350, 500)
HUSH_S = 0.1
"""Silence after which the speech so far is recognised."""
AUDIBLE = 0.02
"""Amplitude of the last audible sample, relative to the peak."""
MEDIAN_PAUSE_MS, PAUSE_SPREAD = 480, 0.6
"""Pauses within the turn of a speaker: log-normal, by their median and the standard deviation of
the logarithm. Pauses under 200 ms are none.
"""
LONG_PAUSE_MS = (400, 1200)
"""Range of equally frequent pauses, a second model of a speaker's pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A sentence, cut at its pauses. `places`: letters of the pauses."""

    line: str
    parts: tuple[str, ...]
    places: tuple[str, ...]

    @property
    def half(self) -> str:
        return "report" if hashlib.sha256(self.line.encode()).digest()[0] & 1 else "dev"

    def begins(self) -> Iterator[str]:
        """Return what is said before each pause, and the whole. A comma at each pause makes voices
        hesitate.
        """
        hesitant = [f"{part}," if part[-1].isalnum() else part for part in self.parts[:-1]]
        return accumulate([*hesitant, self.parts[-1]], "{} {}".format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Speech before a pause, as it was recognised. `place`: letter of the pause; "" at the end of
    the turn.
    """

    voice: str
    place: str
    heard: str


Speaker = Callable[[str], Samples]
"""Function that speaks a text, up to its last audible sample, at `RATE_HZ`."""


def read_sentences(half: str) -> list[Sentence]:
    found: list[Sentence] = []
    for line in SENTENCES.read_text().splitlines():
        cut = re.split(r"\s*\|([a-z])\s*", line)
        found.append(Sentence(line=line, parts=tuple(cut[::2]), places=tuple(cut[1::2])))
    return [sentence for sentence in found if sentence.half == half]


def open_speaker(wanted: str) -> tuple[str, Speaker]:
    if wanted == ESPEAK:
        return ESPEAK, _speak_with_espeak
    folder, _, name = wanted.partition(":")
    model = load_voice(Path(folder))

    def speak(text: str) -> Samples:
        speech = model.synthesize(text, name, speed=1.0, seed=1)
        return _audible(speech.samples, model.sample_rate_hz)

    return name, speak


def _speak_with_espeak(text: str) -> Samples:
    command = [ESPEAK, "-v", "en-gb", "-s", str(ESPEAK_WPM), "--stdout", text]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate_hz = soundfile.read(BytesIO(wav), dtype="float32")
    return _audible(np.asarray(samples, np.float32), rate_hz)


def _audible(samples: Samples, rate_hz: int) -> Samples:
    level = np.abs(samples)
    end = np.flatnonzero(level > AUDIBLE * level.max())[-1] + 1
    return soxr.resample(samples[:end], rate_hz, RATE_HZ).astype(np.float32)


class Ear:
    """Recogniser whose transcripts are kept in a file: one JSON object, by voice and words."""

    def __init__(self, whisper: Path, cache: Path) -> None:
        self._whisper, self._cache = whisper, cache
        self._known: dict[str, str] = json.loads(cache.read_text()) if cache.exists() else {}
        self._stage: BuiltStage | None = None

    def pauses(self, voice: str, speak: Speaker, sentence: Sentence) -> Iterator[Pause]:
        for text, place in zip(sentence.begins(), (*sentence.places, ""), strict=True):
            key = f"{voice}: {text}"
            if key not in self._known:
                self._known[key] = self._hear(speak(text))
                self._cache.write_text(json.dumps(self._known, indent=1))
            yield Pause(voice=voice, place=place, heard=self._known[key])

    def _hear(self, clip: Samples) -> str:
        if self._stage is None:
            options = stage_options(
                stage=ASR, checkpoint=self._whisper, max_batch=1, stage_engine="ctranslate2"
            )
            self._stage = build_stage(options)
        hush = np.zeros(int(HUSH_S * RATE_HZ), np.float32)
        transcripts = Transcripts(1)
        for item in recognise(self._stage, [np.concatenate([clip, hush])], language="en"):
            transcripts.add(item.arrays)
        return transcripts.texts()[0]


def share_longer(silence_ms: float) -> float:
    """Return the share of the pauses within a turn that last longer than `silence_ms`."""

    def above(ms: float) -> float:
        z = (math.log(ms) - math.log(MEDIAN_PAUSE_MS)) / PAUSE_SPREAD
        return 0.5 * math.erfc(z / math.sqrt(2))

    return min(1.0, above(silence_ms) / above(200))


def share_longer_of_long(silence_ms: float) -> float:
    """Return the same share for pauses of `LONG_PAUSE_MS`."""
    low, high = LONG_PAUSE_MS
    return min(1.0, max(0.0, (high - silence_ms) / (high - low)))


def in_frames(silence_ms: float) -> int:
    return math.ceil(silence_ms / FRAME_MS) * FRAME_MS


def report(name: str, pauses: Sequence[Pause]) -> None:
    ends = [pause for pause in pauses if not pause.place]
    inner = [pause for pause in pauses if pause.place]
    print(f"{name}: {len(ends)} ends, {len(inner)} pauses within a sentence")

    def line(rule: str, wait_of: Callable[[SentenceEnd], int]) -> None:
        took = [in_frames(wait_of(ending_of(pause.heard))) for pause in ends]
        waits = [in_frames(wait_of(ending_of(pause.heard))) for pause in inner]
        print(
            f"  {rule}: false ends {statistics.mean(map(share_longer, waits)):.1%} (of long pauses "
            f"{statistics.mean(map(share_longer_of_long, waits)):.1%}), wait median "
            f"{statistics.median(took):.0f} ms, mean {statistics.mean(took):.0f} ms"
        )

    for fixed_ms in FIXED_MS:
        line(f"fixed {fixed_ms} ms", lambda _, fixed_ms=fixed_ms: fixed_ms)
    for eagerness, waits in WAITS.items():
        line(eagerness, waits.of)


def main(half: str, whisper: Path, cache: Path, voices: Sequence[str]) -> None:
    ear, found = Ear(whisper, cache), list[Pause]()
    for name, speak in map(open_speaker, voices):
        for sentence in read_sentences(half):
            found += ear.pauses(name, speak, sentence)
        report(name, [pause for pause in found if pause.voice == name])
    report("all voices", found)
    for place, meaning in (PLACES | {"": "at the end"}).items():
        endings = Counter(ending_of(pause.heard).value for pause in found if pause.place == place)
        print(f"{meaning}: {dict(endings)}")
    if half == "dev":
        for pause in found:
            ending = ending_of(pause.heard).value
            print(f"{pause.voice} {pause.place or '.'} {ending} {pause.heard}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
