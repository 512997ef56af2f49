"""The Now page and the navigation: the sentence is true, its remedy works, and the last hour has
its marks and numbers without JavaScript.
"""

import asyncio
import json
import re

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import RoleName, StageName
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import RoleQueue, RoleView
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.console import html_audit
from tests.web.console.busy_gateway import fill
from tests.web.fake_client import worker_view
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_requests import worker_id
from web.console.pages.now import find_remedy
from web.console.shell import ROOMS

TALKER = RoleName("talker")


def part_of(page: str, name: str) -> str:
    """Return the visible text of the section `name` of a page."""
    _, _, rest = page.partition(f'<section id="{name}"')
    section = f"<section {rest.partition('</section>')[0]}</section>"
    return " ".join(" ".join(html_audit.read(section).text).split())


def condition_of(gateway: ServedGateway, status: int = 200) -> str:
    answer = gateway.http.get("/now")
    assert answer.status_code == status
    return part_of(answer.text, "condition")


def change_talker(gateway: ServedGateway, **changes: object) -> None:
    telemetry = gateway.client.telemetry
    listed = asyncio.run(telemetry.workers())
    telemetry.worker_list = [
        msgspec.structs.replace(view, **changes) if view.role == TALKER else view for view in listed
    ]
    gateway.client.missing = [TALKER]


def test_calm_fleet_is_well(gateway: ServedGateway) -> None:
    said = condition_of(gateway)
    assert "All is well : 0 answers now" in said
    assert "none refused" not in said, "nothing is known of the hour yet"
    assert "answers are counted from now on; events are known from now on" in said


def test_incident_is_told_with_deaths_pauses_and_refusals(gateway: ServedGateway) -> None:
    fill(gateway)
    page = gateway.http.get("/now").text
    said = part_of(page, "condition")
    assert "Degraded since" in said
    assert "talker died 4 times, the last time (SIGKILL) at" in said
    assert "4 answers paused, longest 2.1 s" in said and "none lost" in said
    assert "5 refused (overloaded)" in said
    assert f'href="/workers/{worker_id("talker", 33)}"'.replace("@", "%40") in page.replace(
        "@", "%40"
    )


def test_drained_last_worker_is_down_and_can_be_resumed(gateway: ServedGateway) -> None:
    change_talker(gateway, state="draining", running=3)
    page = gateway.http.get("/now").text
    said = part_of(page, "condition")
    assert (
        "no worker of talker accepts tasks (1 draining); requests that need it are refused" in said
    )
    assert "Down" in said and "Resume " in said and "fleet worker talker" in said
    assert re.search(r'hx-post="/v1/fleet/workers/[^"]+/resume"', page)
    assert "✕ no worker" not in part_of(page, "topology"), "it is not absent"


def test_absent_worker_is_named_with_the_command_that_starts_one(gateway: ServedGateway) -> None:
    gateway.client.missing = ["talker"]
    said = condition_of(gateway)
    assert "no worker of talker accepts tasks; requests that need it are refused" in said
    assert "fleet worker talker" in said and "Copy the command" in said and "Resume" not in said


def test_starting_worker_needs_no_other_one(gateway: ServedGateway) -> None:
    change_talker(gateway, state="died", ended_us=1)
    starting = RoleQueue(role=TALKER, stage=StageName("talker"), starting=1, loaded_percent=40)
    gateway.client.telemetry.queue_list = [starting]
    said = condition_of(gateway)
    assert "talker has no worker now (1 starting, 40 % loaded); requests wait for one" in said
    assert "Degraded" in said and "fleet worker" not in said and "refused" not in said


def test_unreachable_redis_is_down_and_nothing_is_asserted(gateway: ServedGateway) -> None:
    fill(gateway)
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    page = gateway.http.get("/now")
    assert page.status_code == 503
    assert part_of(page.text, "condition").endswith("Down : no Redis answers .")
    assert "Not available" in part_of(page.text, "hour")
    assert "Not available" in part_of(page.text, "events")


def test_redis_that_refuses_writes_is_down_once(gateway: ServedGateway) -> None:
    fill(gateway)
    gateway.client.telemetry.trouble = "Redis refuses writes (OOM), since its memory is full"
    page = gateway.http.get("/now").text
    gateway.client.telemetry.trouble = ""
    assert page.count("Redis refuses writes") == 1
    assert "Down : Redis refuses writes" in part_of(page, "condition")


def test_read_only_console_shows_the_command_and_no_button(loaded: Loaded) -> None:
    with serving(bounded(loaded, read_only=True)) as gateway:
        change_talker(gateway, state="draining")
        page = gateway.http.get("/now").text
        assert "fleet worker talker" in page and "hx-post" not in page


