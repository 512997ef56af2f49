"""Playback clock: audio in time plays without a gap, and each late piece counts as one underrun."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.lab.measure.playback import START_S, PlaybackClock

RATE_HZ = 1_000


def played(*pieces: tuple[float, int], start_s: float = START_S) -> PlaybackClock:
    playback = PlaybackClock(RATE_HZ, start_s)
    for at_s, num_samples in pieces:
        playback.receive(num_samples, at_s)
    return playback


def test_audio_in_time_has_no_underrun() -> None:
    playback = played((5.0, 500), (5.4, 500), (6.0, 1_000))
    assert playback.underruns == 0 and abs(playback.ends_s - (5.0 + START_S + 2.0)) < 1e-9
    assert [round(late, 6) for late in playback.late_s] == [
        round(-0.1 - START_S, 6),
        round(0.0 - START_S, 6),
    ]


def test_late_audio_is_an_underrun_and_buffers_again() -> None:
    playback = played((0.0, 500), (0.5 + START_S + 0.25, 500))
    assert playback.underruns == 1 and abs(playback.late_s[0] - 0.25) < 1e-9
    assert abs(playback.ends_s - (0.5 + START_S + 0.25 + START_S + 0.5)) < 1e-9


def test_longer_buffer_bridges_a_longer_pause() -> None:
    pieces = ((0.0, 500), (0.5 + 0.15, 500))
    assert played(*pieces).underruns == 1 and played(*pieces, start_s=0.2).underruns == 0


def test_end_of_audio_is_no_underrun() -> None:
    assert played((0.0, 100)).underruns == 0


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2_000)), min_size=1))
def test_playback_lasts_for_the_audio_and_each_wait(gaps: list[tuple[float, int]]) -> None:
    playback, now_s, first_s = PlaybackClock(RATE_HZ), 0.0, 0.0
    for index, (gap_s, num_samples) in enumerate(gaps):
        now_s += gap_s
        first_s = now_s if index == 0 else first_s
        playback.receive(num_samples, now_s)
    waits = sum(late + START_S for late in playback.late_s if late > 0)
    assert playback.underruns == sum(late > 0 for late in playback.late_s)
    assert (
        abs(playback.ends_s - (first_s + START_S + waits + playback.num_samples / RATE_HZ)) < 1e-6
    )
