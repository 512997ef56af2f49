"""A page that changes under its reader keeps the reader's place: what is open, typed, chosen, selected, scrolled to, played."""

from collections.abc import Callable

import msgspec
from playwright.sync_api import Page, expect

from fleet.core.request_trace import TraceEvent
from tests.web.conftest import Gateway
from tests.web.console.busy_gateway import paths
from tests.web.console.watched_page import stir
from tests.web.fake_telemetry import FakeTelemetry, now_us

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
    """Every running request comes to its end: each of their rows changes."""
    telemetry.rows = [
        msgspec.structs.replace(row, state="finished", ended_us=row.created_us + 700_000) if row.state == "running" else row
        for row in telemetry.rows
    ]
    stir(telemetry)


def test_requests_keep_what_is_opened_typed_and_chosen(open_page: Callable[[str], Page], gateway: Gateway) -> None:
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


def test_requests_keep_what_is_selected_and_where_it_is_read(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/requests")
    row = page.locator("#request-rows tr").nth(20)
    name = row.get_attribute("id")
    row.locator("a").focus()
    page.evaluate("window.scrollTo(0, 600)")
    selected = page.evaluate(SELECT, name)
    top = row.evaluate(TOP)
    telemetry.rows.append(msgspec.structs.replace(telemetry.rows[-1], id=f"{telemetry.rows[-1].id[:-1]}f", created_us=now_us()))
    change_all_rows(telemetry)
    expect(page.locator("#request-rows .lead ~ td > .state-running")).to_have_count(0)
    assert page.evaluate(SELECTED) == selected and selected
    assert page.evaluate("document.activeElement.closest('tr').id") == name
    assert page.evaluate("window.scrollY") >= 600 and row.evaluate(TOP) == top, "whatever is told above it, it stays where it was"


def test_one_request_keeps_what_is_open_chosen_and_selected(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    story = next(story for story in telemetry.traces.values() if story.state == "running")
    page = open_page(f"/requests/{story.id}")
    page.locator("#history summary").click()
    span = page.locator("#lane-stage-talker .span-output")
    span.focus()
    expect(page.locator("#span-detail")).to_contain_text("output for")
    said = page.locator("#span-detail").inner_text()
    page.locator("#player").evaluate("player => { player.muted = true; player.marked = true; return player.play() }")
    page.evaluate("document.getElementById('history').scrollIntoView()")
    place = page.locator("#history summary").evaluate(TOP)
    selected = page.evaluate(SELECT, "e-codes")
    mark = TraceEvent(at_us=now_us(), what="finished", stage="talker", detail="came while it was read")
    ended = now_us()
    telemetry.traces[story.id] = msgspec.structs.replace(story, state="finished", ended_us=ended, marks=(*story.marks, mark))
    stir(telemetry)
    expect(page.locator("#summary .state").first).to_have_text("finished")
    expect(page.locator("#history")).to_contain_text("came while it was read")
    assert page.locator("#history").evaluate("details => details.open") is True
    assert page.evaluate(SELECTED) == selected and selected
    expect(span).to_be_focused()
    expect(page.locator("#span-detail")).to_have_text(said)
    assert abs(page.locator("#history summary").evaluate(TOP) - place) < 1, "what came above it pushed nothing away"
    assert page.locator("#player").evaluate("player => player.marked && !player.paused || player.ended")


def test_audio_player_stays_while_it_plays_and_goes_with_its_audio(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    story = next(story for story in telemetry.traces.values() if story.state == "running")
    page = open_page(f"/requests/{story.id}")
    player = page.locator("#player")
    player.evaluate("player => { player.muted = player.loop = true; return player.play() }")
    telemetry.edge_logs = {edge: log for edge, log in telemetry.edge_logs.items() if edge != (story.id, "audio")}
    telemetry.traces[story.id] = msgspec.structs.replace(story, state="finished", ended_us=now_us())
    stir(telemetry)
    expect(page.locator("#summary .state").first).to_have_text("finished")
    assert player.evaluate("player => !player.paused")
    player.evaluate("player => player.pause()")
    expect(page.get_by_text("The audio is no longer kept")).to_be_visible()
    expect(player).to_have_count(0)


def test_a_traceback_that_is_read_stays_open_while_lines_come(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page(paths(gateway)["worker"])
    line = page.locator("#log .logline:has(details)").first.get_attribute("id")
    page.locator(f'[id="{line}"] summary').click()
    worker = telemetry.worker_list[0].id
    new = msgspec.structs.replace(telemetry.lines[-1], id="4000000000000-0", worker=str(worker), trace="", message="a new line")
    telemetry.lines.append(new)
    stir(telemetry)
    expect(page.locator("#log")).to_contain_text("a new line")
    assert page.locator(f'[id="{line}"] details').evaluate("details => details.open") is True
    assert page.locator("#log details[open]").count() == 1
