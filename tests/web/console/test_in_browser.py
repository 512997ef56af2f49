"""The console's pages in a real browser: they change as the fleet does, go on after a cut, and can be worked without a mouse."""

import re
from collections.abc import Callable

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, Dialog, Page, Request, expect

from fleet.core.ids import RequestId
from fleet.core.jobs import BenchArguments
from fleet.core.telemetry import LogLine
from tests.support import wait_until
from tests.web.conftest import Gateway, Loaded, serving
from tests.web.console.busy_gateway import fill, paths
from tests.web.console.watched_page import complaints_of, stir, watched
from tests.web.fake_telemetry import FakeTelemetry, now_us
from tests.web.plausible import HOSTILE, request_id


def test_the_pages_follow_a_killed_worker(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/overview")
    stage = gateway.config.graph_declaration().stages[1].name
    expect(page.locator(f"#node-{stage}")).to_contain_text("1/1 up")
    telemetry.worker_list = [
        msgspec.structs.replace(view, state="died", ended_us=now_us()) if view.role == stage else view
        for view in telemetry.worker_list
    ]
    stir(telemetry)
    expect(page.locator(f"#node-{stage}")).to_contain_text("no worker")
    expect(page.locator("#trouble")).to_contain_text(f"fleet worker {stage}")
    page = open_page("/workers")
    expect(page.locator("#gone")).to_contain_text(stage)
    expect(page.locator("#gone .state-died").first).to_be_visible()


def test_rows_change_in_place(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    place = next(n for n, row in enumerate(telemetry.rows) if row.state == "running" and n > 90)
    row = telemetry.rows[place]
    page = open_page("/requests")
    cell = page.locator(f"#r-{row.id}")
    expect(cell.locator(".state").first).to_have_text("running")
    cell.evaluate("element => { element.marked = true }")
    telemetry.rows[place] = msgspec.structs.replace(row, state="finished", ended_us=row.created_us + 700_000)
    stir(telemetry)
    expect(cell).to_contain_text("700 ms")
    assert cell.evaluate("element => element.marked") is True, "the row is the same one, changed"


def new_request(telemetry: FakeTelemetry, number: int) -> str:
    template = telemetry.rows[-1]
    new = RequestId(request_id(5000 + number, now_us()))
    row = msgspec.structs.replace(template, id=new, state="running", created_us=now_us(), ended_us=0)
    telemetry.rows.append(row)
    stir(telemetry)
    return row.id


def test_new_rows_are_announced_to_a_reader_who_has_scrolled(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/requests")
    at_top = new_request(telemetry, 1)
    expect(page.locator(f"#r-{at_top}")).to_be_visible()
    page.evaluate("window.scrollTo(0, 900)")
    top = page.locator("#request-rows tr").first.get_attribute("id")
    held = new_request(telemetry, 2)
    expect(page.locator("#fresh")).to_have_text("1 new, show")
    assert page.locator(f"#r-{held}").count() == 0
    assert page.locator("#request-rows tr").first.get_attribute("id") == top
    page.locator("#fresh").click()
    expect(page.locator(f"#r-{held}")).to_be_visible()
    expect(page.locator("#fresh")).to_be_hidden()


def test_a_paused_page_stands_still_and_catches_up(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/requests")
    messages: list[str] = []
    page.expose_function("seen", lambda text: messages.append(str(text)))
    page.evaluate(
        "document.addEventListener('htmx:sse:before:message', (event) => window.seen(event.detail.message.data.slice(0, 40)))"
    )
    page.locator("#pause").click()
    expect(page.locator("#link")).to_have_text("paused")
    fresh = new_request(telemetry, 3)
    wait_until(lambda: page.evaluate("1") and messages, "a message that the page does not show")
    assert page.locator(f"#r-{fresh}").count() == 0
    page.locator("#pause").click()
    expect(page.locator(f"#r-{fresh}")).to_be_visible()


def cut(page: Page) -> None:
    """End the stream under the page, as a lost connection does."""
    page.evaluate("document.getElementById('live')._htmx.sse.reader.cancel()")


def test_a_cut_stream_goes_on_where_it_was(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/logs?q=after+the+cut")
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    told(telemetry, 1)
    expect(page.locator(".logline")).to_have_count(1)
    cut(page)
    told(telemetry, 2, 3)
    expect(page.locator(".logline .said")).to_have_text([f"after the cut {n}" for n in (3, 2, 1)])
    again = next(request for request in asked if "/console/live/logs" in request.url)
    assert again.headers["last-event-id"] == line_id(1)


def line_id(number: int) -> str:
    return f"{4_000_000_000_000 + number}-0"


def told(telemetry: FakeTelemetry, *numbers: int) -> None:
    telemetry.lines += [
        LogLine(
            id=line_id(n), at_us=now_us(), level="info", logger="l", process="web", message=f"after the cut {n}"
        )
        for n in numbers
    ]  # fmt: skip
    telemetry.say()


def test_a_page_catches_up_after_a_cut(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/queues")
    asked: list[Request] = []
    page.on("request", lambda request: asked.append(request))
    last = stir(telemetry)
    gateway.client.telemetry.letters = []
    expect(page.locator("#letters .empty")).to_be_visible()
    cut(page)
    telemetry.queue_list = [msgspec.structs.replace(telemetry.queue_list[0], queue_depth=77), *telemetry.queue_list[1:]]
    expect(page.locator("#queues")).to_contain_text("77")
    again = next(request for request in asked if "/console/live/queues" in request.url)
    assert re.fullmatch(r"\d+-\d+", again.headers["last-event-id"]) and again.headers["last-event-id"] <= last


def test_orders_call_the_public_api_and_say_what_they_did(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/workers")
    worker = next(view for view in telemetry.worker_list if view.role == "talker" and view.state == "ready").id
    row = page.locator(f'[id="w-{worker}"]')
    questions: list[str] = []

    def say_no(dialog: Dialog) -> None:
        questions.append(dialog.message)
        dialog.dismiss()

    for order in ("Drain", "Stop"):
        page.once("dialog", say_no)
        row.get_by_role("button", name=order).focus()
        page.keyboard.press("Enter")
        wait_until(lambda: page.evaluate("1") and order in "".join(questions), "a question")  # noqa: B023
    assert all("fleet worker talker" in words and "running tasks" in words for words in questions)
    assert telemetry.orders == [], "a dismissed order is not given"
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Drain").click()
    expect(page.locator(".toast")).to_contain_text("takes nothing new")
    expect(row.locator(".state")).to_have_text("draining")
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Stop").click()
    expect(row.locator(".state")).to_have_text("leaving")
    assert [order for _, order in telemetry.orders] == ["drain", "stop"]


def test_orders_to_one_of_several_workers_are_given_without_a_question(
    open_page: Callable[[str], Page], gateway: Gateway
) -> None:
    telemetry = gateway.client.telemetry
    first, second = [view for view in telemetry.worker_list if view.role == "thinker" and view.state == "ready"]
    page = open_page("/workers")
    page.on("dialog", lambda dialog: complaints_of(page).append(f"a question: {dialog.message}"))
    row = page.locator(f'[id="w-{first.id}"]')
    row.get_by_role("button", name="Drain").click()
    expect(row.locator(".state")).to_have_text("draining")
    row.get_by_role("button", name="Stop").click()
    expect(row.locator(".state")).to_have_text("leaving")
    assert telemetry.orders == [(first.id, "drain"), (first.id, "stop")]
    alone = page.locator(f'[id="w-{second.id}"]').get_by_role("button", name="Drain")
    expect(alone).to_have_attribute("hx-confirm", re.compile("No other worker of thinker takes tasks"))


def test_a_refused_order_says_why(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/workers")
    view = telemetry.worker_list[0]
    telemetry.worker_list[0] = msgspec.structs.replace(view, ended_us=now_us(), state="died")
    page.locator(f'[id="w-{view.id}"]').get_by_role("button", name="Drain").click()
    expect(page.locator(".toast.bad")).to_contain_text("takes no orders")


def test_a_retried_request_can_be_opened(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    page = open_page(paths(gateway)["request"])
    page.get_by_role("button", name="Retry").click()
    page.locator(".toast a").click()
    expect(page.locator("#summary")).to_contain_text("submitted")
    expect(page.locator("#summary").get_by_role("link", name=re.compile("^req-"))).to_be_visible()


def test_a_job_is_queued_with_its_arguments(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    page = open_page("/jobs")
    page.get_by_label("Measure").select_option("voice")
    page.get_by_label("Requests").fill("3")
    page.get_by_role("button", name="Queue it").click()
    expect(page.locator("#jobs")).to_contain_text("bench measure=voice requests=3")
    assert gateway.client.telemetry.job_list[0].arguments == BenchArguments(measure="voice", requests=3)


def test_what_a_reader_opened_stays_open(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    telemetry = gateway.client.telemetry
    page = open_page("/jobs")
    page.locator("#tb-job-2 summary").click()
    running = telemetry.job_list[1]
    assert running.progress is not None
    progress = msgspec.structs.replace(running.progress, done=19, note="19 of 20 requests")
    telemetry.job_list[1] = msgspec.structs.replace(running, progress=progress)
    expect(page.locator("#jobs")).to_contain_text("19 of 20 requests")
    assert page.locator("#tb-job-2").evaluate("element => element.open") is True
    expect(page.locator("#tb-job-2 pre")).to_contain_text("Traceback")


def test_a_request_can_be_walked_with_the_keyboard(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    page = open_page(paths(gateway)["request"])
    here = page.url
    page.locator(".span-whole").focus()
    expect(page.locator("#span-detail")).to_contain_text("request failed")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#span-detail")).not_to_contain_text("request failed")
    assert page.url == here, "inside the lanes the arrows walk the spans"
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: url != here)
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(here)


def test_slash_searches_and_the_first_tab_skips_to_the_content(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    page = open_page("/requests")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    wanted = gateway.client.telemetry.rows[3].id
    page.keyboard.type(wanted[4:])
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(rf"q={wanted[4:]}"))
    expect(page.locator("#request-rows tr")).to_have_count(1)


def test_the_chosen_theme_is_remembered(open_page: Callable[[str], Page]) -> None:
    page = open_page("/overview")
    page.emulate_media(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Theme: dark")
    assert (dark := page.evaluate(ground)) != light
    page = open_page("/workers")
    assert page.evaluate(ground) == dark
    page.locator("#theme").click()
    assert page.evaluate(ground) == light


def test_nobodys_text_becomes_markup_even_when_it_comes_live(open_page: Callable[[str], Page], gateway: Gateway) -> None:
    page = open_page("/logs")
    page.on("dialog", lambda dialog: complaints_of(page).append(f"a script ran: {dialog.message}"))
    telemetry = gateway.client.telemetry
    hostile = f'{HOSTILE}<img src=x onerror="alert(1)"></hx-partial>'
    telemetry.lines.append(
        LogLine(id=line_id(9), at_us=now_us(), level="error", logger="l", process=hostile, message=hostile, worker=hostile)
    )
    telemetry.say()
    expect(page.locator(f'[id="l-{line_id(9)}"] .said')).to_have_text(hostile)
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 768, 1440])
def test_no_page_is_wider_than_its_window(browser: Browser, gateway: Gateway, scheme: str, width: int) -> None:
    fill(gateway)
    page = watched(browser)
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    wide: dict[str, object] = {}
    for name, path in paths(gateway).items():
        page.goto(gateway.url + path)
        found = page.evaluate("document.documentElement.scrollWidth")
        if found > width:
            wide[name] = found
    page.close()
    assert not wide and not complaints_of(page)


def test_a_locked_console_is_opened_and_worked_by_a_browser(browser: Browser, loaded: Loaded) -> None:
    with serving(loaded, api_key="secret") as gateway:
        fill(gateway)
        page = watched(browser)
        page.goto(f"{gateway.url}/workers")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{gateway.url}/workers")
        expect(page.locator("#link")).to_have_text("live")
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name=re.compile("^Drain")).first.click()
        expect(page.locator(".toast.good")).to_be_visible()
        assert len(gateway.client.telemetry.orders) == 1
        (cookie,) = page.context.cookies()
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url(f"{gateway.url}/console/login")
        page.context.add_cookies([cookie])  # pyright: ignore[reportArgumentType]
        page.goto(f"{gateway.url}/workers")
        page.wait_for_url(f"{gateway.url}/console/login?next=/workers")
        page.close()
        assert not complaints_of(page), complaints_of(page)


def test_open_page_leads_to_the_login_once_its_login_has_ended(
    browser: Browser, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.http.sse.PING_S", 0.2)
    with serving(loaded, api_key="secret") as gateway:
        fill(gateway)
        page = browser.new_page()
        page.goto(f"{gateway.url}/workers")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        (cookie,) = page.context.cookies()
        httpx.post(f"{gateway.url}/console/logout", headers={"cookie": f"{cookie.get('name')}={cookie.get('value')}"})
        page.wait_for_url(f"{gateway.url}/console/login?next=/workers")
        page.close()
