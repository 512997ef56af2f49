"""A Thinker and a Talker whose layers are divided among span workers produce, to the byte, the
text and audio of undivided stages.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.graphs.qwen3_omni import TALKER, THINKER
from fleet.spans.protocol.messages import AnySpanMessage, SpanResult, SpanTapped
from tests.oracle.divided_speech import (
    TALKERS,
    THINKERS,
    SpeechStages,
    Spoken,
    SpokenRequests,
    assert_all_free,
    divided_speech,
    requests,
    whole_speech,
)
from tests.span_route import SpanRoute, kill_some

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

DIVISIONS = (
    ("forward 1", "reverse 1"),
    ("forward 1 tapped on the anchor", "reverse 2"),
    ("forward 2", "forward 1"),
    ("head on anchor 2", "forward 2"),
    ("reverse 1", "forward 2"),
    ("reverse 2", "reverse 2"),
    ("reverse 2 tapped before the anchor", "reverse 1"),
)
"""Pairs of a division of the Thinker and one of the Talker."""


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path) -> SpeechStages:
    return whole_speech(tiny_checkpoint)


@pytest.fixture(scope="module")
def asked(tiny_checkpoint: Path) -> SpokenRequests:
    return requests(tiny_checkpoint)


@pytest.fixture(scope="module")
def expected(whole: SpeechStages, asked: SpokenRequests) -> Spoken:
    return whole.speak(asked)


@pytest.mark.parametrize(("thinker", "talker"), DIVISIONS)
def test_divided_stages_answer_as_whole_ones(
    thinker: str,
    talker: str,
    whole: SpeechStages,
    asked: SpokenRequests,
    expected: Spoken,
    tiny_checkpoint: Path,
) -> None:
    splits = {THINKER: THINKERS[thinker], TALKER: TALKERS[talker]}
    with divided_speech(tiny_checkpoint, splits, whole) as divided:
        assert divided.speak(asked) == expected
        assert_all_free(divided)


def test_speech_differs_between_requests(expected: Spoken) -> None:
    """The requests' answers differ; the comparisons would not notice answers that are all alike."""
    spoken = [pcm for name, (_, _, pcm) in expected.items() if not name.startswith("one token")]
    assert all(spoken) and len(set(spoken)) == len(spoken)


@pytest.mark.one_in(3, "losses in divided speech")
@pytest.mark.parametrize("keep_bytes", [1 << 30, 0], ids=["rows kept", "none kept"])
@pytest.mark.parametrize(("thinker", "talker"), [each for each in DIVISIONS if "2" in each[0]])
def test_killed_span_workers_of_both_stages_change_no_sample(
    thinker: str,
    talker: str,
    keep_bytes: int,
    whole: SpeechStages,
    asked: SpokenRequests,
    expected: Spoken,
    tiny_checkpoint: Path,
) -> None:
    chance = random.Random(f"{thinker} {talker} {keep_bytes}")
    splits = {THINKER: THINKERS[thinker], TALKER: TALKERS[talker]}
    for _ in range(3):
        with divided_speech(tiny_checkpoint, splits, whole, keep_bytes=keep_bytes) as divided:
            for route in divided.routes.values():
                kill_some(route, chance)
            assert divided.speak(asked) == expected
            assert_all_free(divided)
            for route in divided.routes.values():
                assert route.num_replaced
                assert not keep_bytes or not any(
                    worker.host.num_rows_again for worker in route.worker_at
                )


