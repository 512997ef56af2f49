"""The Voice page when its connection is lost or refused: an answer goes on where it was, and the page says what is the matter."""

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, js, tap, tapped, visiting, wait_js
from tests.web.voice.conftest import Site
from tests.web.voice.fake_server import CHUNK, RATE_HZ, TEXT, Double, Script, tone
from web.http.errors import Unauthorized
from web.realtime.transport.refusal import UNAUTHORIZED, close_reason


def test_an_answer_goes_on_after_the_connection_is_lost(typist: Page, double: Double) -> None:
    """Without a gap or a repeat: what is played is the whole answer, once, though the server repeats some of it."""
    noise = np.random.default_rng(7).integers(1, 9000, 6 * RATE_HZ).astype(np.int16)
    typist.locator("#message").press("Shift")
    js(typist, "fleetVoice.player.open()")
    tap(typist)
    # so much lies in the player by then that a slow machine has the time to connect again
    sent = 5 * RATE_HZ
    double.script = Script(samples=noise, lead_s=20, drop_after=sent, repeat=3000)
    ask(typist)
    wait_js(typist, f"fleetVoice.player.totalPlayed === {len(noise)} && !fleetVoice.player.playing")
    assert len(double.connections) == 2
    query = double.connections[1].query
    assert query["session"] == "sess_1" and query["response"] == "resp_1"
    assert 0 < int(query["samples"]) <= sent + CHUNK
    assert js(typist, "fleetVoice.player.underruns") == 0
    played = tapped(typist, len(noise))
    assert np.array_equal(played[played != 0], noise)
    expect(typist.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(typist.locator(".turn.assistant")).to_have_count(1)
    expect(typist.locator(".reason")).to_have_count(0)


def test_a_lost_connection_is_shown_and_the_message_waits(typist: Page, double: Double) -> None:
    double.script = Script(refuse=(1011, ""))
    double.call(double.connections[0].drop)
    expect(typist.locator("#state")).to_have_text("Reconnecting")
    expect(typist.locator(".reason")).to_contain_text("The gateway does not answer")
    ask(typist, "are you there?")
    expect(typist.locator(".turn")).to_have_count(0)
    double.script = Script()
    expect(typist.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(typist.locator(".reason")).to_have_count(0)


def test_a_conversation_the_server_forgot_is_told_again(typist: Page, double: Double) -> None:
    ask(typist, "my name is Ada")
    wait_js(typist, "fleetVoice.player.totalPlayed > 0 && !fleetVoice.player.playing")
    double.script = Script(forget=True)
    double.call(double.connections[0].drop)
    expect(typist.locator(".reason")).to_contain_text("restored as text")
    created = wait_until(lambda: double.of_type("conversation.item.create")[1:], "the turns to be told again")
    wait_until(lambda: len(double.of_type("conversation.item.create")) == 3, "both turns")
    created = double.of_type("conversation.item.create")[1:]
    items = [event["item"] for event in created]
    told = [(item["role"], item["content"][0]["text"]) for item in items]  # pyright: ignore
    assert told == [("user", "my name is Ada"), ("assistant", TEXT)]


def test_the_place_in_the_line_is_shown(browsers: Browsers, site: Site, double: Double) -> None:
    double.script = Script(place=3)
    with visiting(browsers.hearing("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Waiting in line: place 3")
        (connection,) = double.connections
        double.script = Script()

        def admit() -> None:
            asyncio.ensure_future(connection.admit())

        double.call(admit)
        expect(page.locator("#state")).to_have_text("Ready")


def test_a_full_server_says_so_and_is_tried_again(browsers: Browsers, site: Site, double: Double) -> None:
    double.script = Script(refuse=(1013, "4 conversations are under way and 8 wait"))
    with visiting(browsers.hearing("nothing", None), site.url) as page:
        expect(page.locator(".reason")).to_contain_text("4 conversations are under way and 8 wait")
        double.script = Script()
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator(".reason")).to_have_count(0)


def test_a_refused_page_does_not_try_again(browsers: Browsers, site: Site, double: Double) -> None:
    double.script = Script(refuse=(UNAUTHORIZED, close_reason(Unauthorized("the API key is missing"))))
    with visiting(browsers.hearing("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Not connected")
        expect(page.locator(".reason")).to_contain_text("refused this page the API key is missing. Reload the page")
        assert len(double.connections) == 1


def pushing(page: Page) -> None:
    """Push to talk, with the microphone on."""
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#choices summary").click()
    page.locator("#push-to-talk").check()
    page.locator("#talk-button").click()
    expect(page.locator("#state")).to_have_text("Hold to talk")
    page.locator("#talk-button").focus()


def test_what_is_said_while_reconnecting_is_not_lost(speaker: Callable[[str, NDArray[np.int16]], Page], double: Double) -> None:
    counted = tone(30.0, 700.0, MIC_RATE_HZ, 0.3)
    page = speaker("always", counted)
    pushing(page)
    page.keyboard.down("Space")
    wait_until(lambda: len(double.mic) > 10, "sound")
    double.call(double.connections[0].drop)
    wait_until(lambda: len(double.connections) == 2, "a new connection")
    seen = len(double.mic)
    wait_until(lambda: len(double.mic) > seen + 20, "sound on the new connection")
    page.keyboard.up("Space")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    sent_ms = float(str(js(page, "fleetVoice.conversation.speech.sent.ms")))
    heard_ms = 1000 * len(double.heard()) / double.rate_hz
    # at most what was on its way when the connection broke
    assert heard_ms >= sent_ms - 200


def test_a_question_that_ends_without_a_connection_is_asked_once_it_is_back(
    speaker: Callable[[str, NDArray[np.int16]], Page], double: Double
) -> None:
    page = speaker("always", tone(30.0, 700.0, MIC_RATE_HZ, 0.3))
    pushing(page)
    page.keyboard.down("Space")
    wait_until(lambda: len(double.mic) > 10, "sound")
    double.script = Script(refuse=(1011, ""))
    double.call(double.connections[0].drop)
    wait_js(page, "fleetVoice.socket.held.length > 10")
    page.keyboard.up("Space")
    double.script = Script(samples=tone(0.2))
    expect(page.locator(".turn.user .words")).to_have_text("what the user said")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator("#state")).to_have_text("Hold to talk")
    came = double.connections[-1].came
    commit = came.index("input_audio_buffer.commit")
    assert "sound" in came[:commit] and "input_audio_buffer.clear" not in came and "response.create" in came[commit:]


def test_an_answer_that_is_interrupted_without_a_connection_ends_at_the_server_too(
    speaker: Callable[[str, NDArray[np.int16]], Page], double: Double
) -> None:
    page = speaker("always", tone(30.0, 700.0, MIC_RATE_HZ, 0.3))
    pushing(page)
    double.script = Script(samples=tone(60.0), lead_s=60, stall_after=50 * RATE_HZ)
    ask(page)
    wait_js(page, "fleetVoice.player.totalPlayed > 2400")
    double.script = Script(refuse=(1011, ""))
    double.call(double.connections[0].drop)
    expect(page.locator("#state")).to_have_text("Reconnecting")
    page.locator("#talk-button").focus()
    page.keyboard.down("Space")
    wait_js(page, "fleetVoice.socket.held.filter((frame) => frame instanceof ArrayBuffer).length > 20")
    page.keyboard.up("Space")
    double.script = Script(text="second answer")
    expect(page.locator(".turn.assistant .words").last).to_have_text("second answer")
    came = [kind for kind in double.connections[-1].came if kind not in ("sound", "fleet.played", "conversation.item.retrieve")]
    first = ["response.cancel", "input_audio_buffer.clear", "conversation.item.truncate"]
    assert came[0] == "session.update" and set(came[1:4]) == set(first)
    assert came[4:6] == ["input_audio_buffer.commit", "response.create"]
    expect(page.locator(".reason")).to_have_count(0)


def test_stop_waits_for_no_answer(typist: Page, double: Double) -> None:
    """Of a question that was lost on its way nothing comes any more."""
    js(
        typist,
        "fleetVoice.conversation.put({ role: 'user', kind: 'speech', itemId: null, state: 'waiting', text: '', notes: [] })",
    )
    expect(typist.locator("#state")).to_have_text("Thinking")
    typist.locator("#stop").click()
    expect(typist.locator("#state")).to_have_text("Ready")


def test_a_new_session_knows_what_the_sound_is_before_it_hears_any(
    speaker: Callable[[str, NDArray[np.int16]], Page], double: Double
) -> None:
    """Of what was said while there was no connection, too: until it is told, a session hears another rate and looks for turns."""
    page = speaker("always", tone(30.0, 700.0, MIC_RATE_HZ, 0.3))
    expect(page.locator("#state")).to_have_text("Ready")
    page.locator("#talk-button").click()
    wait_until(lambda: len(double.mic) > 10, "sound")
    double.script = Script(refuse=(1011, ""))
    double.call(double.connections[0].drop)
    wait_js(page, "fleetVoice.socket.held.length > 20")
    double.script = Script(forget=True)
    wait_until(lambda: "sound" in double.connections[-1].came, "what was held")
    assert double.connections[-1].session != "sess_1"
    assert double.connections[-1].came[0] == "session.update"
