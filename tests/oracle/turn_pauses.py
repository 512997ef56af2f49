"""Measure the end of turns on spoken pauses: `python -m tests.oracle.turn_pauses WHISPER VOICE...`.

`WHISPER` is a folder with a recogniser, each `VOICE` a folder with a voice. Sentences are spoken;
at each mark the speech so far is recognised, as a session does when the user pauses, and the words
decide how long the turn waits. A pause within a sentence that lasts longer is a false end.
Compared with a fixed silence of 500 ms; silence is counted in whole frames of voice detection.
"""

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr

from fleet.graphs.cascade import ASR
from fleet.models.voices.base import VoiceModel
from fleet.models.voices.load import load_voice
from fleet.processing.voice_activity import FRAME_MS
from fleet.stages.base import BuiltStage
from fleet.stages.cascade.asr import build as build_stage
from tests.oracle.test_whisper_base import RATE_HZ, Samples, transcribe
from tests.stage_options import stage_options
from web.realtime.audio.turn_end import WAITS, end_of_turn_ms, ending_of

FIXED_MS = 500
MEDIAN_PAUSE_MS, PAUSE_SPREAD = 480, 0.6
"""Pauses within the turn of a speaker: log-normal, by their median and the standard deviation of
the logarithm. Pauses under 200 ms are none.
"""
HUSH_S = 0.1
"""Silence after which the speech so far is recognised."""
SENTENCES = """
I would like to book | a flight to Lisbon | for the second week of May.
Could you explain | how a heat pump works?
My sister lives in | a small village | near the coast.
Please remind me | to water the plants | when I get home.
We went to the mountains | and stayed in a hut | without any electricity.
What is the difference between | a lake and a pond?
I was thinking that | maybe we should | leave a bit earlier.
The meeting is on Thursday | at half past nine.
Can you read me the news | about the elections | in Brazil?
If the weather is good | we could have lunch outside.
I bought apples, | pears, | plums | and a melon.
No, that is not what I meant.
Tell my brother | that I will be late | because of the traffic.
How many people | live in Norway?
Yes, please.
She said that | she had never seen | such a beautiful garden.
Turn the heating down | in the bedroom.
When I was young | we used to swim in this river.
I need a word that | rhymes with orange.
Actually, | I have changed my mind.
Who won the football match | last night?
There are two things | I want to ask you.
Let us play a game | of chess.
The doctor told me to | drink more water.
It was raining, | so we took the bus.
Good night.
Which of these books | would you recommend | to a child?
I am looking for | a quiet place to work.
Do you think | it will snow | this weekend?
That sounds wonderful.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Speech before a pause, as it was recognised. `is_end`: the turn is over."""

    heard: str
    is_end: bool


def spoken_pauses(model: VoiceModel, name: str, sentence: str) -> Iterator[tuple[Samples, bool]]:
    """Yield the speech before each mark of a sentence and the whole, each with a short silence."""
    parts = [part.strip() for part in sentence.split("|")]
    speech = model.synthesize(" ".join(parts), name, speed=1.0, seed=1)
    num_words = np.cumsum([len(part.split()) for part in parts])
    hush = np.zeros(int(HUSH_S * RATE_HZ), np.float32)
    for number, count in enumerate(num_words.tolist()):
        is_end = number == len(parts) - 1
        end = len(speech.samples) if is_end else int(speech.word_ends[count - 1])
        clip = soxr.resample(speech.samples[:end], model.sample_rate_hz, RATE_HZ)
        yield np.concatenate([clip.astype(np.float32), hush]), is_end


def pauses(stage: BuiltStage, voices: list[Path]) -> Iterator[Pause]:
    for model in map(load_voice, voices):
        for name in [each.name for each in model.voices()]:
            for sentence in SENTENCES.strip().splitlines():
                for clip, is_end in spoken_pauses(model, name, sentence):
                    pause = Pause(heard=transcribe(stage, [clip])[0], is_end=is_end)
                    kind = "end  " if is_end else "pause"
                    print(
                        f"{name} {kind} {ending_of(pause.heard).value:10} {pause.heard}", flush=True
                    )
                    yield pause


def share_longer(silence_ms: float) -> float:
    """Return the share of the pauses within a turn that last longer than `silence_ms`."""

    def above(ms: float) -> float:
        z = (math.log(ms) - math.log(MEDIAN_PAUSE_MS)) / PAUSE_SPREAD
        return 0.5 * math.erfc(z / math.sqrt(2))

    return min(1.0, above(silence_ms) / above(200))


def in_frames(silence_ms: float) -> int:
    return math.ceil(silence_ms / FRAME_MS) * FRAME_MS


def main(whisper: Path, voices: list[Path]) -> None:
    stage = build_stage(stage_options(stage=ASR, checkpoint=whisper, max_batch=4))
    found = list(pauses(stage, voices))
    ends, inner = [p for p in found if p.is_end], [p for p in found if not p.is_end]
    print(f"{len(ends)} ends, {len(inner)} pauses within a sentence")
    fixed = in_frames(FIXED_MS)
    print(f"fixed {FIXED_MS} ms: false ends {share_longer(fixed):.1%}, wait {fixed} ms")
    for eagerness, waits in WAITS.items():
        took = [in_frames(end_of_turn_ms(pause.heard, waits)) for pause in ends]
        false = [share_longer(in_frames(end_of_turn_ms(pause.heard, waits))) for pause in inner]
        print(
            f"semantic, {eagerness}: false ends {statistics.mean(false):.1%}, wait median "
            f"{statistics.median(took):.0f} ms, mean {statistics.mean(took):.0f} ms"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(voice) for voice in sys.argv[2:]])
