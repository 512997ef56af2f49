"""Voices that speak a benchmark's questions, and recordings of people with their text.

A speaker is espeak-ng, the voice of a checkpoint folder, or a folder of recordings; voices run in
the benchmark's process, and not in the fleet.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from fleet.core.errors import FleetError
from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.voice import read_question
from fleet.lab.measure.word_errors import LANGUAGE, words_of
from fleet.models.voices.base import find_voice
from fleet.models.voices.load import FILE, load_voice
from fleet.processing.spoken.clauses import Clause
from fleet.processing.spoken.normalize import spoken_text

ESPEAK = "espeak-ng"
SEED = 1
PEAK = 32767
SPEAKER = "speaker.txt"
"""Name of the file, in a folder of recordings, with the speaker's name."""
TRANSCRIPTION = "transcription"
"""Name of the file with a corpus's texts. Source: CMU Sphinx, `<s> text </s> (file id)`."""
_LINE = re.compile(r"(?:<s>)?\s*(?P<text>.*?)\s*(?:</s>)?\s*\((?P<name>[^()]+)\)\s*")

Samples = NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpeaker:
    """A voice. `speak` takes a text and a file name, and returns the speech as 16-bit PCM at 24
    kHz. A folder of recordings is read by the file name; a synthesizer uses the text alone.
    """

    name: str
    speak: Callable[[str, str], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenPrompt:
    """Speech of a text, and the file that keeps it. `samples`: 16-bit PCM at 24 kHz."""

    text: str
    samples: Samples
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusClip:
    """A recording and its text."""

    path: Path
    text: str


def open_speaker(wanted: str) -> BenchSpeaker:
    """Return the speaker `espeak-ng[:NAME]`, `FOLDER[:NAME]` with the folder of a voice, or
    `FOLDER` with the recordings of an earlier run or of a person. Raises: BenchError.
    """
    place, _, voice = wanted.partition(":")
    try:
        if place == ESPEAK:
            return _open_espeak(voice)
        if (Path(place) / FILE).exists():
            return _open_voice(Path(place), voice)
        return _open_recordings(Path(place))
    except FleetError as error:
        raise BenchError(f"--speaker {wanted}: {error}", param="--speaker") from error


def _open_espeak(voice: str) -> BenchSpeaker:
    from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Teacher, Voice

    teacher = Teacher()
    espeak = Voice(name=voice) if voice else Voice()

    def speak(text: str, _name: str) -> Samples:
        samples = teacher.speak(" ".join(words_of(text)), espeak).samples
        return _pcm(samples, SAMPLE_RATE_HZ)

    return BenchSpeaker(name=f"{ESPEAK} {espeak.name}", speak=speak)


def _open_voice(folder: Path, wanted: str) -> BenchSpeaker:
    model = load_voice(folder)
    voice = find_voice(model.voices(), wanted)

    def speak(text: str, _name: str) -> Samples:
        clause = Clause(text=text, starts_line=True, ends_line=True)
        spoken = spoken_text(clause, LANGUAGE).text
        speech = model.synthesize(spoken, voice.name, speed=1.0, seed=SEED)
        return _pcm(speech.samples, model.sample_rate_hz)

    return BenchSpeaker(name=f"{folder.name} {voice.name}", speak=speak)


def _open_recordings(folder: Path) -> BenchSpeaker:
    name = folder.name
    if (told := folder / SPEAKER).is_file():
        name = told.read_text().strip()
    if not any(folder.glob("*.wav")):
        raise BenchError(
            f"the folder {folder} has neither {FILE}, which describes a voice, nor recordings such "
            "as question-01.wav"
        )
    return BenchSpeaker(name=name, speak=lambda _text, file: read_question(folder / file).samples)


def _pcm(samples: NDArray[np.float32], rate_hz: int) -> Samples:
    resampled = soxr.resample(samples, rate_hz, PCM_RATE_HZ)
    return (np.clip(resampled, -1, 1) * PEAK).astype("<i2")


def read_corpus(folder: Path) -> Sequence[CorpusClip]:
    """Read the clips of a corpus of CMU Sphinx. Raises: BenchError."""
    file = folder / TRANSCRIPTION
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise BenchError(
            f"--corpus {folder}: {error}; name a folder of WAV files with a file {TRANSCRIPTION}, "
            "such as librivox of Debian's pocketsphinx-testdata",
            param="--corpus",
        ) from error
    clips = [_clip(file, line) for line in lines if line.strip()]
    if not clips:
        raise BenchError(f"--corpus {folder}: {TRANSCRIPTION} is empty", param="--corpus")
    return clips


def _clip(file: Path, line: str) -> CorpusClip:
    if (found := _LINE.fullmatch(line)) is None:
        raise BenchError(
            f"--corpus: {file} has the line {line!r}; a line is `text (file id)`", param="--corpus"
        )
    path = file.with_name(f"{found['name']}.wav")
    if not path.is_file():
        raise BenchError(f"--corpus: {file} names {path.name}, which is missing", param="--corpus")
    return CorpusClip(path=path, text=found["text"])


def write_wav(path: Path, samples: Samples) -> None:
    soundfile.write(str(path), samples, PCM_RATE_HZ, subtype="PCM_16")
