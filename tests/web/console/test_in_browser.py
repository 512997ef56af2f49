"""The console's pages in a real browser: live updates, reconnects, commands and keyboard use."""

import re

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, Dialog, Page, Request, Route, expect

from fleet.core.clock import now_us
from fleet.core.ids import RequestId
from fleet.core.jobs import BenchArguments
from fleet.telemetry.views import LogLine
from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.console.busy_gateway import fill, paths
from tests.web.console.watched_page import OpenPage, publish_event
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_answers import add_answers
from tests.web.plausible_requests import HOSTILE, request_id
from tests.web.voice.browsers import visiting

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")


def test_pages_show_a_killed_worker(
    open_page: OpenPage, telemetry: FakeTelemetry, gateway: ServedGateway
) -> None:
    page = open_page("/now")
    stage = gateway.config.graph_declaration().stages[1].name
    expect(page.locator(f"#node-{stage}")).to_contain_text("1/1 up")
    telemetry.worker_list = [
        msgspec.structs.replace(view, state="died", ended_us=now_us())
        if view.role == stage
        else view
        for view in telemetry.worker_list
    ]
    publish_event(telemetry)
    expect(page.locator(f"#node-{stage}")).to_contain_text("no worker")
    expect(page.locator("#condition")).to_contain_text(f"no worker of {stage} accepts tasks")
    start = page.get_by_role("button", name=f"Start one {stage}")
    expect(start).to_be_visible()
    telemetry.queue_list = [
        msgspec.structs.replace(queue, managed=False) for queue in telemetry.queue_list
    ]
    publish_event(telemetry)
    expect(page.locator("#remedy")).to_have_text(f"fleet worker {stage}")
    expect(start).to_have_count(0)
    page = open_page("/workers")
    expect(page.locator("#gone")).to_contain_text(stage)
    expect(page.locator("#gone .state-died").first).to_be_visible()


