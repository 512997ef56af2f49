"""The first voiced sample of an answer: what counts as voice, and how much of the silence before it
is kept, for any chunk sizes.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.processing.voice_onset import FirstVoicedClock, LeadingSilenceTrimmer, VoicedSearch

RATE_HZ = 24_000
Pcm = NDArray[np.int16]


def voice(ms: int, level: int = 2000) -> Pcm:
    return (np.sin(np.arange(RATE_HZ * ms // 1000) * 0.05) * level).astype("<i2")


def silence(ms: int) -> Pcm:
    return np.zeros(RATE_HZ * ms // 1000, "<i2")


def joined(*parts: Pcm) -> bytes:
    return np.concatenate(parts).astype("<i2").tobytes()


def noise(ms: int, level: int) -> Pcm:
    return np.random.default_rng(1).integers(-level, level + 1, RATE_HZ * ms // 1000).astype("<i2")


def click(ms: int) -> Pcm:
    """Return half a second of silence with a click of full amplitude in the middle, across two
    frames.
    """
    quiet = silence(500)
    quiet[6000 - RATE_HZ * ms // 2000 : 6000 + RATE_HZ * ms // 2000] = 32_000
    return quiet


def first_voiced(pcm: bytes) -> int | None:
    search = VoicedSearch(RATE_HZ)
    search.feed(pcm)
    return search.floor if search.found else None


@pytest.mark.parametrize(
    "before", [silence(400), noise(400, 1), noise(400, 25), click(2), click(8)]
)
def test_first_voiced_sample_is_where_speech_begins_behind_noise_and_clicks(before: Pcm) -> None:
    found = first_voiced(joined(before, voice(200)))
    assert found is not None and abs(found - len(before)) < RATE_HZ // 100


def test_sound_without_speech_has_no_first_voiced_sample() -> None:
    assert all(
        first_voiced(joined(sound)) is None
        for sound in (silence(900), noise(900, 25), click(8), voice(20), voice(0))
    )


def shortened(pcm: bytes, cuts: list[int], max_ms: int | None) -> tuple[bytes, int]:
    trimmer, sent, start = LeadingSilenceTrimmer(RATE_HZ, max_ms), b"", 0
    for end in [*sorted(cuts), len(pcm) // 2]:
        sent += trimmer.feed(pcm[2 * start : 2 * end])
        start = end
    return sent + trimmer.finish(), trimmer.num_trimmed


@pytest.mark.parametrize(
    ("sound", "max_ms", "kept"),
    [
        (joined(silence(400), voice(300)), 60, 360),
        (joined(silence(400), voice(300)), 0, 300),
        (joined(silence(400), voice(300)), None, 700),
        (joined(silence(40), voice(300)), 60, 340),
        (joined(silence(400), voice(300), silence(500), voice(300)), 60, 1160),
        (joined(silence(900)), 60, 60),
        (joined(silence(30)), 60, 30),
        (joined(voice(20)), 60, 20),
        (b"", 60, 0),
        (joined(silence(400), voice(20)), 0, 20),
        (joined(silence(400), voice(5)), 0, 5),
        (joined(silence(300), voice(20), silence(300), voice(300)), 0, 620),
        (joined(voice(900, level=100)), 60, 900),
    ],
)
def test_only_leading_silence_is_shortened(sound: bytes, max_ms: int | None, kept: int) -> None:
    sent, trimmed = shortened(sound, [], max_ms)
    assert (
        len(sent) // 2 == kept * RATE_HZ // 1000
        and sound.endswith(sent)
        and trimmed == (len(sound) - len(sent)) // 2
    )


@given(st.lists(st.integers(0, 16_800), max_size=12), st.sampled_from([None, 0, 7, 60, 1000]))
def test_shortening_does_not_depend_on_how_the_sound_is_cut(
    cuts: list[int], max_ms: int | None
) -> None:
    sound = joined(silence(373), voice(327))
    assert shortened(sound, cuts, max_ms) == shortened(sound, [], max_ms)


def test_silence_is_withheld_for_no_more_than_20_ms_of_voice() -> None:
    trimmer = LeadingSilenceTrimmer(RATE_HZ, 60)
    assert not trimmer.feed(joined(silence(395)))
    assert trimmer.feed(joined(voice(20)))
    assert trimmer.feed(b"\1\0") == b"\1\0", "nothing is withheld any more"


def test_first_voiced_sample_is_heard_where_it_lies_in_the_sound() -> None:
    voiced = FirstVoicedClock(RATE_HZ)
    voiced.add(joined(silence(300)), 10.0)
    voiced.add(joined(silence(100), voice(100)), 10.05)
    assert voiced.at_s == pytest.approx(10.4) and voiced.sample == 9600
    voiced.add(joined(voice(100)), 10.1)
    assert voiced.at_s == pytest.approx(10.4)


def test_first_voiced_sample_waits_where_the_sound_before_it_ran_dry() -> None:
    voiced = FirstVoicedClock(RATE_HZ)
    voiced.add(joined(silence(80)), 10.0)
    voiced.add(joined(silence(20), voice(100)), 11.0)
    assert voiced.at_s == pytest.approx(11.02)


def test_first_voiced_sample_may_lie_in_the_piece_before_the_one_that_decides() -> None:
    voiced = FirstVoicedClock(RATE_HZ)
    voiced.add(joined(silence(60), voice(20)), 10.0)
    assert voiced.at_s is None
    voiced.add(joined(voice(100)), 11.0)
    assert voiced.at_s == pytest.approx(10.06) and voiced.sample == 1440
