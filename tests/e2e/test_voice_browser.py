"""The Voice page in Chromium on a real fleet: a spoken question, a barge-in, a lost connection, a
killed worker.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

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
    VoiceFleet,
    answers,
    interrupt,
    microphone,
    silence,
    speech,
    talking_fleet,
)
from tests.support import wait_until
from tests.web.voice import probe
from tests.web.voice.browsers import (
    MIC_RATE_HZ,
    Browsers,
    ask,
    choose,
    js,
    note_states,
    noted_states,
    wait_js,
)

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

RATE_HZ = 24_000
PRESS_S = 4.0
"""Longest time that a loaded machine may take from the first press of the talk key to the second.
"""
COUNT = "count from one to thirty"
"""A question whose answer is five seconds of speech."""
VOICE = "ethan"
STAGE = "talker"
SPLIT = (
    "endpointing",
    "queue",
    "thinker",
    "talker",
    "code2wav",
    "gateway",
    "silence",
    "network",
    "buffer",
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VoiceFleet]:
    with talking_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


def wait_until_played(page: Page) -> None:
    """Wait until the last answer has been played to its end."""
    wait_js(
        page,
        "fleetVoice.conversation.current?.done && !fleetVoice.player.playing && "
        "!fleetVoice.conversation.current.live",
    )


def assert_played_completely(page: Page, fleet: VoiceFleet, answer: dict[str, Any]) -> None:
    """Check that every audio sample of the answer was played, despite any fault, and every word
    shown.
    """
    whole = fleet.audio(answer["requestId"])
    assert float(np.sqrt(np.mean(whole.astype(np.float64) ** 2))) > 300, "the audio is silent"
    probe.wait_until_recorded(page)
    probe.assert_played(
        probe.read_recording(page, "player"),
        whole,
        probe.find_runs(probe.playback_events(page), answer["serial"]),
    )
    assert answer["text"].strip() == fleet.trace(answer)["answer"].strip()


def test_spoken_question_is_answered_in_the_browser(browsers: Browsers, fleet: VoiceFleet) -> None:
    with microphone(browsers, fleet) as page:
        page.locator("#talk-button").click()
        expect(page.locator("#state")).to_have_text("Listening")
        expect(page.locator(".turn.assistant .words")).to_have_text(ANSWER)
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        latency = page.locator(".turn.assistant .latency")
        expect(latency).to_be_visible()
        wait_until_played(page)
        expect(page.locator("#state")).to_have_text("Listening")
        label = latency.get_attribute("aria-label") or ""
        shown = tuple(
            part.rpartition(" ms")[0].rpartition(" ")[0]
            for part in label.partition(": ")[2].split(", ")
        )
        assert label.startswith("Voice to voice") and shown == SPLIT, label
        (answer,) = answers(page)
        assert_played_completely(page, fleet, answer)
        page.locator(".turn.assistant .open-request").click()
        expect(page.locator("h1")).to_have_text(answer["requestId"])
        expect(page.locator("#text")).to_contain_text(ANSWER)


def test_barge_in_silences_the_answer_and_history_keeps_only_heard_words(
    browsers: Browsers, fleet: VoiceFleet
) -> None:
    with microphone(browsers, fleet) as page:
        choose(page, "voice", VOICE)
        note_states(page)
        interrupt(page)
        expect(page.locator(".turn.assistant .words").nth(1)).to_have_text(ANSWER)
        wait_until_played(page)
        cut, answer = answers(page)
        states = noted_states(page)
        begun, after = states[: states.index("Interrupted")], states[states.index("Interrupted") :]
        assert "Speaking" in begun and "Speaking" in after[:-1], states
        # not shown if the end of the short question was found together with its beginning
        assert "Hearing you" not in begun, states
        begun_ms, quiet_ms = probe.quiet_at_ms(page)
        assert begun_ms < quiet_ms
        assert cut["cut"] and cut["played"] < cut["received"]
        order = [one.kind for one in probe.playback_events(page) if one.serial == cut["serial"]]
        assert order[-1] == "flushed", "nothing of it is played any more"
    wait_until(lambda: fleet.api.resources_in_use().tasks == 0, "every stage to be idle")
    assert fleet.trace(cut)["state"] in ("aborted", "finished")
    # the cut answer in the model's history, compared with what was played of it
    history = json.loads(fleet.trace(answer)["body"])["messages"]
    of_cut = [("assistant", cut["historyText"])] if cut["historyText"] else []
    assert [(one["role"], one["content"]) for one in history[:-1]] == [("user", LONG), *of_cut]
    assert cut["text"].startswith(cut["historyText"])
    text, whole = fleet.ask(LONG, VOICE)
    assert text.startswith(cut["text"].strip())
    num_played = sum(end <= cut["played"] for end in word_ends(text, VOICE, whole))
    assert num_played - 2 <= len(cut["historyText"].split()) <= num_played, (cut, num_played)


def test_push_to_talk_question_is_answered_after_release(
    browsers: Browsers, fleet: VoiceFleet
) -> None:
    # The microphone plays from the first press on: the key must be down before the speech begins.
    spoken = np.concatenate([silence(PRESS_S), speech(QUESTION)])
    with microphone(browsers, fleet, spoken) as page:
        choose(page, "turns", "push")
        page.locator("#talk-button").focus()
        page.keyboard.press("Space")
        expect(page.locator("#state")).to_have_text("Hold to talk")
        page.keyboard.down("Space")
        expect(page.locator("#state")).to_have_text("Hearing you")
        spoken_ms = 1000 * (LEAD_IN_S + len(spoken) / MIC_RATE_HZ)
        wait_js(page, f"fleetVoice.conversation.speech.sent.ms > {spoken_ms + 200}")
        assert not answers(page), "only the release ends the turn"
        page.keyboard.up("Space")
        expect(page.locator(".turn.assistant .words")).to_have_text(ANSWER)
        expect(page.locator(".turn.user .words")).to_have_text(QUESTION)
        wait_until_played(page)
        (answer,) = answers(page)
        assert_played_completely(page, fleet, answer)


def test_answer_resumes_after_a_cut_connection(browsers: Browsers, fleet: VoiceFleet) -> None:
    with microphone(browsers, fleet) as page:
        ask(page, COUNT)
        wait_js(page, f"fleetVoice.player.totalPlayed > {RATE_HZ}")
        (before,) = answers(page)
        fleet.switch.cut()
        wait_until_played(page)
        (answer,) = answers(page)
        assert before["received"] < answer["received"], "the connection was cut in the middle"
        assert_played_completely(page, fleet, answer)
        expect(page.locator(".reason")).to_have_count(0)


def test_answer_resumes_at_another_gateway_after_a_kill(
    browsers: Browsers, fleet: VoiceFleet
) -> None:
    with (
        another_gateway(fleet) as (gateway, port),
        fleet.switch.leading_to(port),
        microphone(browsers, fleet) as page,
    ):
        ask(page, COUNT)
        wait_js(page, f"fleetVoice.player.totalPlayed > {RATE_HZ}")
        (before,) = answers(page)
        fleet.switch.lead_home()
        gateway.stop(signal.SIGKILL)
        wait_until_played(page)
        (answer,) = answers(page)
        assert before["received"] < answer["received"], "the gateway was killed in the middle"
        assert_played_completely(page, fleet, answer)
        expect(page.locator(".turn.assistant .words")).to_have_text(answer["text"].strip())
        # the conversation is the same one
        ask(page, "what is your name")
        expect(page.locator(".turn.assistant .words").nth(1)).to_contain_text("pocket")
        wait_until_played(page)
        prompt = fleet.trace(answers(page)[1])["prompt"]
        assert prompt.startswith(f"user:\n{COUNT}\nassistant:\n{answer['text'].strip()}"), prompt


NOTE_DOWN = f"""
new MutationObserver(() => {{
  window.sawDown ||= document.querySelector("#node-{STAGE}.down") !== null;
}}).observe(document.body, {{subtree: true, childList: true, attributes: true}})
"""
"""Script for a page: note in `sawDown` whether the stage was ever shown without a worker."""


def test_console_shows_a_worker_die_and_restart(browsers: Browsers, fleet: VoiceFleet) -> None:
    with microphone(browsers, fleet) as voice:
        now_page, workers, request = (voice.context.new_page() for _ in range(3))
        now_page.goto(f"{fleet.switch.url}/now")
        workers.goto(f"{fleet.switch.url}/workers")
        node, gone = now_page.locator(f"#node-{STAGE}"), workers.locator("#gone")
        expect(node).to_contain_text("1/1 up")
        killed = fleet.worker(STAGE)
        for page in (now_page, workers):
            expect(page.locator("#link")).to_have_text("live")
        ask(voice, LONG)
        wait_js(
            voice,
            "fleetVoice.conversation.current?.audible && fleetVoice.conversation.current.requestId",
        )
        js(now_page, NOTE_DOWN)  # the next worker may start before the page is looked at
        os.kill(killed["pid"], signal.SIGKILL)
        (answer,) = answers(voice)
        request.goto(f"{fleet.switch.url}/requests/{answer['requestId']}")
        for page in (now_page, workers, request):
            js(page, "window.opened = 1")
        expect(gone).to_contain_text(str(killed["pid"]))
        expect(gone.locator(".state-died").first).to_be_visible()
        wait_js(now_page, "window.sawDown")
        expect(node).to_contain_text("1/1 up")
        wait_until_played(voice)
        expect(request.locator("#summary")).to_contain_text("finished")
        successor = fleet.worker(STAGE)
        expect(workers.locator("#workers")).to_contain_text(str(successor["pid"]))
        for worker in (killed, successor):
            expect(request.locator("#history")).to_contain_text(worker["id"])
        assert [js(page, "window.opened") for page in (now_page, workers, request)] == [1, 1, 1], (
            "no page was reloaded"
        )
        assert_played_completely(voice, fleet, answers(voice)[0])
