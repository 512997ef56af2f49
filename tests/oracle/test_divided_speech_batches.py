"""Speech of two stages divided among one, two or three span workers each, with the anchor at the
beginning or the end, also in a large batch.

Text, codes and samples are byte-equal to the output of undivided stages that answer each request
alone.
"""

from pathlib import Path
from typing import Any

import pytest

from fleet.graphs.qwen3_omni import TALKER, THINKER
from fleet.models.qwen3_omni.tiny import write_tiny_checkpoint
from tests.oracle.cases import Case, speech_like, user, wav_part
from tests.oracle.divided_speech import (
    INVARIANT,
    SpeechStages,
    Spoken,
    SpokenRequests,
    assert_all_free,
    divided_speech,
    requests,
    whole_speech,
)
from tests.run_cache import compute_once
from tests.span_route import Split

pytestmark = pytest.mark.one_file_in(4, "spans of an engine")

FOUR_LAYERS: dict[str, Any] = {"talker_config": {"text_config": {"num_hidden_layers": 4}}}
"""Configuration of a tiny Talker with four layers, as many as the tiny Thinker has, so that the
anchor and three span workers have one layer each.
"""
ANCHOR_FIRST = {
    1: ("0:1", "2:{last}"),
    2: ("0:0", "1:2", "3:{last}"),
    3: ("0:0", "1:1", "2:2", "3:{last}"),
}
ANCHOR_LAST = {
    1: ("2:output", "0:1"),
    2: ("2:output", "0:0", "1:1"),
    3: ("3:output", "0:0", "1:1", "2:2"),
}
LAYOUTS = [(count, is_first) for is_first in (True, False) for count in (1, 2, 3)]
NAMES = [f"{'first' if is_first else 'last'}, {count} workers" for count, is_first in LAYOUTS]
TEXTS = (
    "What is the colour of the sky?",
    "Name a fruit.",
    "Count to five.",
    "Say good night.",
    "Why do cats purr?",
    "Sing a song.",
)
MANY = tuple(
    Case(
        name=f"case {number}",
        tokens=4 + number % 5,
        frames=8 + number % 7,
        voice=("ethan", "chelsie")[number % 2],
        messages=(
            user(
                f"{TEXTS[number % len(TEXTS)]} {number}",
                *([wav_part(speech_like(0.4 + 0.1 * number, number))] if number % 4 == 0 else []),
            ),
        ),
    )
    for number in range(16)
)
"""Many cases, each requested greedily and with a seed. Their lengths differ, so that the batch
changes while it is computed.
"""
BATCH: dict[str, Any] = {"max_batch": 32}


def splits(count: int, *, is_first: bool) -> dict[Any, Split]:
    """Return the division of both stages among an anchor and `count` span workers each. `is_first`:
    whether the anchor has the first layers.
    """

    def split(last: str, returned: Any) -> Split:
        anchor, *workers = (ANCHOR_FIRST if is_first else ANCHOR_LAST)[count]
        return Split(
            anchor=anchor,
            workers=tuple(span.format(last=last) for span in workers),
            returned=returned if is_first else "rows",
        )

    # Only the Talker's anchor has its output head.
    return {THINKER: split("output", "logits"), TALKER: split("last", "last_rows")}


@pytest.fixture(scope="module")
def checkpoint(run_folder: Path) -> Path:
    return compute_once(
        run_folder / "tiny-omni-4", lambda folder: write_tiny_checkpoint(folder, sizes=FOUR_LAYERS)
    )


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> SpeechStages:
    return whole_speech(checkpoint, **BATCH)


@pytest.fixture(scope="module")
def few(checkpoint: Path) -> SpokenRequests:
    return requests(checkpoint)


@pytest.fixture(scope="module")
def many(checkpoint: Path) -> SpokenRequests:
    return requests(checkpoint, MANY)


def alone(whole: SpeechStages, asked: SpokenRequests) -> Spoken:
    """Return the answers of undivided stages, each computed without any other request."""
    spoken: Spoken = {}
    for name, spec in asked.specs.items():
        spoken |= whole.speak(SpokenRequests(specs={name: spec}, blobs=asked.blobs))
    return spoken


@pytest.fixture(scope="module")
def few_alone(whole: SpeechStages, few: SpokenRequests) -> Spoken:
    return alone(whole, few)


@pytest.fixture(scope="module")
def many_alone(whole: SpeechStages, many: SpokenRequests) -> Spoken:
    return alone(whole, many)


def assert_divided_as_whole(
    count: int,
    asked: SpokenRequests,
    expected: Spoken,
    whole: SpeechStages,
    checkpoint: Path,
    *,
    is_first: bool,
) -> None:
    both = splits(count, is_first=is_first)
    with divided_speech(checkpoint, both, whole, options={**INVARIANT, **BATCH}) as divided:
        assert divided.speak(asked) == expected
        assert divided.most_running == len(expected)
        assert_all_free(divided)
        assert [len(route.worker_at) for route in divided.routes.values()] == [count, count]


@pytest.mark.parametrize(("count", "is_first"), LAYOUTS, ids=NAMES)
def test_speech_of_each_number_of_span_workers_is_that_of_whole_stages(
    count: int,
    is_first: bool,
    few: SpokenRequests,
    few_alone: Spoken,
    whole: SpeechStages,
    checkpoint: Path,
) -> None:
    assert_divided_as_whole(count, few, few_alone, whole, checkpoint, is_first=is_first)


@pytest.mark.one_in(3, "batches of divided speech")
@pytest.mark.parametrize(("count", "is_first"), LAYOUTS, ids=NAMES)
def test_speech_of_32_requests_in_a_batch_is_that_of_each_alone_in_whole_stages(
    count: int,
    is_first: bool,
    many: SpokenRequests,
    many_alone: Spoken,
    whole: SpeechStages,
    checkpoint: Path,
) -> None:
    assert len(many.specs) == 32
    assert_divided_as_whole(count, many, many_alone, whole, checkpoint, is_first=is_first)


def test_speech_of_the_requests_differs(many_alone: Spoken) -> None:
    """The requests' answers differ; the comparisons would not notice answers that are all alike, or
    sampling without effect.
    """
    assert len({pcm for _, _, pcm in many_alone.values()}) == 32
    greedy, sampled = (
        [many_alone[f"{case.name} at {at}"][0] for case in MANY] for at in (0.0, 0.9)
    )
    assert sum(one != other for one, other in zip(greedy, sampled, strict=True)) > 8
