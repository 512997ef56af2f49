"""Begin and end of user turns, from speech probabilities alone."""

from hypothesis import given
from hypothesis import strategies as st

from web.realtime.audio.turn_detector import (
    FRAME_MS,
    FRAME_SAMPLES,
    TurnDetector,
    TurnEvent,
    TurnPaused,
    TurnResumed,
    TurnRules,
    TurnStarted,
    TurnStopped,
)
from web.realtime.audio.turn_end import WAITS


def run(probabilities: list[float], rules: TurnRules) -> list[TurnEvent]:
    detector, events = TurnDetector(rules), list[TurnEvent]()
    for index, probability in enumerate(probabilities, 1):
        events += detector.feed(probability, index * FRAME_SAMPLES)
    return events


def frames(ms: int, probability: float) -> list[float]:
    return [probability] * (ms // FRAME_MS)


RULES = TurnRules(prefix_ms=300, silence_ms=512, speculate_ms=192)


def test_turn_begins_with_its_prefix_and_ends_after_silence() -> None:
    started, paused, stopped = run(frames(640, 0.0) + frames(960, 0.9) + frames(640, 0.0), RULES)
    assert started == TurnStarted(start=(640 - 300) * 16, voiced=640 * 16)
    assert paused == TurnPaused(end=(640 + 960 + 192) * 16)
    assert stopped == TurnStopped(end=(640 + 960 + 192) * 16, voiced_end=1600 * 16, voiced_ms=960)


def test_click_is_not_a_turn() -> None:
    assert run([0.0, 0.99, 0.0] * 20, RULES) == []


def test_resumed_speech_is_reported_once() -> None:
    events = run(frames(320, 0.9) + frames(320, 0.0) + frames(320, 0.9) + frames(640, 0.0), RULES)
    assert [type(event) for event in events] == [
        TurnStarted,
        TurnPaused,
        TurnResumed,
        TurnPaused,
        TurnStopped,
    ]


def test_silence_shorter_than_speculation_ends_the_turn_immediately() -> None:
    events = run(frames(320, 0.9) + frames(320, 0.0), TurnRules(silence_ms=96, speculate_ms=192))
    assert [type(event) for event in events] == [TurnStarted, TurnStopped]


def test_endless_turn_is_ended() -> None:
    events = run(frames(3200, 0.9), TurnRules(longest_ms=1024))
    assert [type(event) for event in events][:2] == [TurnStarted, TurnStopped]
    starts = [event.start for event in events if isinstance(event, TurnStarted)]
    ends = [event.end for event in events if isinstance(event, TurnStopped)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), (
        "no audio is in two turns"
    )


def test_words_before_a_pause_decide_when_the_turn_ends() -> None:
    """The words are told after 256 ms of silence; a pause that is over has no effect."""
    rules = TurnRules(silence_ms=512, speculate_ms=192, waits=WAITS["medium"])
    for told, expected_ms in (("Stop.", 320), ("I think that", 1600), ("stop", 608)):
        detector, ended = TurnDetector(rules), 0
        probabilities = frames(320, 0.9) + frames(224, 0.0) + frames(320, 0.9) + frames(2000, 0.0)
        pauses = list[int]()
        for index, probability in enumerate(probabilities, 1):
            end, events = index * FRAME_SAMPLES, detector.feed(probability, index * FRAME_SAMPLES)
            pauses += [event.end for event in events if isinstance(event, TurnPaused)]
            if index == (864 + 256) // FRAME_MS:
                detector.expect_end(pauses[0], "I think that")
                detector.expect_end(pauses[1], told)
            if any(isinstance(event, TurnStopped) for event in events):
                ended = end
                break
        assert ended // 16 - 864 == expected_ms, told
    fixed = TurnDetector(TurnRules(silence_ms=512, speculate_ms=192))
    fixed.feed(0.9, 512)
    fixed.expect_end(0, "I think that")


@given(
    st.lists(st.floats(0, 1), max_size=300),
    st.builds(
        TurnRules,
        threshold=st.floats(0, 1),
        prefix_ms=st.integers(0, 1000),
        silence_ms=st.integers(32, 1000),
        speculate_ms=st.integers(0, 600),
        longest_ms=st.integers(100, 5000),
    ),
)
def test_events_alternate_and_turns_never_overlap(
    probabilities: list[float], rules: TurnRules
) -> None:
    speaking, paused, last_end = False, None, 0
    for event in run(probabilities, rules):
        match event:
            case TurnStarted(start, voiced):
                assert not speaking and last_end <= start <= voiced
                speaking, paused = True, None
            case TurnPaused(end):
                assert speaking and paused is None and rules.speculate_ms
                paused = end
            case TurnResumed():
                assert speaking and paused is not None
                paused = None
            case TurnStopped(end, voiced_end, voiced_ms):
                assert (
                    speaking
                    and end == (paused or end)
                    and voiced_end <= max(end, voiced_end)
                    and voiced_ms >= FRAME_MS
                )
                speaking, last_end = False, end
