"""A client's playback position, and the words played until that position."""

from collections import Counter

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.teacher import Voice
from web.realtime.audio.played_text import (
    SpeakingRate,
    find_silences,
    played_speech,
    played_words,
    speech_until,
)
from web.realtime.audio.playhead import Playhead

RATE_HZ = 24_000
STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50_000)), max_size=50)


@given(STEPS)
def test_position_exceeds_neither_sent_audio_nor_elapsed_time(
    steps: list[tuple[float, int]],
) -> None:
    head, now, played_before, sent = Playhead(RATE_HZ), 0.0, 0, 0
    for wait_s, num_samples in steps:
        before, now = now, now + wait_s
        at = head.position(now)
        assert played_before <= at <= sent and at - played_before <= (now - before) * RATE_HZ + 1
        if num_samples:
            head.send(num_samples, now)
        sent, played_before = sent + num_samples, head.position(now)
        assert played_before == at


@given(STEPS, st.floats(0.1, 2))
def test_audio_sent_within_the_room_stays_within_the_lead(
    steps: list[tuple[float, int]], lead_s: float
) -> None:
    head, now = Playhead(RATE_HZ), 0.0
    for wait_s, num_samples in steps:
        now += wait_s
        head.send(min(num_samples, head.room(lead_s, now)), now)
        assert head.left_s(now) <= lead_s + 1e-6


def test_position_pauses_during_an_underrun() -> None:
    head = Playhead(RATE_HZ)
    head.send(RATE_HZ, 10.0)
    head.send(RATE_HZ, 10.5)
    assert head.position(11.5) == 1.5 * RATE_HZ
    assert head.position(13.0) == 2 * RATE_HZ
    head.send(RATE_HZ, 14.0)
    assert head.position(14.5) == 2.5 * RATE_HZ


def test_reported_position_is_applied() -> None:
    head = Playhead(RATE_HZ)
    head.send(2 * RATE_HZ, 0.0)
    head.report(RATE_HZ // 2, 1.0)
    assert head.position(1.0) == RATE_HZ // 2 and head.position(1.5) == RATE_HZ
    head.report(10 * RATE_HZ, 1.6)
    assert head.position(1.6) == 2 * RATE_HZ


@given(st.text(alphabet="abc \n", max_size=200), st.floats(0, 1))
def test_played_words_never_exceed_the_played_share(text: str, share: float) -> None:
    kept = played_words(text, share, 1.0)
    assert text.startswith(kept)
    if share < 1:
        assert len(kept) <= share * len(text)
        assert (
            text[len(kept) : len(kept) + 1] in ("", " ", "\n")
            or not kept
            or len(text.split()[0]) > 0
        )


@given(
    st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=9), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_played_words_are_within_two_of_the_played_share(words: list[str], share: float) -> None:
    """The estimated number of played words is within two of the played share of the text; the
    speaking rate is even here, as the estimate assumes.
    """
    text = " ".join(words)
    spoken = sum(
        1 for index in range(len(words)) if len(" ".join(words[: index + 1])) <= share * len(text)
    )
    kept = len(played_words(text, share, 1.0).split())
    assert kept <= spoken + (share == 1) and spoken - kept <= 2


@given(st.text(max_size=100))
def test_played_words_of_nothing_and_of_everything(text: str) -> None:
    assert played_words(text, 0, 1.0) == "" and played_words(text, 1.0, 1.0) == text


@given(
    st.floats(0.02, 0.3), st.text(alphabet="ab ", min_size=30, max_size=200), st.floats(0.05, 0.95)
)
def test_learned_rate_estimates_missing_speech(char_s: float, text: str, share: float) -> None:
    assume(text.strip())
    rate = SpeakingRate()
    rate.learn("v", "x" * 100, 100 * char_s)
    whole_s = rate.whole_s("v", text, share * char_s * len(text))
    assert char_s * len(text) <= whole_s <= 1.06 * char_s * len(text)


@given(
    st.lists(st.tuples(st.integers(10, 40), st.integers(10, 40)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_silence_does_not_count_as_speech(spans: list[tuple[int, int]], share: float) -> None:
    """Silence does not count as speech. `spans`: alternating speech and silence, in windows of 10
    ms each. `share`: played share.
    """
    loud, quiet = np.tile(np.array([9000, -9000], np.int16), 120), np.zeros(240, np.int16)
    pcm = np.concatenate(
        [
            np.concatenate([np.tile(loud, spoken), np.tile(quiet, silent)])
            for spoken, silent in spans
        ]
    )
    silent = find_silences(pcm)
    played = int(share * len(pcm))
    assert speech_until(played, silent) == int(np.count_nonzero(pcm[:played]))
    whole = speech_until(len(pcm), silent)
    assert played_speech(len(pcm), silent, whole) == whole and played_speech(
        played, silent, whole
    ) <= speech_until(played, silent)


def test_silent_audio_holds_no_speech() -> None:
    assert (
        speech_until(4800, find_silences(np.zeros(4800, np.int16))) == 0
        and find_silences(np.zeros(0, np.int16)) == []
    )


SENTENCES = (
    "The green boat is near the bridge. It has two sails, one of them torn, and nobody has seen "
    "its owner since the storm.",
    "Yes, of course. Take the second street on the left, walk past the old church, and you will "
    "see the station in front of you.",
    "I am not sure that I understand what you mean, but let me try: you want to know whether it "
    "rains tomorrow.",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen",
)


def test_played_words_of_aligned_speech_are_at_most_two_too_few() -> None:
    """Speech with known word times is cut at any moment: the estimate has at most two words too
    few. Counting silence as speech would make a third of the cuts wrong.
    """
    voices = (Voice(), Voice(name="en-us+f3", rate_wpm=180), Voice(name="en-gb-x-rp", rate_wpm=120))
    off: Counter[int] = Counter()
    for speech, text in zip(
        speak_all([(t, v) for v in voices for t in SENTENCES]), SENTENCES * len(voices), strict=True
    ):
        pcm = (speech.samples * 32767).astype(np.int16)
        silent = find_silences(pcm)
        whole = speech_until(len(pcm), silent)
        ends = [start * 24_000 for start in speech.word_starts_s[1:]] + [len(pcm)]
        for played in range(0, len(pcm), 480):
            kept = len(played_words(text, played_speech(played, silent, whole), whole).split())
            off[kept - sum(1 for end in ends if end <= played)] += 1
    num = off.total()
    assert sum(count for words, count in off.items() if words > 0) < 0.01 * num, off
    assert (
        sum(count for words, count in off.items() if words < -2) < 0.02 * num
        and min(off) >= -3
        and max(off) <= 1
    ), off
