"""Rendering of every page for a busy fleet, for an empty one, and without Redis: valid HTML,
bounded size, escaped data.
"""

import re
from collections.abc import Iterator
from urllib.parse import quote

import msgspec
import pytest

from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import Job, RoleQueue, TaskRef, WorkerView
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.console import html_audit
from tests.web.console.busy_gateway import LIVE_PAGES, fill, paths
from tests.web.divided import ANCHOR, GAP, SECOND
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible import build_worker
from tests.web.plausible_requests import HOSTILE, worker_id

MAX_PAGE_BYTES = 100_000
NAMES = (*LIVE_PAGES, "request", "worker", "session", "kept")


@pytest.fixture(scope="module")
def busy_gateway(loaded: Loaded) -> Iterator[ServedGateway]:
    with serving(loaded) as gateway:
        fill(gateway)
        yield gateway


def page_of(gateway: ServedGateway, path: str, status: int = 200) -> str:
    answer = gateway.http.get(path)
    assert answer.status_code == status, answer.text[:500]
    assert (
        answer.headers["content-type"] == "text/html; charset=utf-8"
        and answer.headers["cache-control"] == "no-store"
    )
    assert len(answer.content) < MAX_PAGE_BYTES
    assert not (faults := html_audit.read(answer.text).faults), faults
    return answer.text


@pytest.mark.parametrize("name", NAMES)
def test_page_renders_a_busy_fleet(busy_gateway: ServedGateway, name: str) -> None:
    page = page_of(busy_gateway, paths(busy_gateway)[name])
    assert '<p class="trouble"' not in page and 'aria-current="page"' in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    "name", ["now", "requests", "request", "queues", "jobs", "logs", "session"]
)
def test_page_escapes_html_in_data(busy_gateway: ServedGateway, name: str) -> None:
    page = page_of(busy_gateway, paths(busy_gateway)[name])
    assert HOSTILE in "".join(html_audit.read(page).text)


def test_unreadable_job_can_be_deleted_and_not_retried(gateway: ServedGateway) -> None:
    job = Job(id="j-1", kind="", arguments=None, state="unreadable", created_us=0, error="damaged")
    gateway.client.telemetry.job_list = [job]
    page = page_of(gateway, "/jobs")
    assert (
        "damaged" in page
        and "Delete j-1" in page
        and "Retry j-1" not in page
        and "another version" not in page
    )


@pytest.mark.parametrize("path", ["/now", "/queues"])
def test_role_that_loads_shows_its_progress(gateway: ServedGateway, path: str) -> None:
    talker = RoleQueue(
        role=RoleName("talker"), stage=StageName("talker"), starting=2, loaded_percent=34
    )
    gateway.client.telemetry.queue_list = [talker]
    shown = " ".join(" ".join(html_audit.read(page_of(gateway, path)).text).split())
    assert "2 starting (34 % loaded)" in shown
    gateway.client.telemetry.queue_list = [msgspec.structs.replace(talker, loaded_percent=None)]
    assert "2 starting" in page_of(gateway, path).replace("</span>", "").replace(
        '<span class="num">', ""
    )


def shown_on(gateway: ServedGateway, path: str) -> str:
    return " ".join(" ".join(html_audit.read(page_of(gateway, path)).text).split())


def test_workers_page_shows_routes_of_divided_models(busy_gateway: ServedGateway) -> None:
    shown = shown_on(busy_gateway, "/workers")
    for part in (
        "a pass takes 9.0 ms , 500 µs of it between processes",
        "0:3 anchor",
        "12 % 900 µs 100 µs 100 µs 310 MB 620 MB",
        "26 % 1.9 ms 300 µs 100 µs 310 MB 620 MB",
        "57 % most 3.8 ms 1.2 ms 100 µs 310 MB 620 MB",
        "1.5 GB 61 500",
        f"{GAP} Layers",
        "12:output no worker",
        "standby stands by: it replaces a worker that is lost",
        "leaving is leaving: it gets no layers; it has loaded layers 4:11",
    ):
        assert part in shown, part
    page = page_of(busy_gateway, "/workers")
    assert 'aria-label="compute 3.8 ms, wait 1.2 ms, send 100 µs"' in page
    # of a bar of 100, which the longest process fills: 3800, 1200 and 100 of 5100 us
    assert (
        'class="level" width="74.5"' in page
        and 'x="74.5" width="23.5"' in page
        and 'x="98.0" width="2.0"' in page
    )


