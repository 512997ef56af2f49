"""Which answers are kept, by the fleet's events."""

from collections.abc import Iterator

from fleet.core.events import ChunkAppended, Event, RequestEnded, RequestSubmitted, TaskLost
from fleet.core.ids import EdgeName, Epoch, RequestId, StageName
from fleet.history.choice import MIN_COMPARED, AnswerChoice
from fleet.telemetry.views import FeedEntry

AUDIO, INNER = EdgeName("audio"), EdgeName("codes")
BEGAN_MS = 1_800_000_000_000


class FleetEvents:
    """Events of requests, fed to a choice. `kept`: what it has chosen."""

    def __init__(self) -> None:
        self.choice = AnswerChoice()
        self.kept: list[tuple[str, tuple[str, ...]]] = []
        self._at_ms = BEGAN_MS

    def say(self, event: Event | None, at_ms: int = 0) -> None:
        entry = FeedEntry(
            id=f"{self._at_ms + at_ms}-0",
            event=event,  # pyright: ignore[reportArgumentType]
            missed=event is None,
        )
        if (chosen := self.choice.follow(entry)) is not None:
            self.kept.append((chosen[0], tuple(chosen[1])))

    def answer(
        self,
        name: str,
        first_ms: int = 200,
        state: str = "finished",
        *,
        lost: bool = False,
        outputs: tuple[EdgeName, ...] = (AUDIO,),
    ) -> None:
        request = RequestId(name)
        self._at_ms += 10_000
        self.say(RequestSubmitted(request=request, graph="omni", outputs=outputs))
        self.say(ChunkAppended(request=request, edge=INNER, index=0), 10)
        self.say(ChunkAppended(request=request, edge=outputs[0], index=0), first_ms)
        if lost:
            stage = StageName("talker")
            self.say(TaskLost(request=request, stage=stage, epoch=Epoch(1)), first_ms + 1)
        self.say(ChunkAppended(request=request, edge=outputs[0], index=9), first_ms + 2)
        self.say(RequestEnded(request=request, state=state), first_ms + 3)


def many(number: int) -> Iterator[str]:
    return (f"req-{index}" for index in range(number))


def test_ordinary_answers_are_not_kept() -> None:
    feed = FleetEvents()
    for name in many(2 * MIN_COMPARED):
        feed.answer(name, 200 + hash(name) % 50, "finished")
    assert len(feed.kept) <= 0.05 * MIN_COMPARED, "only the slowest of those that differ"
    assert all(why == ("slow",) for _, why in feed.kept)


def test_failed_and_interrupted_answers_are_kept() -> None:
    feed = FleetEvents()
    feed.answer("a", state="failed")
    feed.answer("b", lost=True)
    feed.answer("c", state="failed", lost=True)
    feed.answer("d", state="aborted")
    assert feed.kept == [
        ("a", ("failed",)),
        ("b", ("interrupted",)),
        ("c", ("failed", "interrupted")),
    ]


def test_slowest_of_a_hundred_is_kept_and_only_among_its_kind() -> None:
    feed = FleetEvents()
    for index, name in enumerate(many(MIN_COMPARED)):
        feed.answer(name, 1000 - index)
    assert not feed.kept
    feed.answer("slow", 1001)
    feed.answer("aborted", 2000, "aborted")
    feed.answer("text", 5000, outputs=(EdgeName("text"),))
    feed.answer("fast", 300)
    assert feed.kept == [("slow", ("slow",))]


def test_interruption_of_a_request_from_before_is_kept() -> None:
    feed = FleetEvents()
    request = RequestId("before")
    feed.say(TaskLost(request=request, stage=StageName("lm"), epoch=Epoch(1)))
    feed.say(RequestEnded(request=request, state="finished"))
    assert feed.kept == [("before", ("interrupted",))]


def test_missed_events_forget_what_was_open() -> None:
    feed = FleetEvents()
    request = RequestId("a")
    feed.say(TaskLost(request=request, stage=StageName("lm"), epoch=Epoch(1)))
    feed.say(None)
    feed.say(RequestEnded(request=request, state="finished"))
    assert not feed.kept