@pytest.mark.one_in(2, "aborts of divided speech")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("thinker", "talker"), [("forward 2", "forward 2"), ("reverse 1", "reverse 2")]
)
def test_aborted_requests_beside_losses_change_no_other_and_leave_nothing(
    thinker: str,
    talker: str,
    seed: int,
    whole: SpeechStages,
    asked: SpokenRequests,
    expected: Spoken,
    tiny_checkpoint: Path,
) -> None:
    chance = random.Random(f"{thinker} {talker} {seed}")
    splits = {THINKER: THINKERS[thinker], TALKER: TALKERS[talker]}
    for _ in range(4):
        with divided_speech(
            tiny_checkpoint, splits, whole, keep_bytes=chance.choice((1 << 30, 0))
        ) as divided:
            for route in divided.routes.values():
                kill_some(route, chance)
            aborted = {name: chance.randrange(60) for name in chance.sample(sorted(expected), 3)}
            got = divided.speak(asked, aborted)
            assert got == {name: spoken for name, spoken in expected.items() if name not in aborted}
            assert_all_free(divided)


def lose_taps(route: SpanRoute, when_lost: Callable[[], None]) -> None:
    """Lose the second message with tapped hidden states. Once the result of its pass has arrived,
    kill the worker that sent the message.
    """
    seen: list[int] = []
    route.repair()
    chain = route.chain
    assert chain is not None

    def loses(message: AnySpanMessage) -> bool:
        if isinstance(message, SpanTapped):
            seen.append(message.number)
            return len(seen) == 2
        if isinstance(message, SpanResult) and len(seen) > 1 and message.number == seen[1]:
            route.worker_at[0].kill()
            when_lost()
        return False

    chain.loses = loses


@pytest.mark.parametrize("keep_bytes", [1 << 30, 0], ids=["rows kept", "none kept"])
def test_tapped_rows_lost_with_their_worker_are_computed_again(
    keep_bytes: int,
    whole: SpeechStages,
    asked: SpokenRequests,
    expected: Spoken,
    tiny_checkpoint: Path,
) -> None:
    """Tapped hidden states lost with their worker are computed again. The last worker does not
    repeat the pass, whose result has arrived, not even to report that it fails elsewhere.
    """
    lost: list[int] = []
    with divided_speech(
        tiny_checkpoint, {THINKER: THINKERS["forward 2"]}, whole, keep_bytes=keep_bytes
    ) as divided:
        lose_taps(divided.routes[THINKER], lambda: lost.append(1))
        assert divided.speak(asked) == expected and lost
        assert_all_free(divided)
        (first, _) = divided.routes[THINKER].worker_at
        assert not keep_bytes or first.host.num_rows_again == 0


def test_pass_of_an_ended_request_ends_without_its_lost_tapped_rows(
    whole: SpeechStages, asked: SpokenRequests, expected: Spoken, tiny_checkpoint: Path
) -> None:
    name = "audio at 0.0"
    spec = asked.specs[name]
    with divided_speech(tiny_checkpoint, {THINKER: THINKERS["forward 2"]}, whole) as divided:
        twin = divided.twin()
        lose_taps(divided.routes[THINKER], lambda: twin.abort(spec.id))
        twin.run([spec], asked.blobs)
        assert divided.speak(asked) == expected
        assert_all_free(divided)


def test_only_rows_for_the_talker_return_from_the_tapped_layer(
    whole: SpeechStages, asked: SpokenRequests, tiny_checkpoint: Path
) -> None:
    """Only hidden states for the Talker return from the tapped layer: passes with prompt audio
    return them, text prompts and decode steps do not.
    """
    for name, wanted in (("audio at 0.0", True), ("text at 0.0", False)):
        with divided_speech(tiny_checkpoint, {THINKER: THINKERS["forward 1"]}, whole) as divided:
            route = divided.routes[THINKER]
            numbers = note_tapped(route)
            divided.twin().run([asked.specs[name]], asked.blobs)
            assert route.chain is not None
            assert bool(numbers) == wanted and len(numbers) < route.chain.num_results


def note_tapped(route: SpanRoute) -> list[int]:
    """Return a list that receives the number of each pass whose tapped hidden states arrive."""
    numbers: list[int] = []
    route.repair()
    assert route.chain is not None

    def note(message: AnySpanMessage) -> bool:
        numbers.extend([message.number] if isinstance(message, SpanTapped) else [])
        return False

    route.chain.loses = note
    return numbers
