"""How far a listener is, and which words that is."""

from hypothesis import assume, given
from hypothesis import strategies as st

from web.realtime.heard import SpeakingRate, words_heard
from web.realtime.playhead import Playhead

RATE_HZ = 24_000
STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50_000)), max_size=50)


@given(STEPS)
def test_nobody_hears_what_was_not_sent_nor_faster_than_time(steps: list[tuple[float, int]]) -> None:
    head, now, heard, sent = Playhead(RATE_HZ), 0.0, 0, 0
    for wait_s, num_samples in steps:
        before, now = now, now + wait_s
        at = head.at(now)
        assert heard <= at <= sent and at - heard <= (now - before) * RATE_HZ + 1
        if num_samples:
            head.send(num_samples, now)
        sent, heard = sent + num_samples, head.at(now)
        assert heard == at


@given(STEPS, st.floats(0.1, 2))
def test_who_sends_what_there_is_room_for_is_never_further_ahead(steps: list[tuple[float, int]], lead_s: float) -> None:
    head, now = Playhead(RATE_HZ), 0.0
    for wait_s, num_samples in steps:
        now += wait_s
        head.send(min(num_samples, head.room(lead_s, now)), now)
        assert head.left_s(now) <= lead_s + 1e-6


def test_running_dry_is_counted_once_a_time() -> None:
    head = Playhead(RATE_HZ)
    head.send(RATE_HZ, 10.0)
    head.send(RATE_HZ, 10.5)
    assert head.underruns == 0 and head.at(11.5) == 1.5 * RATE_HZ
    head.send(RATE_HZ, 14.0)
    assert head.underruns == 1 and head.at(14.5) == 2.5 * RATE_HZ


def test_what_the_listener_says_is_believed() -> None:
    head = Playhead(RATE_HZ)
    head.send(2 * RATE_HZ, 0.0)
    head.told(RATE_HZ // 2, 1.0)
    assert head.at(1.0) == RATE_HZ // 2 and head.at(1.5) == RATE_HZ
    head.told(10 * RATE_HZ, 1.6)
    assert head.at(1.6) == 2 * RATE_HZ


@given(st.text(alphabet="abc \n", max_size=200), st.floats(0, 1))
def test_never_more_words_than_were_heard(text: str, share: float) -> None:
    kept = words_heard(text, share, 1.0)
    assert text.startswith(kept)
    if share < 1:
        assert len(kept) <= share * len(text)
        assert text[len(kept) : len(kept) + 1] in ("", " ", "\n") or not kept or len(text.split()[0]) > 0


@given(st.lists(st.text(alphabet="abcdefgh", min_size=1, max_size=9), min_size=1, max_size=60), st.floats(0, 1))
def test_within_two_words_of_what_was_heard(words: list[str], share: float) -> None:
    """Where sound runs at an even pace, as the proportion assumes."""
    text = " ".join(words)
    spoken = sum(1 for index in range(len(words)) if len(" ".join(words[: index + 1])) <= share * len(text))
    kept = len(words_heard(text, share, 1.0).split())
    assert kept <= spoken + (share == 1) and spoken - kept <= 2


@given(st.text(max_size=100))
def test_nothing_heard_is_no_word_and_all_of_it_every_one(text: str) -> None:
    assert words_heard(text, 0, 1.0) == "" and words_heard(text, 1.0, 1.0) == text


@given(st.floats(0.02, 0.3), st.text(alphabet="ab ", min_size=30, max_size=200), st.floats(0.05, 0.95))
def test_a_rate_that_was_learnt_is_taken_for_what_is_not_made_yet(char_s: float, text: str, share: float) -> None:
    assume(text.strip())
    rate = SpeakingRate()
    rate.learn("v", "x" * 100, 100 * char_s)
    whole_s = rate.whole_s("v", text, share * char_s * len(text), text_whole=True)
    assert char_s * len(text) <= whole_s <= 1.06 * char_s * len(text)
