"""What a person on call does in the console, on a real fleet, and how many actions it takes: each
click counts, looking and waiting do not.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from playwright.sync_api import Locator, Page, expect

from fleet.core.ids import RequestId, StageName, WorkerId
from tests.e2e.conftest import connect
from tests.e2e.fleets import owner_of, process_of
from tests.e2e.talking import ANSWER, LONG, VoiceFleet, microphone, talking_fleet
from tests.support import wait_until
from tests.web.voice.browsers import Browsers, js, visiting, wait_js

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

STAGE = StageName("talker")
VOICE = "ethan"
NUM_FATAL = 3
"""Deaths over a request after which it is given up."""
BENCH_MS = 280_000


@dataclass(slots=True)
class Hand:
    """Clicks on a page, which it counts in `num_actions`."""

    page: Page
    num_actions: int = 0

    def click(self, target: Locator) -> None:
        target.click()
        self.num_actions += 1

    def follow(self, name: str, place: str = "Pages") -> None:
        """Follow a link of the navigation `place`."""
        nav = self.page.get_by_role("navigation", name=place, exact=True)
        self.click(nav.get_by_role("link", name=name, exact=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """A fleet after a bad hour. `paused`: an answer that a death interrupted, and the next worker
    continued; `failed`: one that was given up after `NUM_FATAL` deaths; `held_it`: the worker whose
    death was the last one.
    """

    fleet: VoiceFleet
    paused: RequestId
    failed: RequestId
    held_it: WorkerId


def disturb(fleet: VoiceFleet, num_deaths: int) -> tuple[RequestId, WorkerId]:
    """Ask for a long answer and kill the worker that speaks it, and its successors. Return the
    request, and the worker that was killed last.
    """
    known = {row["id"] for row in fleet.get("/v1/fleet/requests")["data"]}

    def new_request() -> str:
        rows = fleet.get("/v1/fleet/requests")["data"]
        return next((row["id"] for row in rows if row["id"] not in known), "")

    killed = WorkerId("")
    with ThreadPoolExecutor() as pool, connect(fleet.redis_url) as control:
        asked = pool.submit(fleet.ask, LONG, VOICE)
        request = RequestId(wait_until(new_request, "the request"))

        def next_owner() -> WorkerId:
            owner, _ = owner_of(control, request, STAGE)
            return owner if owner != killed else WorkerId("")

        for _ in range(num_deaths):
            owner = wait_until(next_owner, f"a worker of {STAGE}")
            os.kill(process_of(owner).pid, signal.SIGKILL)
            killed = owner
        assert (asked.exception() is None) == (num_deaths < NUM_FATAL)
    return request, killed


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    with talking_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.ask("what is your name", VOICE)
        paused, _ = disturb(fleet, 1)
        failed, held_it = disturb(fleet, NUM_FATAL)
        yield Night(fleet=fleet, paused=paused, failed=failed, held_it=held_it)


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


@contextmanager
def walking(browsers: Browsers, night: Night, path: str = "/now") -> Iterator[Hand]:
    browser = browsers.with_microphone("none", None)
    clipboard = ["clipboard-read", "clipboard-write"]
    with visiting(browser, f"{night.fleet.url}{path}", permissions=clipboard) as page:
        expect(page.locator("#link")).to_have_text("live")
        yield Hand(page)


def test_talk_takes_one_click(browsers: Browsers, night: Night) -> None:
    with microphone(browsers, night.fleet) as page:
        hand = Hand(page)
        hand.click(page.locator("#talk-button"))
        expect(page.locator(".turn.assistant .words")).to_have_text(ANSWER)
        wait_js(page, "fleetVoice.player.totalPlayed > 24_000")
        assert hand.num_actions == 1


def test_why_an_answer_was_slow_takes_two_clicks(browsers: Browsers, night: Night) -> None:
    with walking(browsers, night) as hand:
        hand.follow("Answers")
        hand.click(hand.page.get_by_role("link", name=night.paused))
        verdict = hand.page.locator("#verdict")
        expect(verdict).to_contain_text("died (SIGKILL)")
        expect(verdict).to_contain_text("continued after")
        assert hand.num_actions == 2


def test_what_a_dead_worker_held_takes_one_click(browsers: Browsers, night: Night) -> None:
    with walking(browsers, night) as hand:
        hand.click(hand.page.get_by_role("link", name="The last dead worker"))
        expect(hand.page.locator("h1")).to_have_text(night.held_it)
        held = hand.page.locator("#tasks tr", has_text=night.failed)
        expect(held).to_contain_text(STAGE)
        expect(held).to_contain_text("failed")
        assert hand.num_actions == 1


def test_one_more_worker_takes_two_clicks(browsers: Browsers, night: Night) -> None:
    with walking(browsers, night) as hand:
        hand.follow("Fleet")
        hand.click(hand.page.get_by_role("button", name=f"One {STAGE} more"))
        expect(hand.page.locator(f"#stage-{STAGE}")).to_contain_text("2 ready")
        assert hand.num_actions == 2


def test_benchmark_with_its_picture_takes_three_clicks(browsers: Browsers, night: Night) -> None:
    with walking(browsers, night) as hand:
        hand.follow("Fleet")
        hand.follow("Jobs", "Pages of Fleet")
        hand.click(hand.page.get_by_role("button", name="Queue it"))
        picture = hand.page.locator("a.shot img")
        expect(picture).to_be_visible(timeout=BENCH_MS)
        wait_js(hand.page, "document.querySelector('a.shot img').naturalWidth > 300")
        assert hand.num_actions == 3


def test_two_answers_are_compared_with_three_clicks(browsers: Browsers, night: Night) -> None:
    with walking(browsers, night) as hand:
        hand.follow("Answers")
        hand.click(hand.page.get_by_role("link", name=night.paused))
        hand.click(hand.page.get_by_role("link", name="Compare"))
        expect(hand.page.locator("#lanes section.compared")).to_have_count(2)
        expect(hand.page.locator("#differences")).to_contain_text("Change")
        assert hand.num_actions == 3


def test_failed_answer_is_shared_by_one_click_and_kept(browsers: Browsers, night: Night) -> None:
    path = f"/requests/{night.failed}"
    with walking(browsers, night, path) as hand:
        hand.click(hand.page.get_by_role("button", name="Copy link"))
        expect(hand.page.locator("#toasts")).to_contain_text("Copied")
        assert js(hand.page, "navigator.clipboard.readText()") == night.fleet.url + path
        assert hand.num_actions == 1
    with walking(browsers, night, "/kept") as hand:
        kept = hand.page.locator(f"#k-{night.failed}")
        expect(kept).to_contain_text("failed")
