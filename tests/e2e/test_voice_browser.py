"""The Voice page in Chromium before a real fleet: a question asked aloud, an interruption, a connection lost, a worker killed."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.e2e.aligned import word_ends
from tests.e2e.gateways import another_gateway
from tests.e2e.talking import (
    ANSWER,
    LEAD_IN_S,
    LONG,
    QUESTION,
    Fleet,
    answers,
    interrupt,
    microphone,
    ready,
    speech,
    talking_fleet,
)
from tests.support import wait_until
from tests.web.voice import probe
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, js, wait_js

RATE_HZ = 24_000
COUNT = "count from one to thirty"
"""Answered with five seconds of speech."""
VOICE = "ethan"
STAGE = "talker"
SPLIT = ("endpointing", "queue", "thinker", "talker", "code2wav", "gateway", "silence", "network", "buffer")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with talking_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


def heard_out(page: Page) -> None:
    """The last answer was heard to its end."""
    wait_js(page, "fleetVoice.conversation.current?.done && !fleetVoice.player.playing && !fleetVoice.conversation.current.live")


def assert_heard_whole(page: Page, fleet: Fleet, answer: dict[str, Any]) -> None:
    """Sample for sample what the stages made, through whatever happened on the way; and every word of it."""
    whole = fleet.sound(answer["requestId"])
    assert float(np.sqrt(np.mean(whole.astype(np.float64) ** 2))) > 300, "it is silence"
    probe.assert_played(probe.carried(page, "player"), whole, probe.runs_of(probe.heard(page), answer["serial"]))
    assert answer["text"].strip() == fleet.story(answer)["answer"].strip()


def test_a_spoken_question_is_answered_aloud(browsers: Browsers, fleet: Fleet) -> None:
    with microphone(browsers, fleet) as page:
        ready(page)
        page.locator("#talk-button").click()
        expect(page.locator("#state")).to_have_text("Listening")
        expect(page.locator(".turn.assistant .words")).to_have_text(ANSWER)
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        latency = page.locator(".turn.assistant .latency")
        expect(latency).to_be_visible()
        heard_out(page)
        expect(page.locator("#state")).to_have_text("Listening")
        label = latency.get_attribute("aria-label") or ""
        shown = tuple(part.rpartition(" ms")[0].rpartition(" ")[0] for part in label.partition(": ")[2].split(", "))
        assert label.startswith("Voice to voice") and shown == SPLIT, label
        (answer,) = answers(page)
        assert_heard_whole(page, fleet, answer)
        page.locator(".turn.assistant .open-request").click()
        expect(page.locator("h1")).to_have_text(answer["requestId"])
        expect(page.locator("#words")).to_contain_text(ANSWER)


def test_speaking_over_an_answer_silences_it_and_history_keeps_what_was_heard(browsers: Browsers, fleet: Fleet) -> None:
    with microphone(browsers, fleet) as page:
        ready(page)
        page.locator("#choices summary").click()
        page.locator("#voice").select_option(VOICE)
        page.locator("#choices summary").click()
        js(page, NOTE_STATES)
        interrupt(page)
        expect(page.locator(".turn.assistant .words").nth(1)).to_have_text(ANSWER)
        heard_out(page)
        cut, answer = answers(page)
        states = cast("list[str]", js(page, "states"))
        assert states.index("Interrupted") < states.index("Hearing you") < len(states) - 1, states
        begun_ms, quiet_ms = probe.quiet_at_ms(page)
        assert begun_ms < quiet_ms
        assert cut["cut"] and cut["played"] < cut["received"]
        order = [one.kind for one in probe.heard(page) if one.serial == cut["serial"]]
        assert order[-1] == "flushed", "nothing of it is heard any more"
    wait_until(lambda: fleet.running() == 0, "every stage to be idle")
    assert fleet.story(cut)["state"] in ("aborted", "finished")
    # what the model was told of the answer that was cut, beside what was really heard of it
    told = json.loads(fleet.story(answer)["body"])["messages"]
    kept = [("assistant", cut["historyText"])] if cut["historyText"] else []
    assert [(one["role"], one["content"]) for one in told[:-1]] == [("user", LONG), *kept]
    assert cut["text"].startswith(cut["historyText"])
    text, whole = fleet.said(LONG, VOICE)
    assert text.startswith(cut["text"].strip())
    heard = sum(1 for end in word_ends(text, VOICE, whole) if end <= cut["played"])
    assert heard - 2 <= len(cut["historyText"].split()) <= heard, (cut, heard)


NOTE_STATES = """
() => {
  const element = document.getElementById("state");
  window.states = [element.textContent];
  const observer = new MutationObserver(() => states.push(element.textContent));
  observer.observe(element, { childList: true, characterData: true, subtree: true });
}
"""


def test_held_to_talk_it_is_answered_once_the_key_is_up(browsers: Browsers, fleet: Fleet) -> None:
    with microphone(browsers, fleet) as page:
        ready(page)
        page.locator("#choices summary").click()
        page.locator("#push-to-talk").check()
        page.locator("#choices summary").click()
        page.locator("#talk-button").focus()
        page.keyboard.press("Space")
        expect(page.locator("#state")).to_have_text("Hold to talk")
        page.keyboard.down("Space")
        expect(page.locator("#state")).to_have_text("Hearing you")
        spoken_ms = 1000 * (LEAD_IN_S + len(speech(QUESTION)) / MIC_RATE_HZ)
        wait_js(page, f"fleetVoice.conversation.speech.sent.ms > {spoken_ms + 200}")
        assert not answers(page), "nobody but the speaker ends the turn"
        page.keyboard.up("Space")
        expect(page.locator(".turn.assistant .words")).to_have_text(ANSWER)
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        heard_out(page)
        (answer,) = answers(page)
        assert_heard_whole(page, fleet, answer)


def test_an_answer_goes_on_where_it_was_when_the_connection_is_cut(browsers: Browsers, fleet: Fleet) -> None:
    with microphone(browsers, fleet) as page:
        ready(page)
        ask(page, COUNT)
        wait_js(page, f"fleetVoice.player.totalPlayed > {RATE_HZ}")
        (before,) = answers(page)
        fleet.switch.cut()
        heard_out(page)
        (answer,) = answers(page)
        assert before["received"] < answer["received"], "it was cut in the middle"
        assert_heard_whole(page, fleet, answer)
        expect(page.locator(".reason")).to_have_count(0)


def test_an_answer_goes_on_at_another_gateway_when_its_own_is_killed(browsers: Browsers, fleet: Fleet) -> None:
    with another_gateway(fleet.folder) as (gateway, port), fleet.switch.leading_to(port), microphone(browsers, fleet) as page:
        ready(page)
        ask(page, COUNT)
        wait_js(page, f"fleetVoice.player.totalPlayed > {RATE_HZ}")
        (before,) = answers(page)
        fleet.switch.lead_home()
        gateway.stop(signal.SIGKILL)
        heard_out(page)
        (answer,) = answers(page)
        assert before["received"] < answer["received"], "it was killed in the middle"
        assert_heard_whole(page, fleet, answer)
        expect(page.locator(".turn.assistant .words")).to_have_text(answer["text"].strip())
        # the conversation is the same one
        ask(page, "what is your name")
        expect(page.locator(".turn.assistant .words").nth(1)).to_contain_text("pocket")
        heard_out(page)
        assert fleet.story(answers(page)[1])["prompt"].startswith(f"{COUNT} {answer['text'].strip()}")


def test_the_console_shows_a_worker_die_and_come_back(browsers: Browsers, fleet: Fleet) -> None:
    with microphone(browsers, fleet) as talk:
        ready(talk)
        overview, workers, request = (talk.context.new_page() for _ in range(3))
        overview.goto(f"{fleet.switch.url}/overview")
        workers.goto(f"{fleet.switch.url}/workers")
        node, gone = overview.locator(f"#node-{STAGE}"), workers.locator("#gone")
        expect(node).to_contain_text("1/1 up")
        victim = fleet.worker(STAGE)
        for page in (overview, workers):
            expect(page.locator("#link")).to_have_text("live")
        ask(talk, LONG)
        wait_js(talk, "fleetVoice.conversation.current?.audible && fleetVoice.conversation.current.requestId")
        os.kill(victim["pid"], signal.SIGKILL)
        (answer,) = answers(talk)
        request.goto(f"{fleet.switch.url}/requests/{answer['requestId']}")
        for page in (overview, workers, request):
            js(page, "window.opened = 1")
        expect(gone).to_contain_text(str(victim["pid"]))
        expect(gone.locator(".state-died").first).to_be_visible()
        expect(node).to_contain_text("no worker")
        expect(node).to_contain_text("1/1 up")
        heard_out(talk)
        expect(request.locator("#summary")).to_contain_text("finished")
        successor = fleet.worker(STAGE)
        expect(workers.locator("#workers")).to_contain_text(str(successor["pid"]))
        for worker in (victim, successor):
            expect(request.locator("#history")).to_contain_text(worker["id"])
        assert [js(page, "window.opened") for page in (overview, workers, request)] == [1, 1, 1], "no page was loaded again"
        assert_heard_whole(talk, fleet, answers(talk)[0])