@pytest.mark.parametrize(
    ("state", "role", "resumed", "command"),
    [
        ("draining", RoleView(role=TALKER), ("w",), "fleet worker talker"),
        ("leaving", RoleView(role=TALKER), (), "fleet worker talker"),
        ("standby", RoleView(role=TALKER), (), ""),
        ("late", RoleView(role=TALKER, starting=1), (), ""),
        ("ready", RoleView(role=TALKER), (), ""),
    ],
)
def test_remedy_follows_from_the_workers_of_the_role(
    state: str, role: RoleView, resumed: tuple[str, ...], command: str
) -> None:
    workers = [worker_view("w", "talker", state=state)]
    missing = [] if state == "ready" else [TALKER]
    found = find_remedy(missing, {TALKER: 1}, workers, [role], [])
    assert (found.resumable, found.command, found.dead) == (resumed, command, "")


def test_role_below_its_workers_has_a_remedy_and_the_last_death_a_link() -> None:
    workers = [worker_view("w", "talker")]
    died = JournalEntry(id="1-1", at_us=1, what="died", worker=workers[0].id, role="talker")
    found = find_remedy([], {TALKER: 2}, workers, [], [died])
    assert (found.command, found.number, found.dead) == ("fleet worker talker", 0, "w")


def test_one_more_worker_is_ordered_where_fleet_up_manages_the_role() -> None:
    role = RoleView(role=TALKER, managed=True, wanted=2)
    assert find_remedy([TALKER], {TALKER: 2}, [], [role], []).number == 3


def test_events_and_marks_lead_to_what_explains_them(gateway: ServedGateway) -> None:
    fill(gateway)
    page = gateway.http.get("/now").text
    marks = page.partition('id="marks"')[2].partition("</ol>")[0]
    for row, target in (
        ("deaths", "/workers/talker@"),
        ("orders", "/workers/code2wav@"),
        ("failures", "/requests?from="),
        ("refusals", "/logs?before="),
        ("starts", "/workers/talker@"),
        ("conductor", "/logs?process=conductor"),
    ):
        part = marks.partition(f'id="marks-{row}"')[2].partition("</li>")[0]
        assert f'href="{target}' in part and "<title>" in part, row
    assert "SIGKILL" in part_of(page, "events")


def test_numbers_of_the_charts_are_in_the_page(gateway: ServedGateway) -> None:
    fill(gateway)
    page = gateway.http.get("/now").text
    islands = {
        name: json.loads(text)
        for name, text in re.findall(
            r'<script type="application/json" id="(\w+)">(.*?)</script>', page
        )
    }
    whole, recent = islands["whole"], islands["recent"]
    points = gateway.client.telemetry.points
    assert whole["at_s"] == points[0].at_us // 1_000_000
    assert {len(values) for values in whole["columns"].values()} == {len(points)}
    assert recent["newest"]["columns"].keys() == whole["columns"].keys()
    assert recent["to_s"] - recent["from_s"] == 3600 and recent["to_s"] * 10**6 > now_us() - 10**7
    for chart in recent["charts"]:
        assert f'aria-label="{chart["description"]}' in page


def test_stream_sends_the_hour_once_and_then_its_last_minute(gateway: ServedGateway) -> None:
    fill(gateway)
    page = gateway.http.get("/now").text
    whole, recent = (
        len(page.partition(f'id="{name}">')[2].partition("</script>")[0])
        for name in ("whole", "recent")
    )
    assert whole > 8 * recent


def test_page_without_a_series_or_journal_says_so(gateway: ServedGateway) -> None:
    gateway.client.show(FakeTelemetry())
    page = gateway.http.get("/now").text
    assert "No event is recorded for this time" in page
    assert "no task measured in the hour" in part_of(page, "topology")
    assert '<p class="trouble"' not in page


def test_former_address_redirects(gateway: ServedGateway) -> None:
    answer = gateway.http.get("/overview")
    assert answer.status_code == 308 and answer.headers["location"] == "/now"


def test_every_page_is_in_one_of_five_rooms(gateway: ServedGateway) -> None:
    assert [room.label for room in ROOMS] == ["Talk", "Now", "Answers", "Fleet", "Logs"]
    for room in ROOMS:
        for _, path, label in room.pages:
            page = gateway.http.get(path).text
            top = page.partition('<nav aria-label="Pages">')[2].partition("</nav>")[0]
            several = len(room.pages) > 1
            current = f'href="{room.path}" aria-current="{"true" if several else "page"}"'
            assert current in top and top.count("aria-current") == 1
            second = page.partition(f'aria-label="Pages of {room.label}"')[2].partition("</nav>")[0]
            assert bool(second) == several
            if several:
                assert f'<a href="{path}" aria-current="page">{label}</a>' in second
                assert second.count("<li>") == len(room.pages)
            assert 'href="/docs"' in page