def test_request_row_changes_in_place(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    place = next(n for n, row in enumerate(telemetry.rows) if row.state == "running" and n > 90)
    row = telemetry.rows[place]
    page = open_page("/requests")
    cell = page.locator(f"#r-{row.id}")
    expect(cell.locator(".state").first).to_have_text("running")
    cell.evaluate("element => { element.marked = true }")
    telemetry.rows[place] = msgspec.structs.replace(
        row, state="finished", ended_us=row.created_us + 700_000
    )
    publish_event(telemetry)
    expect(cell).to_contain_text("700 ms")
    assert cell.evaluate("element => element.marked") is True, "the element of the row is reused"


def new_request(telemetry: FakeTelemetry, number: int) -> str:
    template = telemetry.rows[-1]
    new = RequestId(request_id(5000 + number, now_us()))
    row = msgspec.structs.replace(
        template, id=new, state="running", created_us=now_us(), ended_us=0
    )
    telemetry.rows.append(row)
    publish_event(telemetry)
    return row.id


def test_new_rows_are_counted_while_page_is_scrolled(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/requests")
    at_top = new_request(telemetry, 1)
    expect(page.locator(f"#r-{at_top}")).to_be_visible()
    page.evaluate("window.scrollTo(0, 900)")
    top = page.locator("#request-rows tr").first.get_attribute("id")
    new = new_request(telemetry, 2)
    expect(page.locator("#fresh")).to_have_text("1 new, show")
    assert page.locator(f"#r-{new}").count() == 0
    assert page.locator("#request-rows tr").first.get_attribute("id") == top
    page.locator("#fresh").click()
    expect(page.locator(f"#r-{new}")).to_be_visible()
    expect(page.locator("#fresh")).to_be_hidden()


def test_paused_page_updates_after_resume(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/requests")
    messages: list[str] = []
    page.expose_function("seen", lambda text: messages.append(str(text)))
    page.evaluate(
        "document.addEventListener('htmx:sse:before:message', (event) => "
        "window.seen(event.detail.message.data.slice(0, 40)))"
    )
    page.locator("#pause").click()
    expect(page.locator("#link")).to_have_text("paused")
    fresh = new_request(telemetry, 3)
    wait_until(lambda: page.evaluate("1") and messages, "a message that the page ignores")
    assert page.locator(f"#r-{fresh}").count() == 0
    page.locator("#pause").click()
    expect(page.locator(f"#r-{fresh}")).to_be_visible()


def cut_stream(page: Page) -> None:
    """End the page's event stream as a lost connection does."""
    page.evaluate("document.getElementById('live')._htmx.sse.reader.cancel()")


def test_cut_log_stream_continues_at_last_line(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/logs?q=after+the+cut")
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    append_lines(telemetry, 1)
    expect(page.locator(".logline")).to_have_count(1)
    cut_stream(page)
    append_lines(telemetry, 2, 3)
    expect(page.locator(".logline .said")).to_have_text([f"after the cut {n}" for n in (3, 2, 1)])
    reconnect = next(request for request in requests if "/console/live/logs" in request.url)
    assert reconnect.headers["last-event-id"] == line_id(1)


def line_id(number: int) -> str:
    return f"{4_000_000_000_000 + number}-0"


def append_lines(telemetry: FakeTelemetry, *numbers: int) -> None:
    telemetry.lines += [
        LogLine(
            id=line_id(n),
            at_us=now_us(),
            level="info",
            logger="l",
            process="web",
            message=f"after the cut {n}",
        )
        for n in numbers
    ]
    telemetry.say()


def test_page_updates_after_cut_stream(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/queues")
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    last = publish_event(telemetry)
    telemetry.letters = []
    expect(page.locator("#letters .empty")).to_be_visible()
    cut_stream(page)
    telemetry.queue_list = [
        msgspec.structs.replace(telemetry.queue_list[0], queue_depth=77),
        *telemetry.queue_list[1:],
    ]
    expect(page.locator("#queues")).to_contain_text("77")
    reconnect = next(request for request in requests if "/console/live/queues" in request.url)
    assert (
        re.fullmatch(r"\d+-\d+", reconnect.headers["last-event-id"])
        and reconnect.headers["last-event-id"] <= last
    )


def test_worker_commands_show_their_result(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/workers")
    worker = next(
        view for view in telemetry.worker_list if view.role == "talker" and view.state == "ready"
    ).id
    row = page.locator(f'[id="w-{worker}"]')
    questions: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        questions.append(dialog.message)
        dialog.dismiss()

    for command in ("Drain", "Stop"):
        page.once("dialog", dismiss)
        row.get_by_role("button", name=command).focus()
        page.keyboard.press("Enter")
        wait_until(
            lambda: page.evaluate("1") and command in "".join(questions),  # noqa: B023
            "the dialog",
        )
    assert all("fleet worker talker" in text and "running tasks" in text for text in questions)
    assert telemetry.orders == [], "a dismissed command is not sent"
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Drain").click()
    expect(page.locator(".toast")).to_contain_text("accepts no new tasks")
    expect(row.locator(".state")).to_have_text("draining")
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Stop").click()
    expect(row.locator(".state")).to_have_text("leaving")
    assert [order for _, order in telemetry.orders] == ["drain", "stop"]


def test_commands_to_one_of_several_workers_need_no_confirmation(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    telemetry.worker_list = [view for view in telemetry.worker_list if view.part is None]
    first, second = [
        view for view in telemetry.worker_list if view.role == "thinker" and view.state == "ready"
    ]
    page = open_page("/workers")
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    row = page.locator(f'[id="w-{first.id}"]')
    row.get_by_role("button", name="Drain").click()
    expect(row.locator(".state")).to_have_text("draining")
    row.get_by_role("button", name="Stop").click()
    expect(row.locator(".state")).to_have_text("leaving")
    assert telemetry.orders == [(first.id, "drain"), (first.id, "stop")] and not dialogs
    alone = page.locator(f'[id="w-{second.id}"]').get_by_role("button", name="Drain")
    expect(alone).to_have_attribute(
        "hx-confirm", re.compile("No other worker of thinker accepts tasks")
    )


@pytest.mark.parametrize("is_removed", [False, True], ids=["button-stays", "button-removed"])
def test_command_to_a_worker_that_dies_meanwhile_says_so(
    open_page: OpenPage, telemetry: FakeTelemetry, is_removed: bool
) -> None:
    page = open_page("/workers")
    held = stop_dying_worker(page, telemetry, is_removed=is_removed)
    held.continue_()
    expect(page.locator(".toast.bad")).to_contain_text("is gone already")


def test_command_without_an_answer_says_so_after_its_button_is_removed(
    browser: Browser, gateway: ServedGateway
) -> None:
    fill(gateway)
    expected = ("Failed to load resource", "htmx:error")
    with visiting(browser, gateway.url + "/workers", expected=expected) as page:
        expect(page.locator("#link")).to_have_text("live")
        held = stop_dying_worker(page, gateway.client.telemetry, is_removed=True)
        held.abort()
        expect(page.locator(".toast.bad")).to_contain_text("The gateway did not answer")


def stop_dying_worker(page: Page, telemetry: FakeTelemetry, *, is_removed: bool) -> Route:
    """Click the Stop button of a worker that dies then; return the request, which is held back.
    `is_removed`: wait until an update of the page has removed the button.
    """
    view = telemetry.worker_list[0]
    row = page.locator(f'[id="w-{view.id}"]')
    held: list[Route] = []
    page.route("**/stop", lambda route: held.append(route))
    row.get_by_role("button", name="Stop").click()
    wait_until(lambda: page.evaluate("1") and held, "the request")
    telemetry.worker_list[0] = msgspec.structs.replace(view, ended_us=now_us(), state="died")
    if is_removed:
        publish_event(telemetry)
        expect(row).to_have_count(0)
    return held[0]


def test_number_of_workers_is_ordered_with_the_keyboard(
    open_page: OpenPage, telemetry: FakeTelemetry
) -> None:
    page = open_page("/fleet")
    row = page.locator("#role-talker")
    row.get_by_role("button", name="One talker more").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("talker: 2 wanted")
    questions: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        questions.append(dialog.message)
        dialog.dismiss()

    page.once("dialog", dismiss)
    row.get_by_role("button", name="One talker less").focus()
    page.keyboard.press("Enter")
    wait_until(lambda: page.evaluate("1") and questions, "the question")
    assert "Leave talker without a worker?" in questions[0]
    assert telemetry.scaled == [("talker", 2, "")], "a dismissed order is not sent"


@pytest.mark.parametrize("path", ["/fleet", "/workers", "/transfers"])
def test_phone_shows_every_page_of_the_room(open_page: OpenPage, path: str) -> None:
    page = open_page(path)
    page.set_viewport_size({"width": 360, "height": 740})
    for link in page.locator("nav.pages a").all():
        box = link.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["height"] >= 24
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_retried_request_can_be_opened(open_page: OpenPage, gateway: ServedGateway) -> None:
    page = open_page(paths(gateway)["request"])
    page.get_by_role("button", name="Retry").click()
    page.locator(".toast a").click()
    expect(page.locator("#summary")).to_contain_text("submitted")
    expect(page.locator("#summary").get_by_role("link", name=re.compile("^req-"))).to_be_visible()


def test_job_form_queues_job_with_arguments(open_page: OpenPage, gateway: ServedGateway) -> None:
    page = open_page("/jobs")
    page.get_by_label("Measure").select_option("voice")
    page.get_by_label("Requests").fill("3")
    page.get_by_role("button", name="Queue it").click()
    expect(page.locator("#jobs")).to_contain_text("bench measure=voice requests=3")
    assert (
        gateway.client.telemetry.job_list[0].arguments
        == BenchArguments(measure="voice", requests=3).as_json()
    )


def test_opened_details_stay_open_on_update(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/jobs")
    page.locator("#tb-job-2 summary").click()
    running = telemetry.job_list[1]
    assert running.progress is not None
    progress = msgspec.structs.replace(running.progress, done=19, note="19 of 20 requests")
    telemetry.job_list[1] = msgspec.structs.replace(running, progress=progress)
    expect(page.locator("#jobs")).to_contain_text("19 of 20 requests")
    assert page.locator("#tb-job-2").evaluate("element => element.open") is True
    expect(page.locator("#tb-job-2 pre")).to_contain_text("Traceback")


def test_arrow_keys_move_between_spans_and_requests(
    open_page: OpenPage, gateway: ServedGateway
) -> None:
    page = open_page(paths(gateway)["request"])
    here = page.url
    page.locator(".span-whole").focus()
    expect(page.locator("#span-detail")).to_contain_text("request failed")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#span-detail")).not_to_contain_text("request failed")
    assert page.url == here, "inside the lanes the arrow keys move between spans"
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda url: url != here)
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(here)


def test_submission_is_shown_in_the_zone_of_the_browser(
    browser: Browser, gateway: ServedGateway
) -> None:
    fill(gateway)
    page = browser.new_page(timezone_id="Asia/Tokyo", locale="en-GB")
    page.goto(gateway.url + paths(gateway)["request"])
    shown = page.locator("#summary local-time")
    told = shown.evaluate("element => element.shadowRoot.textContent")
    sent = shown.locator("time").get_attribute("datetime")
    wanted = page.evaluate("at => new Date(at).getHours()", sent)
    page.close()
    assert f"{wanted:02}:" in told and "GMT+9" in told


def test_words_of_an_answer_are_described_where_they_were_heard(
    open_page: OpenPage, gateway: ServedGateway
) -> None:
    answers = add_answers(gateway.client.telemetry, ())
    page = open_page(f"/requests/{answers['fine'].id}")
    page.locator(".span-word").first.dispatch_event("click")
    expect(page.locator("#span-detail")).to_contain_text("“The opposite of")
    page.locator(".span-pause").dispatch_event("click")
    expect(page.locator("#span-detail")).to_have_text("waiting for you to finish, 345 ms")


def test_keyboard_reaches_search_and_content(open_page: OpenPage, gateway: ServedGateway) -> None:
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


def test_chosen_theme_is_remembered(open_page: OpenPage) -> None:
    page = open_page("/now")
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


def test_live_log_lines_are_escaped(open_page: OpenPage, telemetry: FakeTelemetry) -> None:
    page = open_page("/logs")
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    hostile = f'{HOSTILE}<img src=x onerror="alert(1)"></hx-partial>'
    telemetry.lines.append(
        LogLine(
            id=line_id(9),
            at_us=now_us(),
            level="error",
            logger="l",
            process=hostile,
            message=hostile,
            worker=hostile,
        )
    )
    telemetry.say()
    expect(page.locator(f'[id="l-{line_id(9)}"] .said')).to_have_text(hostile)
    assert page.locator("main img, main script").count() == 0 and not dialogs


def test_console_with_key_works_after_login(browser: Browser, loaded: Loaded) -> None:
    with serving(loaded, api_key="secret") as gateway, visiting(browser) as page:
        fill(gateway)
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


def test_open_page_returns_to_login_after_logout(
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
        httpx.post(
            f"{gateway.url}/console/logout",
            headers={"cookie": f"{cookie.get('name')}={cookie.get('value')}"},
        )
        page.wait_for_url(f"{gateway.url}/console/login?next=/workers")
        page.close()
