"""A live update of a page keeps form input, selection, focus, scroll position, opened details and
playing audio.
"""

import msgspec
import pytest
from playwright.sync_api import expect

from fleet.core.clock import now_us
from fleet.telemetry.trace import TraceEvent
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import paths
from tests.web.console.watched_page import OpenPage, publish_event
from tests.web.fake_telemetry import FakeTelemetry

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

SELECT = """id => {
  const range = document.createRange();
  range.selectNodeContents(document.getElementById(id));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  return getSelection().toString();
}"""
TOP = "element => element.getBoundingClientRect().top"
SELECTED = "getSelection().toString()"


def change_all_rows(telemetry: FakeTelemetry) -> None:
    """Finish every running request, so that every row of the page changes."""
    telemetry.rows = [
        msgspec.structs.replace(row, state="finished", ended_us=row.created_us + 700_000)
        if row.state == "running"
        else row
        for row in telemetry.rows
    ]
    publish_event(telemetry)


def test_requests_page_keeps_form_input_on_update(
    open_page: OpenPage, gateway: ServedGateway
) -> None:
    page = open_page("/requests?kind=text")
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Took at least").fill("25")
    page.get_by_label("Stage").select_option("talker")
    search = page.locator("#search")
    search.fill("req-12345")
    search.evaluate("field => field.setSelectionRange(4, 6)")
    assert page.locator("#request-rows .state-running").count() > 0
    change_all_rows(gateway.client.telemetry)
    expect(page.locator("#request-rows .lead ~ td > .state-running")).to_have_count(0)
    expect(search).to_be_focused()
    expect(search).to_have_value("req-12345")
    assert search.evaluate("field => [field.selectionStart, field.selectionEnd]") == [4, 6]
    expect(page.get_by_label("Took at least")).to_be_visible()
    expect(page.get_by_label("Took at least")).to_have_value("25")
    expect(page.get_by_label("Stage")).to_have_value("talker")
    assert page.url.endswith("/requests?kind=text")


def test_requests_page_keeps_selection_and_scroll_position_on_update(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/requests")
    row = page.locator("#request-rows tr").nth(20)
    name = row.get_attribute("id")
    row.locator("a").focus()
    page.evaluate("window.scrollTo(0, 600)")
    selected = page.evaluate(SELECT, name)
    top = row.evaluate(TOP)
    telemetry.rows.append(
        msgspec.structs.replace(
            telemetry.rows[-1], id=f"{telemetry.rows[-1].id[:-1]}f", created_us=now_us()
        )
    )
    change_all_rows(telemetry)
    expect(page.locator("#request-rows .lead ~ td > .state-running")).to_have_count(0)
    assert page.evaluate(SELECTED) == selected and selected
    assert page.evaluate("document.activeElement.closest('tr').id") == name
    assert page.evaluate("window.scrollY") >= 600 and row.evaluate(TOP) == top, (
        "a new row above it does not move it"
    )


def test_request_page_keeps_details_focus_and_selection_on_update(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    trace = next(trace for trace in telemetry.traces.values() if trace.state == "running")
    page = open_page(f"/requests/{trace.id}")
    page.locator("#history summary").click()
    span = page.locator("#lane-stage-talker .span-output")
    span.focus()
    expect(page.locator("#span-detail")).to_contain_text("output for")
    text = page.locator("#span-detail").inner_text()
    page.locator("#player").evaluate(
        "player => { player.muted = true; player.marked = true; return player.play() }"
    )
    page.evaluate("document.getElementById('history').scrollIntoView()")
    place = page.locator("#history summary").evaluate(TOP)
    selected = page.evaluate(SELECT, "e-codes")
    event = TraceEvent(at_us=now_us(), what="finished", stage="talker", detail="a new event")
    ended = now_us()
    telemetry.traces[trace.id] = msgspec.structs.replace(
        trace, state="finished", ended_us=ended, events=(*trace.events, event)
    )
    publish_event(telemetry)
    expect(page.locator("#summary .state").first).to_have_text("finished")
    expect(page.locator("#history")).to_contain_text("a new event")
    assert page.locator("#history").evaluate("details => details.open") is True
    assert page.evaluate(SELECTED) == selected and selected
    expect(span).to_be_focused()
    expect(page.locator("#span-detail")).to_have_text(text)
    assert abs(page.locator("#history summary").evaluate(TOP) - place) < 1, (
        "new content above it does not move it"
    )
    assert page.locator("#player").evaluate(
        "player => player.marked && !player.paused || player.ended"
    )


def test_audio_player_is_removed_only_after_playback(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    trace = next(trace for trace in telemetry.traces.values() if trace.state == "running")
    page = open_page(f"/requests/{trace.id}")
    player = page.locator("#player")
    player.evaluate("player => { player.muted = player.loop = true; return player.play() }")
    telemetry.edge_logs = {
        edge: log for edge, log in telemetry.edge_logs.items() if edge != (trace.id, "audio")
    }
    telemetry.traces[trace.id] = msgspec.structs.replace(trace, state="finished", ended_us=now_us())
    publish_event(telemetry)
    expect(page.locator("#summary .state").first).to_have_text("finished")
    assert player.evaluate("player => !player.paused")
    player.evaluate("player => player.pause()")
    expect(page.get_by_text("The audio is no longer stored")).to_be_visible()
    expect(player).to_have_count(0)


def test_open_traceback_stays_open_on_new_lines(
    open_page: OpenPage, telemetry: FakeTelemetry, gateway: ServedGateway
) -> None:
    page = open_page(paths(gateway)["worker"])
    line = page.locator("#log .logline:has(details)").first.get_attribute("id")
    page.locator(f'[id="{line}"] summary').click()
    worker = telemetry.worker_list[0].id
    new = msgspec.structs.replace(
        telemetry.lines[-1],
        id="4000000000000-0",
        worker=str(worker),
        trace="",
        message="a new line",
    )
    telemetry.lines.append(new)
    publish_event(telemetry)
    expect(page.locator("#log")).to_contain_text("a new line")
    assert page.locator(f'[id="{line}"] details').evaluate("details => details.open") is True
    assert page.locator("#log details[open]").count() == 1
