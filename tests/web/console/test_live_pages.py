"""Event streams of live pages, which send the whole page, then changed blocks, with the ids of the
fleet's events; and the stream of the log.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from fleet.core.events import WorkerLeft
from fleet.core.ids import WorkerId
from fleet.telemetry.views import FeedEntry, LogLine
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill
from tests.web.fake_telemetry import FakeTelemetry

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")


@dataclass(frozen=True, slots=True)
class StreamMessage:
    id: str
    data: str

    @property
    def targets(self) -> list[str]:
        return re.findall(r'hx-target="#([a-z-]+)"', self.data)


@contextmanager
def stream(
    gateway: ServedGateway, path: str, last: str | None = None
) -> Iterator[Callable[[], StreamMessage]]:
    """Yield a function that returns the next message of a page's event stream. `last`: value of the
    header Last-Event-ID.
    """
    headers = {"last-event-id": last} if last else {}
    with gateway.http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(
            "text/event-stream"
        )
        lines = answer.iter_lines()

        def next_message() -> StreamMessage:
            event_id, data = "", list[str]()
            for line in lines:
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    data.append(line[6:])
                elif not line and data:
                    return StreamMessage(event_id, "\n".join(data))
            raise AssertionError("the stream ended")

        yield next_message


def leave_event(gateway: ServedGateway, number: int) -> FeedEntry:
    return FeedEntry(
        id=f"{now_us() // 1000}-{number}", event=WorkerLeft(worker=WorkerId("w"), how="died")
    )


def test_stream_sends_whole_page_then_changed_blocks(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    with stream(gateway, "/console/live/workers") as next_message:
        assert next_message().targets == ["page"]
        first = telemetry.worker_list[0]
        telemetry.worker_list[0] = msgspec.structs.replace(first, state="died", ended_us=now_us())
        entry = leave_event(gateway, 1)
        gateway.client.telemetry.say(entry)
        message = next_message()
        assert (
            set(message.targets) == {"roles", "workers", "gone"}
            and f'id="g-{first.id}"' in message.data
        )
        assert message.id == entry.id, "the id is the event's"


def test_stream_omits_unchanged_blocks(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    with stream(gateway, "/console/live/queues") as next_message:
        next_message()
        for number in range(5):
            gateway.client.telemetry.say(leave_event(gateway, number))
        telemetry.letters = []
        assert next_message().targets == ["letters"], "the five events changed nothing else"


def test_reconnected_stream_sends_whole_page_with_last_id(gateway: ServedGateway) -> None:
    fill(gateway)
    with stream(gateway, "/console/live/jobs", last="1700000000000-3") as next_message:
        message = next_message()
        assert message.targets == ["page"] and message.id != ""


def test_stream_keeps_content_while_redis_is_unreachable(gateway: ServedGateway) -> None:
    fill(gateway)
    with stream(gateway, "/console/live/workers") as next_message:
        assert 'id="w-' in next_message().data
        gateway.client.unreachable = RedisUnreachable("no Redis answers")
        message = next_message()
        assert message.targets == ["trouble"] and "no Redis answers" in message.data
        gateway.client.unreachable = None
        message = next_message()
        assert message.targets == ["trouble"] and "no Redis answers" not in message.data


def test_page_shows_why_redis_refuses_writes(gateway: ServedGateway) -> None:
    fill(gateway)
    with stream(gateway, "/console/live/workers") as next_message:
        assert 'id="w-' in next_message().data
        gateway.client.telemetry.trouble = "Redis refuses writes (OOM), since its memory is full"
        message = next_message()
        assert message.targets == ["trouble"] and "Redis refuses writes (OOM)" in message.data
        gateway.client.telemetry.trouble = ""
        assert "Redis refuses writes" not in next_message().data


def test_page_opened_without_redis_fills_after_its_return(gateway: ServedGateway) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    with stream(gateway, "/console/live/now") as next_message:
        assert "not available" in next_message().data
        gateway.client.unreachable = None
        assert {"condition", "topology"} <= set(next_message().targets)


@pytest.mark.parametrize("path", ["/console/live/nothing", "/console/live/"])
def test_unknown_stream_is_not_found(gateway: ServedGateway, path: str) -> None:
    assert gateway.http.get(path).status_code == 404


def line(number: int, message: str = "said") -> LogLine:
    return LogLine(
        id=f"{1700000000000 + number}-0",
        at_us=now_us(),
        level="info",
        logger="l",
        message=f"{message} {number}",
        process="web",
    )


def append_lines(gateway: ServedGateway, *lines: LogLine) -> None:
    gateway.client.telemetry.lines += lines
    gateway.client.telemetry.say()


def ids(message: StreamMessage) -> list[str]:
    return re.findall(r'id="l-([0-9-]+)"', message.data)


def read_ids(next_message: Callable[[], StreamMessage], count: int) -> tuple[list[str], str]:
    """Read `count` log lines, the oldest first; return them with the id of the last message."""
    found: list[str] = []
    message = StreamMessage("", "")
    while len(found) < count:
        message = next_message()
        found += reversed(ids(message))
    return found, message.id


def test_log_stream_sends_each_line_once(gateway: ServedGateway) -> None:
    gateway.client.show(FakeTelemetry(lines=[line(0)]))
    with stream(gateway, f"/console/live/logs?after={line(0).id}") as next_message:
        append_lines(gateway, *(line(n) for n in range(1, 4)))
        found, last = read_ids(next_message, 3)
        assert found == [line(n).id for n in range(1, 4)] and last == line(3).id
    append_lines(gateway, *(line(n) for n in range(4, 300)))  # while no client is connected
    with stream(gateway, f"/console/live/logs?after={line(0).id}", last=last) as next_message:
        found, _ = read_ids(next_message, 296)
        assert found == [line(n).id for n in range(4, 300)]


def test_log_stream_reports_an_outage_and_continues(gateway: ServedGateway) -> None:
    gateway.client.show(FakeTelemetry(lines=[line(0)]))
    with stream(gateway, f"/console/live/logs?after={line(0).id}&q=wanted") as next_message:
        next_message()
        gateway.client.unreachable = RedisUnreachable("no Redis answers")
        append_lines(gateway, line(1))
        assert "no Redis answers" in next_message().data
        gateway.client.unreachable = None
        append_lines(gateway, line(2, "wanted"), line(3))
        found, _ = read_ids(next_message, 1)
        assert found == [line(2).id]
