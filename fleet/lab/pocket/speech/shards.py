"""Speech data set on disk: shards of sentences spoken by the teacher, as features on the frame
grid, and later as codes.

Files: `train-0000.features.npz`, `train-0000.codes.npz`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import Split, sentences
from fleet.lab.pocket.shape import SEED, VOICES
from fleet.lab.pocket.sharding import build_missing, replacing
from fleet.lab.pocket.speech.analysis import analyse
from fleet.lab.pocket.speech.codes import Codebook, fit
from fleet.lab.pocket.speech.wordlock import SentenceFrames, lock, speech_end_s
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Teacher, Voice

SENTENCES_PER_SHARD: Final = 300
FEATURES, CODES = "features.npz", "codes.npz"
CODEBOOK: Final = "codebook.safetensors"
FIT_SHARDS: Final = 6
"""Number of shards to which the codebook is fitted: about 50,000 frames, both voices in equal
parts.
"""
_FRAME_ARRAYS = ("features", "pitch_hz", "cycles", "pointer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """A spoken text as codes, without the silent lead.

    Shapes: codes [T, 8] of int16; pointer [T] of int16, the index in `encode(text)` of the symbol
    spoken in each frame, -1 before the first word.
    """

    text: str
    voice: str
    codes: NDArray[np.int16]
    pointer: NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenSentence:
    """A spoken text as features on the frame grid."""

    text: str
    voice: str
    frames: SentenceFrames


def load_utterances(folder: Path, split: Split) -> list[Utterance]:
    """Load all coded shards of a split, in a fixed order."""
    return [
        Utterance(text=text, voice=voice, codes=arrays["codes"], pointer=arrays["pointer"])
        for path in _files(folder, split, CODES)
        for text, voice, arrays in _read(path, ("codes", "pointer"))
    ]


def load_spoken(folder: Path, split: Split, max_shards: int | None = None) -> list[SpokenSentence]:
    """Load all feature shards of a split, or the first `max_shards`, in a fixed order."""
    return [
        SpokenSentence(text=text, voice=voice, frames=SentenceFrames(**arrays))
        for path in _files(folder, split, FEATURES)[:max_shards]
        for text, voice, arrays in _read(path, _FRAME_ARRAYS)
    ]


def build(
    folder: Path,
    split: Split,
    num_shards: int,
    *,
    size: int = SENTENCES_PER_SHARD,
    workers: int = 1,
) -> None:
    """Build the missing shards among the first `num_shards`, each of `size` sentences with
    alternating voices, in `workers` processes.
    """
    files = [_path(folder, split, shard, FEATURES) for shard in range(num_shards)]
    build_missing(f"speech {split}", partial(_make_shard, folder, split, size), files, workers)


def encode_missing(folder: Path, split: Split, book: Codebook) -> int:
    """Encode the feature shards that have no codes of this codebook yet; return the number of
    shards encoded by this call.
    """
    count = 0
    for path in _files(folder, split, FEATURES):
        coded = path.with_name(path.name.replace(FEATURES, CODES))
        if coded.exists() and _fingerprint(coded) == book.fingerprint:
            continue
        with np.load(path) as shard:
            codes = book.encode(shard["features"], shard["cycles"])
            copied = {name: shard[name] for name in ("texts", "voices", "lengths", "pointer")}
        _write(coded, {**copied, "codes": codes, "fingerprint": np.array(book.fingerprint)})
        count += 1
    return count


def _make_shard(folder: Path, split: Split, size: int, shard: int) -> None:
    names = sorted(VOICES)
    texts = list(sentences(split, size, seed=shard))
    spoken_by = [names[(shard + index) % len(names)] for index in range(len(texts))]
    teacher = Teacher()
    frames = [
        speak(teacher, text, VOICES[name]) for text, name in zip(texts, spoken_by, strict=True)
    ]
    arrays: dict[str, NDArray[Any]] = {
        "texts": np.array(texts),
        "voices": np.array(spoken_by),
        "lengths": np.array([len(each.cycles) for each in frames], np.int32),
    }
    arrays |= {
        name: np.concatenate([getattr(each, name) for each in frames]) for name in _FRAME_ARRAYS
    }
    _write(_path(folder, split, shard, FEATURES), arrays)


def speak(teacher: Teacher, text: str, voice: Voice) -> SentenceFrames:
    """Return a sentence as spoken by the teacher, on the frame grid."""
    speech = teacher.speak(text, voice)
    return lock(
        analyse(speech.samples),
        text,
        speech.word_starts_s,
        speech_end_s(speech.samples, SAMPLE_RATE_HZ),
    )


def _read(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, NDArray[Any]]]]:
    """Yield (text, voice, arrays by name) of each sentence in a shard. `names`: arrays to read."""
    with np.load(path) as shard:
        ends = np.cumsum(shard["lengths"])
        parts = {name: np.split(shard[name], ends[:-1]) for name in names}
        texts, voices = shard["texts"].tolist(), shard["voices"].tolist()
    for index, (text, voice) in enumerate(zip(texts, voices, strict=True)):
        yield text, voice, {name: part[index] for name, part in parts.items()}


def _fingerprint(path: Path) -> str:
    with np.load(path) as shard:
        return str(shard["fingerprint"])


def _write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with replacing(path) as new, new.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _path(folder: Path, split: Split, shard: int, kind: str) -> Path:
    return folder / f"{split}-{shard:04d}.{kind}"


def _files(folder: Path, split: Split, kind: str) -> list[Path]:
    """Return the shard files of a split and kind, in the order of their numbers."""
    return sorted(folder.glob(f"{split}-*.{kind}"))


def fit_codebook(folder: Path, num_shards: int, seed: int = SEED) -> Codebook:
    """Return the stored codebook, or fit it on the first `num_shards` training shards. A stored
    codebook is never fitted again, since that would invalidate all existing codes.

    Raises: ConfigError if there are fewer shards.
    """
    path = folder / CODEBOOK
    if path.exists():
        return Codebook.load(path)
    shards = _files(folder, "train", FEATURES)[:num_shards]
    if len(shards) < num_shards:
        raise ConfigError(
            f"{folder} has {len(shards)} of {num_shards} shards to fit on; build more first",
            param="num_shards",
        )
    book = fit(np.concatenate([np.load(shard)["features"] for shard in shards]), seed=seed)
    book.save(path)
    return book
