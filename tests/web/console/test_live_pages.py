"""The stream of a page: it is sent whole, then what changed, with ids of the fleet's own streams; a log's tail loses no line."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from fleet.core.errors import RedisUnreachable
from fleet.core.events import WorkerLeft
from fleet.core.ids import WorkerId
from fleet.core.telemetry import FeedEntry, LogLine
from tests.web.conftest import Gateway
from tests.web.console.busy_gateway import fill
from tests.web.fake_telemetry import FakeTelemetry, now_us


@dataclass(frozen=True, slots=True)
class Message:
    id: str
    data: str

    @property
    def targets(self) -> list[str]:
        return re.findall(r'hx-target="#([a-z-]+)"', self.data)


@contextmanager
def stream(gateway: Gateway, path: str, last: str | None = None) -> Iterator[Callable[[], Message]]:
    """The messages of a page's stream, one a call."""
    headers = {"last-event-id": last} if last else {}
    with gateway.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()

        def following() -> Message:
            mark, data = "", list[str]()
            for line in lines:
                if line.startswith("id: "):
                    mark = line[4:]
                elif line.startswith("data: "):
                    data.append(line[6:])
                elif not line and data:
                    return Message(mark, "\n".join(data))
            raise AssertionError("the stream ended")

        yield following


def left(gateway: Gateway, number: int) -> FeedEntry:
    return FeedEntry(id=f"{now_us() // 1000}-{number}", event=WorkerLeft(worker=WorkerId("w"), how="died"))


def test_a_page_is_sent_whole_and_then_what_changed(gateway: Gateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    with stream(gateway, "/console/live/workers") as following:
        assert following().targets == ["page"]
        first = telemetry.worker_list[0]
        telemetry.worker_list[0] = msgspec.structs.replace(first, state="died", ended_us=now_us())
        entry = left(gateway, 1)
        gateway.client.telemetry.say(entry)
        message = following()
        assert set(message.targets) == {"roles", "workers", "gone"} and f'id="g-{first.id}"' in message.data
        assert message.id == entry.id, "the id of the stream is the event's"


def test_what_did_not_change_is_not_sent(gateway: Gateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    with stream(gateway, "/console/live/queues") as following:
        following()
        for number in range(5):
            gateway.client.telemetry.say(left(gateway, number))
        telemetry.letters = []
        assert following().targets == ["letters"], "the five events changed nothing else"


def test_a_page_that_comes_back_is_sent_whole_under_its_last_id(gateway: Gateway) -> None:
    fill(gateway)
    with stream(gateway, "/console/live/jobs", last="1700000000000-3") as following:
        message = following()
        assert message.targets == ["page"] and message.id != ""


def test_redis_away_keeps_what_was_shown(gateway: Gateway) -> None:
    fill(gateway)
    with stream(gateway, "/console/live/workers") as following:
        assert 'id="w-' in following().data
        gateway.client.unreachable = RedisUnreachable("no Redis answers")
        message = following()
        assert message.targets == ["trouble"] and "no Redis answers" in message.data
        gateway.client.unreachable = None
        message = following()
        assert message.targets == ["trouble"] and "no Redis answers" not in message.data


def test_a_page_opened_while_redis_was_away_fills_when_it_is_back(gateway: Gateway) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    with stream(gateway, "/console/live/overview") as following:
        assert "not known now" in following().data
        gateway.client.unreachable = None
        assert {"trouble", "topology"} <= set(following().targets)


@pytest.mark.parametrize("path", ["/console/live/nothing", "/console/live/"])
def test_there_is_no_stream_of_what_is_no_page(gateway: Gateway, path: str) -> None:
    assert gateway.http.get(path).status_code == 404


def line(number: int, message: str = "said") -> LogLine:
    return LogLine(
        id=f"{1700000000000 + number}-0", at_us=now_us(), level="info", logger="l", message=f"{message} {number}", process="web"
    )


def told(gateway: Gateway, *lines: LogLine) -> None:
    gateway.client.telemetry.lines += lines
    gateway.client.telemetry.say()


def ids(message: Message) -> list[str]:
    return re.findall(r'id="l-([0-9-]+)"', message.data)


def read_ids(following: Callable[[], Message], count: int) -> tuple[list[str], str]:
    """So many lines, oldest first, and the id of the last message."""
    found: list[str] = []
    message = Message("", "")
    while len(found) < count:
        message = following()
        found += reversed(ids(message))
    return found, message.id


def test_the_tail_of_the_log_loses_and_repeats_no_line(gateway: Gateway) -> None:
    gateway.client.show(FakeTelemetry(lines=[line(0)]))
    with stream(gateway, f"/console/live/logs?after={line(0).id}") as following:
        told(gateway, *(line(n) for n in range(1, 4)))
        found, last = read_ids(following, 3)
        assert found == [line(n).id for n in range(1, 4)] and last == line(3).id
    told(gateway, *(line(n) for n in range(4, 300)))  # while nobody is connected
    with stream(gateway, f"/console/live/logs?after={line(0).id}", last=last) as following:
        found, _ = read_ids(following, 296)
        assert found == [line(n).id for n in range(4, 300)]


def test_the_tail_says_when_it_cannot_go_on_and_goes_on(gateway: Gateway) -> None:
    gateway.client.show(FakeTelemetry(lines=[line(0)]))
    with stream(gateway, f"/console/live/logs?after={line(0).id}&q=wanted") as following:
        following()
        gateway.client.unreachable = RedisUnreachable("no Redis answers")
        told(gateway, line(1))
        assert "no Redis answers" in following().data
        gateway.client.unreachable = None
        told(gateway, line(2, "wanted"), line(3))
        found, _ = read_ids(following, 1)
        assert found == [line(2).id]
