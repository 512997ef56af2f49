"""The Now page in a real browser: charts are drawn and follow the fleet, one zoom moves the whole
hour, a click or key opens the answers of a time, and the page does not grow.
"""

import re
from typing import cast
from urllib.parse import quote

import msgspec
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from fleet.core.clock import now_us
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import WorkerId
from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import SERIES_STEP_S
from tests.support import wait_until
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill
from tests.web.console.watched_page import OpenPage, publish_event
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.voice.browsers import visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

NUM_NODES = "document.querySelectorAll('*').length"
INKED = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let inked = 0;
  for (let at = 3; at < data.length; at += 4) inked += data[at] > 0;
  return inked / (data.length / 4);
}"""
SIZE = "strip => [strip.getAttribute('width'), strip.getAttribute('x')]"


def canvas(page: Page, key: str) -> Locator:
    return page.locator(f"#canvas-{key} canvas")


def over(page: Page, key: str) -> Locator:
    return page.locator(f"#canvas-{key} .u-over")


def add_death(telemetry: FakeTelemetry, number: int) -> WorkerId:
    worker, at_us = WorkerId(f"talker@machine:{5000 + number}:{number:06x}"), now_us()
    entry = JournalEntry(
        id=f"{at_us // 1000}-{number}",
        at_us=at_us,
        what="died",
        worker=worker,
        role="talker",
        detail="SIGSEGV",
    )
    telemetry.entries.append(entry)
    publish_event(telemetry)
    return worker


def test_all_four_charts_are_drawn(open_page: OpenPage) -> None:
    page = open_page("/now")
    expect(page.locator("#hour canvas")).to_have_count(4)
    for key in ("ended", "first", "tasks", "listening"):
        assert canvas(page, key).evaluate(INKED) > 0.005, key
    labels = page.locator("#hour-axis text").all_text_contents()
    assert len(labels) >= 4 and all(re.fullmatch(r"\d\d:\d\d", label) for label in labels)
    expect(page.locator("#zone")).not_to_be_empty()


def test_death_appears_in_sentence_marks_and_events(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/now")
    worker = add_death(telemetry, 1)
    expect(page.locator("#condition")).to_contain_text("talker died 5 times", timeout=2000)
    expect(page.locator("#events li").first).to_contain_text("SIGSEGV")
    expect(page.locator("#marks-deaths .lane-note")).to_have_text("5")
    link = page.locator("#condition").get_by_role("link", name="The last dead worker")
    expect(link).to_have_attribute("href", f"/workers/{quote(worker)}")


def test_nodes_of_the_page_stay_bounded_over_many_events(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/now")
    expect(page.locator("#hour canvas")).to_have_count(4)
    canvas(page, "ended").evaluate("canvas => { canvas.marked = true }")
    nodes: list[int] = []
    for number in range(200):
        worker = add_death(telemetry, number)
        if number % 40 == 39:
            expect(page.locator("#events li").first).to_contain_text(worker)
            nodes.append(cast("int", page.evaluate(NUM_NODES)))
    assert max(nodes) - min(nodes) <= 12, nodes
    assert canvas(page, "ended").evaluate("canvas => canvas.marked") is True
    expect(page.locator("#condition")).to_contain_text("talker died 204 times")


def test_charts_follow_the_series(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/now")
    expect(page.locator("#hour canvas")).to_have_count(4)
    last = telemetry.points[-1]
    step_us = SERIES_STEP_S * 1_000_000
    telemetry.points = [
        *telemetry.points[1:],
        msgspec.structs.replace(last, at_us=last.at_us + step_us, first_audio_p50_ms=77_000.0),
    ]
    publish_event(telemetry)
    expect(page.locator("#chart-first figcaption")).to_contain_text("77 s", timeout=2000)
    expect(page.locator("#plot-first")).to_have_attribute("aria-label", re.compile("p50 77 s"))
    page.locator("#plot-first").press("ArrowRight")
    expect(page.locator("#hour-detail")).to_contain_text("p50 77,000 ms")


def test_drag_zooms_all_charts_and_marks(open_page: OpenPage) -> None:
    page = open_page("/now")
    whole = page.locator("#whole-hour")
    expect(whole).to_be_hidden()
    expect(page.locator("#hour canvas")).to_have_count(4)
    strips = page.locator("#hour .zoomed")
    over(page, "tasks").scroll_into_view_if_needed()
    frame = over(page, "tasks").bounding_box()
    assert frame is not None
    middle = frame["y"] + frame["height"] / 2
    page.mouse.move(frame["x"] + frame["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(frame["x"] + frame["width"] * 0.75, middle, steps=4)
    page.mouse.up()
    expect(whole).to_be_visible()
    assert page.url.endswith("/now"), "a drag opens nothing"
    sizes = [
        [float(part.removesuffix("%")) for part in cast("list[str]", strip.evaluate(SIZE))]
        for strip in strips.all()
    ]
    for width, x in sizes:
        assert 380 < width < 420 and -210 < x < -190
    before = page.locator("#hour-axis text").all_text_contents()
    whole.click()
    expect(whole).to_be_hidden()
    assert page.locator("#hour-axis text").all_text_contents() != before
    assert strips.first.get_attribute("width") == "100%"


def test_click_opens_the_answers_of_that_time(open_page: OpenPage) -> None:
    page = open_page("/now")
    over(page, "ended").click(position={"x": 300, "y": 40})
    page.wait_for_url(re.compile(r"/requests\?from=[^&]+Z&to=[^&]+Z"))
    expect(page.get_by_label("Live from")).to_have_value(re.compile(r"^\d{4}-.*Z$"))


def test_keyboard_moves_zooms_and_opens(open_page: OpenPage) -> None:
    page = open_page("/now")
    plot = page.locator("#plot-ended")
    plot.press("ArrowLeft")
    expect(page.locator("#hour-detail")).to_contain_text("Answers per second: finished")
    plot.press("+")
    expect(page.locator("#whole-hour")).to_be_visible()
    plot.press("-")
    expect(page.locator("#whole-hour")).to_be_hidden()
    plot.press("ArrowLeft")
    plot.press("Enter")
    page.wait_for_url(re.compile(r"/requests\?from="))


def test_arrows_move_between_marks(open_page: OpenPage) -> None:
    page = open_page("/now")
    marks = page.locator("#marks-deaths a")
    marks.last.focus()
    expect(page.locator("#hour-detail")).to_contain_text("died: SIGKILL")
    page.keyboard.press("ArrowLeft")
    expect(marks.nth(marks.count() - 2)).to_be_focused()


def test_equal_percentiles_are_one_line(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    telemetry.points = [
        msgspec.structs.replace(point, first_audio_p95_ms=point.first_audio_p50_ms)
        for point in telemetry.points
    ]
    page = open_page("/now")
    expect(page.locator("#legend-first")).to_contain_text("every answer")
    expect(page.locator("#legend-first .u-series")).to_have_count(2)


def test_chart_colours_follow_the_theme(open_page: OpenPage) -> None:
    page = open_page("/now")
    expect(page.locator("#hour canvas")).to_have_count(4)
    marker = page.locator("#legend-tasks .u-series .u-marker").nth(1)
    page.emulate_media(color_scheme="light")
    light = page.evaluate("() => document.querySelector('#canvas-tasks canvas').toDataURL()")
    page.emulate_media(color_scheme="dark")
    wait_until(
        lambda: (
            page.evaluate("() => document.querySelector('#canvas-tasks canvas').toDataURL()")
            != light
        ),
        "the chart in the other theme",
    )
    expect(marker).to_be_visible()


def test_drained_worker_is_resumed_from_the_sentence(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    place = next(n for n, view in enumerate(telemetry.worker_list) if view.role == "talker")
    view = telemetry.worker_list[place]
    telemetry.worker_list = [one for one in telemetry.worker_list if one.role != "talker"]
    telemetry.worker_list.append(msgspec.structs.replace(view, state="draining"))
    telemetry.missing_of = lambda: []
    page = open_page("/now")
    page.get_by_role("button", name=f"Resume {view.id}").click()
    expect(page.locator(".toast")).to_contain_text("accepts tasks again")
    assert telemetry.orders == [(view.id, "resume")]
    expect(page.get_by_role("button", name=f"Resume {view.id}")).to_have_count(0)


def test_page_opened_without_redis_draws_the_hour_after_its_return(
    browser: Browser, gateway: ServedGateway
) -> None:
    fill(gateway)
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    with visiting(browser, expected=("status of 503",)) as page:
        page.goto(f"{gateway.url}/now")
        expect(page.locator("#condition")).to_contain_text("no Redis answers")
        gateway.client.unreachable = None
        expect(page.locator("#hour canvas")).to_have_count(4)
        for _ in range(20):
            page.locator("#plot-tasks").press("Shift+ArrowLeft")
        expect(page.locator("#hour-detail")).to_contain_text("Tasks: thinker")
        expect(page.locator("#hour-detail")).not_to_contain_text("thinker –")


def test_page_without_javascript_says_where_the_numbers_are(gateway: ServedGateway) -> None:
    page = gateway.http.get("/now").text
    assert page.count('<noscript><p class="dim">Drawn with JavaScript.') == 4
    assert "/v1/fleet/series" in page