def test_routes_are_those_of_the_chosen_stage(busy_gateway: ServedGateway) -> None:
    for role in ("thinker", "thinker.span"):
        assert "Layers divided among workers" in shown_on(busy_gateway, f"/workers?role={role}")
    for role in ("talker", "gateway"):
        assert "Layers divided" not in shown_on(busy_gateway, f"/workers?role={role}")


def test_worker_page_shows_its_part_of_a_divided_model(busy_gateway: ServedGateway) -> None:
    shown = shown_on(busy_gateway, f"/workers/{worker_id('thinker.span', SECOND)}")
    assert (
        f"Layers 12:output of {worker_id('thinker', ANCHOR)}" in shown
        and "Share of a pass 57 %" in shown
    )
    assert (
        "Compute / wait / send 3.8 ms / 1.2 ms / 100 µs" in shown
        and "Bytes in / out 310 MB / 620 MB" in shown
    )
    assert "Layers 0:3 , anchor" in shown_on(
        busy_gateway, f"/workers/{worker_id('thinker', ANCHOR)}"
    )
    assert "Share of a pass" not in shown_on(busy_gateway, f"/workers/{worker_id('talker', 1)}")


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_page_of_empty_fleet_names_the_next_step(gateway: ServedGateway, name: str) -> None:
    gateway.client.voice.held.clear()
    page = page_of(gateway, f"/{name}")
    # the fake always has workers; the queues page has three such texts
    if name not in ("workers", "queues"):
        assert page.count('class="empty"') >= 1


@pytest.mark.parametrize("name", [name for name in NAMES if name != "kept"])
def test_page_shows_unreachable_redis(gateway: ServedGateway, name: str) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    one = {"request": "/requests/req-0", "worker": "/workers/w", "session": "/sessions/s"}
    page = page_of(gateway, one.get(name, f"/{name}"), status=503)
    assert (
        "no Redis answers" in page
        and "no worker" not in page
        and "No request has failed" not in page
    )
    assert not re.search(r'class="empty"[^>]*>(?!Not available)', page), (
        "a list that cannot be read is not shown as empty"
    )
    assert 'class="num">0<' not in page, "no count either"


@pytest.mark.parametrize("path", ["/requests/req-0", "/workers/unknown"])
def test_unknown_object_has_a_page(gateway: ServedGateway, path: str) -> None:
    page = page_of(gateway, path, status=404)
    assert 'class="trouble"' in page and 'class="empty"' in page


