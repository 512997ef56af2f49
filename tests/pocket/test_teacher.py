"""Speech synthesis by the teacher model, with the real espeak-ng."""

import subprocess
import sys

import numpy as np
import pytest

from fleet.core.errors import ConfigError
from fleet.lab.pocket.corpus import sentences
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Teacher, Voice, letters_a, word_starts
from tests.support import REPO, cli_env


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher()


def test_word_starts_lie_within_the_speech(teacher: Teacher) -> None:
    for text in [*sentences("train", 60, seed=1), "the cat is in the garden of the king"]:
        speech = teacher.speak(text)
        starts = speech.word_starts_s
        assert len(starts) == len(text.split())
        assert starts[0] == 0 and all(
            before < after for before, after in zip(starts, starts[1:], strict=False)
        ), text
        assert starts[-1] < len(speech.samples) / SAMPLE_RATE_HZ


def test_speech_is_audible_24_khz_float(teacher: Teacher) -> None:
    samples = teacher.speak("the opposite of hot is cold").samples
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert 0.1 < float(np.abs(samples).max()) <= 1
    assert 1.5 < len(samples) / SAMPLE_RATE_HZ < 2.5


def test_word_starts_at_the_end_of_its_predecessor(teacher: Teacher) -> None:
    """A word starts at the end of its predecessor: the length of the preceding words, spoken alone,
    is about its start.
    """
    alone = teacher.speak("good evening").samples
    voiced_s = int(np.flatnonzero(np.abs(alone) > 0.02)[-1]) / SAMPLE_RATE_HZ
    assert teacher.speak("good evening peter").word_starts_s[2] == pytest.approx(voiced_s, abs=0.15)


def test_speech_of_same_texts_in_same_order_is_identical() -> None:
    code = (
        "import hashlib\n"
        "from fleet.lab.pocket.teacher import Teacher, Voice\n"
        "voices = [Voice(), Voice(name='en-gb-x-rp+f2')]\n"
        "speeches = [Teacher().speak(text, voice) for text in ('good night', 'c a t') for voice "
        "in voices]\n"
        "print([(hashlib.sha256(speech.samples.tobytes()).hexdigest(), speech.word_starts_s) "
        "for speech in speeches])\n"
    )
    run = [sys.executable, "-c", code]
    first, again = (
        subprocess.run(run, env=cli_env(), cwd=REPO, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert first.stdout == again.stdout != ""


def test_voices_differ_in_rate_and_pitch(teacher: Teacher) -> None:
    text = "seven plus two is nine"
    usual = teacher.speak(text).samples
    assert len(teacher.speak(text, Voice(rate_wpm=250)).samples) < 0.8 * len(usual)
    for voice in (Voice(pitch=80), Voice(pitch_range=0), Voice(name="en-us+f3")):
        samples = teacher.speak(text, voice).samples
        assert not np.array_equal(samples[: len(usual)], usual[: len(samples)]), voice


def test_empty_text_is_silence(teacher: Teacher) -> None:
    speech = teacher.speak("")
    assert len(speech.samples) == 0 and speech.word_starts_s == ()


def test_missing_library_is_refused_with_install_command() -> None:
    with pytest.raises(ConfigError, match="apt-get install espeak-ng"):
        Teacher(libraries=("libabsent.so.1",))


def test_unknown_voice_is_refused_and_next_call_succeeds(teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match="no voice 'absent'"):
        teacher.speak("hello", Voice(name="absent"))
    assert len(teacher.speak("hello").samples)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("c a t", [1]),
        ("b a n a n a", [1, 3, 5]),
        ("the first letter of apple is a", [6]),
        ("a cow says moo", []),
        ("am i a machine", []),
        ("a week has seven days", []),
    ],
)
def test_letter_a_is_distinguished_from_the_article(text: str, letters: list[int]) -> None:
    assert [index for index, is_letter in enumerate(letters_a(text)) if is_letter] == letters


def test_word_without_event_starts_in_proportion_to_letters() -> None:
    """A word without an event of its own starts in proportion to letters: espeak-ng has one event
    for "in the" in "in the cat".
    """
    assert word_starts(["in", "the", "cat"], [(0, 0), (7, 700)], end=1000) == [0, 300, 700]
    assert word_starts(["cat", "in", "the"], [(0, 0), (4, 400)], end=1100) == pytest.approx(
        [0, 400, 700]
    )
