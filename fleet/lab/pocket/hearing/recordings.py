"""Speech recordings on disk: dialogues whose user turns are spoken, and single sentences, each in a
random voice.

Files: `train-0000.npy`, the concatenated samples, and `train-0000.json`, their texts and voices.
The speech is clean; `augment` adds noise.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, get_args

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.core.errors import ConfigError
from fleet.lab.pocket import teacher
from fleet.lab.pocket.corpus import ChatTurn, Dialogue, Split, dialogues, sentences
from fleet.lab.pocket.hearing.voices import known_voice, unseen_voice
from fleet.lab.pocket.sharding import build_missing, replacing
from fleet.lab.pocket.teacher import Teacher, Voice

SAMPLE_RATE_HZ: Final = 16_000
Kind = Literal["train", "held_out", "unseen"]
"""Kind of recordings. `train`: training texts and voices. `held_out`: held-out texts in training
voices. `unseen`: held-out texts in unseen voices.
"""
SPLIT: Final[Mapping[Kind, Split]] = {
    "train": "train",
    "held_out": "held_out",
    "unseen": "held_out",
}
_DRAW: Final[Mapping[Kind, Callable[[Random], Voice]]] = {
    "train": known_voice,
    "held_out": known_voice,
    "unseen": unseen_voice,
}
NUM_DIALOGUES, NUM_SENTENCES = 400, 200
"""Numbers of dialogues and of sentences in a shard."""
_FULL_SCALE = 32_767


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRecording:
    """A recording and its text. Samples are mono, 16 kHz, int16."""

    text: str
    voice: str
    samples: NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenDialogue:
    """A dialogue with one recording for each of the user's turns."""

    dialogue: Dialogue
    recordings: tuple[SpeechRecording, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """All recordings of one kind in a folder."""

    dialogues: Sequence[SpokenDialogue]
    sentences: Sequence[SpeechRecording]

    def all(self) -> list[SpeechRecording]:
        return [recording for each in self.dialogues for recording in each.recordings] + list(
            self.sentences
        )


def build(folder: Path, kind: Kind, num_shards: int, workers: int = 1) -> None:
    """Build the missing shards of a kind, among the first `num_shards`, in `workers` processes."""
    files = [_path(folder, kind, shard) for shard in range(num_shards)]
    build_missing(f"hearing {kind}", partial(make_shard, folder, kind), files, workers)


def make_shard(
    folder: Path,
    kind: Kind,
    shard: int,
    *,
    num_dialogues: int = NUM_DIALOGUES,
    num_sentences: int = NUM_SENTENCES,
) -> None:
    rng = Random(f"hearing {kind} {shard}")
    talks = list(dialogues(SPLIT[kind], num_dialogues, seed=_seed(kind, shard)))
    texts = [turn.text for talk in talks for turn in talk.turns if turn.role == "user"]
    texts += sentences(SPLIT[kind], num_sentences, seed=_seed(kind, shard))
    voices = [_DRAW[kind](rng) for _ in texts]
    speaker = Teacher()
    speech = [_synthesize(speaker, text, voice) for text, voice in zip(texts, voices, strict=True)]
    description = {
        "dialogues": [asdict(talk) for talk in talks],
        "texts": texts,
        "voices": [voice.name for voice in voices],
        "lengths": [len(samples) for samples in speech],
    }
    _write(folder, kind, shard, np.concatenate(speech), description)


def load(folder: Path, kind: Kind) -> Recordings:
    """Load all existing shards of a kind, in a fixed order. Samples stay on disk until they are
    read.

    Raises: ConfigError if there are no shards.
    """
    files = sorted(folder.glob(f"{kind}-*.json"))
    if not files:
        raise ConfigError(
            f"{folder} has no {kind} recordings; run `fleet pocket train recordings`",
            param="folder",
        )
    shards = [_read(file) for file in files]
    return Recordings(
        dialogues=[talk for shard in shards for talk in shard.dialogues],
        sentences=[sentence for shard in shards for sentence in shard.sentences],
    )


def _seed(kind: Kind, shard: int) -> int:
    """Return a seed that is unique to the kind and the shard."""
    return 1_000 * get_args(Kind).index(kind) + shard


def _synthesize(speaker: Teacher, text: str, voice: Voice) -> NDArray[np.int16]:
    speech = soxr.resample(
        speaker.speak(text, voice).samples, teacher.SAMPLE_RATE_HZ, SAMPLE_RATE_HZ
    )
    return np.clip(np.rint(speech * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE).astype(np.int16)


def _read(file: Path) -> Recordings:
    description = json.loads(file.read_text())
    samples = np.load(file.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
    ends = np.cumsum([0, *description["lengths"]]).tolist()
    recordings = iter(
        [
            SpeechRecording(text=text, voice=voice, samples=samples[start:end])
            for text, voice, (start, end) in zip(
                description["texts"], description["voices"], pairwise(ends), strict=True
            )
        ]
    )
    talks = [_with_recordings(each, recordings) for each in description["dialogues"]]
    return Recordings(dialogues=talks, sentences=list(recordings))


def _with_recordings(
    description: Mapping[str, Any], recordings: Iterator[SpeechRecording]
) -> SpokenDialogue:
    dialogue = Dialogue(
        turns=tuple(ChatTurn(**turn) for turn in description["turns"]), family=description["family"]
    )
    spoken = tuple(next(recordings) for turn in dialogue.turns if turn.role == "user")
    return SpokenDialogue(dialogue=dialogue, recordings=spoken)


def _write(
    folder: Path, kind: Kind, shard: int, samples: NDArray[np.int16], description: Mapping[str, Any]
) -> None:
    """Write a shard. The JSON file is written last: a shard exists if its JSON file does."""
    file = _path(folder, kind, shard)
    with replacing(file.with_suffix(".npy")) as new, new.open("wb") as out:
        np.save(out, samples, allow_pickle=False)
    with replacing(file) as new:
        new.write_text(json.dumps(description))


def _path(folder: Path, kind: Kind, shard: int) -> Path:
    return folder / f"{kind}-{shard:04d}.json"
