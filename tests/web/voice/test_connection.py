"""Lost and refused connections of the Voice page: answers continue, and the page shows the
reason.
"""

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.voice.browsers import (
    MIC_RATE_HZ,
    Browsers,
    Visit,
    ask,
    hold_to_talk,
    js,
    start,
    tap,
    tapped,
    visiting,
    wait_js,
)
from tests.web.voice.conftest import Site
from tests.web.voice.fake_server import CHUNK, RATE_HZ, TEXT, FakeVoiceServer, VoiceScript, tone
from web.http.errors import Unauthorized
from web.realtime.transport.refusal import UNAUTHORIZED, close_reason

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

ALWAYS = tone(30.0, 700.0, MIC_RATE_HZ, 0.3)


def test_answer_continues_after_lost_connection(text_page: Page, server: FakeVoiceServer) -> None:
    """An answer continues after a lost connection and is played once, without gap or repetition,
    although the server sends a part of it again.
    """
    noise = np.random.default_rng(7).integers(1, 9000, 6 * RATE_HZ).astype(np.int16)
    text_page.locator("#message").press("Shift")
    js(text_page, "fleetVoice.player.open()")
    tap(text_page)
    # the player then holds enough audio for a slow reconnect
    sent = 5 * RATE_HZ
    server.script = VoiceScript(samples=noise, lead_s=20, drop_after=sent, repeat=3000)
    ask(text_page)
    wait_js(
        text_page, f"fleetVoice.player.totalPlayed === {len(noise)} && !fleetVoice.player.playing"
    )
    assert len(server.connections) == 2
    query = server.connections[1].query
    assert query["session"] == "sess_1" and query["response"] == "resp_1"
    assert 0 < int(query["samples"]) <= sent + CHUNK
    assert js(text_page, "fleetVoice.player.underruns") == 0
    played = tapped(text_page, len(noise))
    assert np.array_equal(played[played != 0], noise)
    expect(text_page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(text_page.locator(".turn.assistant")).to_have_count(1)
    expect(text_page.locator(".reason")).to_have_count(0)


def test_message_waits_for_reconnect(text_page: Page, server: FakeVoiceServer) -> None:
    server.disconnect()
    expect(text_page.locator("#state")).to_have_text("Reconnecting")
    expect(text_page.locator(".reason")).to_contain_text("The gateway does not answer")
    ask(text_page, "are you there?")
    expect(text_page.locator(".turn")).to_have_count(0)
    server.script = VoiceScript()
    expect(text_page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(text_page.locator(".reason")).to_have_count(0)


def test_lost_session_is_restored_as_text(text_page: Page, server: FakeVoiceServer) -> None:
    ask(text_page, "my name is Ada")
    wait_js(text_page, "fleetVoice.player.totalPlayed > 0 && !fleetVoice.player.playing")
    server.script = VoiceScript(forget=True)
    server.call(server.connections[0].drop)
    expect(text_page.locator(".reason")).to_contain_text("restored as text")
    created = wait_until(
        lambda: server.of_type("conversation.item.create")[1:], "the turns as text"
    )
    wait_until(lambda: len(server.of_type("conversation.item.create")) == 3, "both turns")
    created = server.of_type("conversation.item.create")[1:]
    items = [event["item"] for event in created]
    turns = [(item["role"], item["content"][0]["text"]) for item in items]  # pyright: ignore
    assert turns == [("user", "my name is Ada"), ("assistant", TEXT)]


def test_queue_position_is_shown(browsers: Browsers, site: Site, server: FakeVoiceServer) -> None:
    server.script = VoiceScript(place=3)
    with visiting(browsers.with_microphone("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Waiting in line: place 3")
        (connection,) = server.connections
        server.script = VoiceScript()
        server.call(connection.admit)
        expect(page.locator("#state")).to_have_text("Ready")


def test_full_server_is_retried(browsers: Browsers, site: Site, server: FakeVoiceServer) -> None:
    server.script = VoiceScript(refuse=(1013, "4 conversations are under way and 8 wait"))
    with visiting(browsers.with_microphone("nothing", None), site.url) as page:
        expect(page.locator(".reason")).to_contain_text("4 conversations are under way and 8 wait")
        server.script = VoiceScript()
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator(".reason")).to_have_count(0)


def test_refused_page_does_not_retry(
    browsers: Browsers, site: Site, server: FakeVoiceServer
) -> None:
    server.script = VoiceScript(
        refuse=(UNAUTHORIZED, close_reason(Unauthorized("the API key is missing")))
    )
    with visiting(browsers.with_microphone("nothing", None), site.url) as page:
        expect(page.locator("#state")).to_have_text("Not connected")
        expect(page.locator(".reason")).to_contain_text(
            "refused this page the API key is missing. Reload the page"
        )
        assert len(server.connections) == 1


def test_speech_during_reconnect_is_sent(visit_with_mic: Visit, server: FakeVoiceServer) -> None:
    page = visit_with_mic("always", ALWAYS)
    hold_to_talk(page)
    page.keyboard.down("Space")
    wait_until(lambda: len(server.mic) > 10, "audio")
    server.call(server.connections[0].drop)
    wait_until(lambda: len(server.connections) == 2, "a new connection")
    seen = len(server.mic)
    wait_until(lambda: len(server.mic) > seen + 20, "audio on the new connection")
    page.keyboard.up("Space")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    sent_ms = float(str(js(page, "fleetVoice.conversation.speech.sent.ms")))
    received_ms = 1000 * len(server.received_audio()) / server.rate_hz
    # only audio in transit may be lost
    assert received_ms >= sent_ms - 200


def test_question_ended_while_disconnected_is_answered_after_reconnect(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    page = visit_with_mic("always", ALWAYS)
    hold_to_talk(page)
    page.keyboard.down("Space")
    wait_until(lambda: len(server.mic) > 10, "audio")
    server.disconnect()
    wait_js(page, "fleetVoice.socket.held.length > 10")
    page.keyboard.up("Space")
    server.script = VoiceScript(samples=tone(0.2))
    expect(page.locator(".turn.user .words")).to_have_text("what the user said")
    expect(page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(page.locator("#state")).to_have_text("Hold to talk")
    received = server.connections[-1].received
    commit = received.index("input_audio_buffer.commit")
    assert (
        "audio" in received[:commit]
        and "input_audio_buffer.clear" not in received
        and "response.create" in received[commit:]
    )


def test_interruption_while_disconnected_reaches_the_server(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    page = visit_with_mic("always", ALWAYS)
    hold_to_talk(page)
    server.script = VoiceScript(samples=tone(60.0), lead_s=60, stall_after=50 * RATE_HZ)
    ask(page)
    wait_js(page, "fleetVoice.player.totalPlayed > 2400")
    server.disconnect()
    expect(page.locator("#state")).to_have_text("Reconnecting")
    page.locator("#talk-button").focus()
    page.keyboard.down("Space")
    wait_js(
        page, "fleetVoice.socket.held.filter((frame) => frame instanceof ArrayBuffer).length > 20"
    )
    page.keyboard.up("Space")
    server.script = VoiceScript(text="second answer")
    expect(page.locator(".turn.assistant .words").last).to_have_text("second answer")
    received = [
        kind
        for kind in server.connections[-1].received
        if kind not in ("audio", "fleet.played", "conversation.item.retrieve")
    ]
    first = ["response.cancel", "input_audio_buffer.clear", "conversation.item.truncate"]
    assert received[0] == "session.update" and set(received[1:4]) == set(first)
    assert received[4:6] == ["input_audio_buffer.commit", "response.create"]
    expect(page.locator(".reason")).to_have_count(0)


def test_stop_discards_pending_question(text_page: Page, server: FakeVoiceServer) -> None:
    """Stop discards a question that was lost in transit: no answer follows."""
    js(
        text_page,
        "fleetVoice.conversation.put({ role: 'user', kind: 'speech', itemId: null, state: "
        "'waiting', text: '', notes: [] })",
    )
    expect(text_page.locator("#state")).to_have_text("Thinking")
    text_page.locator("#stop").click()
    expect(text_page.locator("#state")).to_have_text("Ready")


def test_new_session_receives_format_before_audio(
    visit_with_mic: Visit, server: FakeVoiceServer
) -> None:
    """A new session receives the audio format before audio, even before audio held while
    disconnected, since the session assumes another rate.
    """
    page = visit_with_mic("always", ALWAYS)
    start(page)
    wait_until(lambda: len(server.mic) > 10, "audio")
    server.disconnect()
    wait_js(page, "fleetVoice.socket.held.length > 20")
    server.script = VoiceScript(forget=True)
    wait_until(lambda: "audio" in server.connections[-1].received, "the held audio")
    assert server.connections[-1].session != "sess_1"
    assert server.connections[-1].received[0] == "session.update"