def test_page_of_a_dead_worker_shows_what_it_held_and_who_has_it(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    first, second = telemetry.rows[0], telemetry.rows[1]
    stage, present = StageName("thinker"), worker_id("thinker")
    expired = RequestId("req-expired")
    ended_us = now_us() - 2 * 24 * 3600 * 1_000_000
    dead = build_worker(
        "thinker",
        77,
        state="died",
        cause="SIGKILL",
        started_us=ended_us - 5_000_000,
        ended_us=ended_us,
        pages_used=613,
        pages_total=1024,
        held=tuple(TaskRef(request=r, stage=stage) for r in (first.id, second.id, expired)),
    )
    telemetry.ended_long_ago = [dead]
    telemetry.entries = [
        JournalEntry(
            id=f"{n}-0",
            at_us=at_us,
            what="recovered",
            worker=present,
            request=request,
            stage=stage,
            pause_us=pause_us,
        )
        for n, (request, at_us, pause_us) in enumerate(
            [
                (first.id, ended_us - 1_000_000, 111_000),
                (first.id, ended_us + 742_000, 742_000),
                (first.id, ended_us + 9_000_000, 333_000),
            ]
        )
    ]
    page = page_of(gateway, f"/workers/{dead.id}")
    rows = re.findall(r'<tr id="h-(.+?)-thinker">(.*?)</tr>', page, re.DOTALL)
    held = {request: re.sub(r"<[^>]+>|\s+", " ", row) for request, row in rows}
    assert list(held) == [first.id, second.id, expired]
    assert f'href="/requests/{first.id}"' in page and f'href="/workers/{quote(present)}"' in page
    assert "742 ms" in held[first.id] and present in held[first.id] and "finished" in held[first.id]
    assert "ms" not in held[second.id].split(present)[1], "nobody claimed it again"
    assert "no longer stored" in held[expired]
    assert "SIGKILL" in page and "613" in page and "kept for 14 days" in page
    assert "Last requests" not in page and "Drain" not in page


def test_page_of_a_dead_worker_with_all_its_tasks_is_bounded(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    held = tuple(TaskRef(request=row.id, stage=StageName("code2wav")) for row in telemetry.rows)
    dead = build_worker("code2wav", 79, state="died", ended_us=now_us(), held=held[:100])
    telemetry.ended_long_ago = [dead]
    telemetry.lines = [msgspec.structs.replace(line, worker=dead.id) for line in telemetry.lines]
    assert page_of(gateway, f"/workers/{dead.id}").count('<tr id="h-') == 100


def test_page_of_an_ended_worker_without_tasks_says_so(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    left = build_worker("thinker", 78, state="left", started_us=1, ended_us=now_us())
    telemetry.ended_long_ago = [left]
    assert "It held no tasks when it ended." in page_of(gateway, f"/workers/{left.id}")


@pytest.mark.parametrize("path", ["/requests?state=odd", "/requests?min_ms=x", "/logs?level=loud"])
def test_invalid_filter_is_named(gateway: ServedGateway, path: str) -> None:
    field = path.partition("?")[2].partition("=")[0]
    assert f"{field}: " in page_of(gateway, path, status=400)


def test_filters_are_query_parameters(busy_gateway: ServedGateway) -> None:
    everything = page_of(busy_gateway, "/requests")
    failed = page_of(busy_gateway, "/requests?state=failed")
    assert everything.count('<tr id="r-') == 50 and failed.count('<tr id="r-') == 12
    assert "<option selected>failed</option>" in failed
    shown = [row.id for row in busy_gateway.client.telemetry.rows if f'id="r-{row.id}"' in failed]
    assert {row.state for row in busy_gateway.client.telemetry.rows if row.id in shown} == {
        "failed"
    }


def test_request_pages_continue_by_id(busy_gateway: ServedGateway) -> None:
    seen: list[str] = []
    path = "/requests?kind=text"
    while path:
        reader = html_audit.read(page := page_of(busy_gateway, path))
        seen += [name.removeprefix("r-") for name in reader.ids if name.startswith("r-")]
        _, found, rest = page.partition('rel="next" href="')
        path = rest.partition('"')[0].replace("&amp;", "&") if found else ""
    wanted = [row.id for row in busy_gateway.client.telemetry.rows if row.kind == "text"]
    assert seen == sorted(wanted, reverse=True)


def test_arrows_open_neighbouring_requests(busy_gateway: ServedGateway) -> None:
    ids = sorted((row.id for row in busy_gateway.client.telemetry.rows), reverse=True)
    for here, way, there in ((1, "newer", ids[0]), (1, "older", ids[2])):
        answer = busy_gateway.http.get(f"/requests/{ids[here]}/{way}")
        assert answer.status_code == 303 and answer.headers["location"] == f"/requests/{there}"
    for end, way in ((ids[0], "newer"), (ids[-1], "older"), ("req-unknown", "newer")):
        assert busy_gateway.http.get(f"/requests/{end}/{way}").headers["location"] == "/requests"


def test_unknown_request_is_reported_as_not_existing(busy_gateway: ServedGateway) -> None:
    answer = busy_gateway.http.get("/requests/req-unknown")
    assert answer.status_code == 404 and "Not available" not in answer.text
    assert "This request is not stored." in answer.text


def test_read_only_gateway_has_no_command_buttons(loaded: Loaded) -> None:
    with serving(bounded(loaded, read_only=True)) as gateway:
        fill(gateway)
        for path in paths(gateway).values():
            page = page_of(gateway, path)
            assert "hx-post" not in page and "hx-delete" not in page and "read-only" in page


def test_kept_answers_are_shown_while_redis_is_unreachable(gateway: ServedGateway) -> None:
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    assert "this server's host keeps" in shown_on(gateway, "/kept")


def test_now_page_shows_stages_of_text_graph(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        gateway.client.show(FakeTelemetry())
        assert 'id="node-lm"' in page_of(gateway, "/now")


def test_curl_command_contains_the_request_body(gateway: ServedGateway) -> None:
    answer = gateway.create(messages=[{"role": "user", "content": "it's <b>me</b>"}], seed=3)
    request = answer._request_id  # pyright: ignore[reportPrivateUsage]
    text = "".join(html_audit.read(page_of(gateway, f"/requests/{request}")).text)
    assert (
        f'curl {gateway.url}/v1/chat/completions -H "Authorization: Bearer $FLEET_API_KEY"' in text
    )
    assert '"seed": 3' in text and "<b>me</b>" in text


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({"host": "localhost:4711"}, "http://localhost:4711"),
        ({"host": "[::1]:4711"}, "'http://[::1]:4711"),
        ({"host": "localhost", "x-forwarded-proto": "https"}, "https://localhost"),
        (
            {"x-forwarded-host": "fleet.example, inner", "x-forwarded-proto": "https, http"},
            "https://fleet.example",
        ),
        ({"x-forwarded-host": "a;b$(c)", "x-forwarded-proto": "ftp"}, "'http://a;b$(c)"),
    ],
)
def test_curl_command_names_the_origin_of_the_page(
    gateway: ServedGateway, headers: dict[str, str], origin: str
) -> None:
    answer = gateway.create(seed=3)
    path = f"/requests/{answer._request_id}"  # pyright: ignore[reportPrivateUsage]
    text = "".join(html_audit.read(gateway.http.get(path, headers=headers).text).text)
    assert f"curl {origin}/v1/chat/completions" in text and ":8000" not in text


def test_audio_player_is_shown_only_while_audio_is_stored(busy_gateway: ServedGateway) -> None:
    telemetry = busy_gateway.client.telemetry
    trace = next(
        trace for trace in telemetry.traces.values() if (trace.id, "audio") in telemetry.edge_logs
    )
    assert "<audio" in page_of(busy_gateway, f"/requests/{trace.id}")
    log = telemetry.edge_logs.pop((trace.id, "audio"))
    page = page_of(busy_gateway, f"/requests/{trace.id}")
    telemetry.edge_logs[trace.id, "audio"] = log
    assert (
        "<audio" not in page
        and "The audio is no longer stored: it is deleted a minute after the request ends." in page
    )


def test_commands_to_last_ready_worker_of_role_are_confirmed(gateway: ServedGateway) -> None:
    fill(gateway)
    telemetry = gateway.client.telemetry
    only = next(view for view in telemetry.worker_list if view.role == "talker")
    other = msgspec.structs.replace(only, id=WorkerId("other@host:9:z"))

    def confirmed(*workers: WorkerView) -> list[str]:
        telemetry.worker_list = list(workers)
        shown = "".join(page_of(gateway, path) for path in ("/workers", f"/workers/{only.id}"))
        question = (
            r'hx-confirm="[^"]+No other worker of \w+ accepts tasks. New requests that '
            r"need it are refused with 503"
        )
        return sorted(
            set(re.findall(rf'hx-post="/v1/fleet/workers/([^"]+)"[^>]* {question}', shown))
        )

    orders = [f"{only.id}/drain", f"{only.id}/stop"]
    assert confirmed(only) == orders
    for state in ("ready", "standby"):
        assert confirmed(only, msgspec.structs.replace(other, state=state)) == [], state
    for state in ("draining", "leaving", "late"):
        found = confirmed(only, msgspec.structs.replace(other, state=state))
        assert [where for where in found if where.startswith(only.id)] == orders, state
    assert f"{only.id}/drain" in confirmed(only, msgspec.structs.replace(other, role="code2wav"))
    assert f"{only.id}/drain" in confirmed(
        only, msgspec.structs.replace(other, state="died", ended_us=1)
    )
