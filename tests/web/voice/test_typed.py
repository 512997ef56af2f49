"""Typed questions on the Voice page: answers in text, and in audio that is played sample by
sample.
"""

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.checkpoint import EXAMPLES
from tests.web.voice.browsers import (
    ask,
    choose,
    js,
    note_states,
    noted_states,
    tap,
    tapped,
    wait_js,
)
from tests.web.voice.fake_server import PARTS, RATE_HZ, TEXT, FakeVoiceServer, VoiceScript, tone

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")


def test_typed_message_is_answered_in_text_and_audio(
    text_page: Page, server: FakeVoiceServer
) -> None:
    note_states(text_page)
    ask(text_page)
    expect(text_page.locator(".turn.user .words")).to_have_text("hello")
    expect(text_page.locator(".turn.assistant .words")).to_have_text(TEXT)
    wait_js(text_page, f"fleetVoice.player.totalPlayed === {RATE_HZ} && !fleetVoice.player.playing")
    expect(text_page.locator("#state")).to_have_text("Ready")
    assert "Speaking" in noted_states(text_page)
    expect(text_page.locator(".turn.assistant .notes")).to_contain_text("1.0 s of speech")
    end = {"response_id": "resp_1", "samples": RATE_HZ}
    wait_until(
        lambda: end.items() <= server.of_type("fleet.played")[-1].items(),
        "the report of the last sample",
    )


def test_played_samples_equal_sent_samples(text_page: Page, server: FakeVoiceServer) -> None:
    """The played samples equal the sent samples: no fade, gap or repetition where frames are
    joined.
    """
    noise = np.random.default_rng(5).integers(-9000, 9000, 3 * RATE_HZ).astype(np.int16)
    text_page.locator("#message").press("Shift")
    js(text_page, "fleetVoice.player.open()")
    tap(text_page)
    server.script = VoiceScript(samples=noise, lead_s=20)
    ask(text_page)
    wait_js(
        text_page, f"fleetVoice.player.totalPlayed === {len(noise)} && !fleetVoice.player.playing"
    )
    assert js(text_page, "fleetVoice.player.underruns") == 0
    played = tapped(text_page, len(noise))
    first = int(np.flatnonzero(played)[0]) - int(np.flatnonzero(noise)[0])
    assert np.array_equal(played[first : first + len(noise)], noise)
    assert not played[:first].any() and not played[first + len(noise) :].any()


def test_underrun_loses_no_samples(text_page: Page, server: FakeVoiceServer) -> None:
    server.script = VoiceScript(samples=tone(0.8), gap_s=0.16, lead_s=0.0)
    ask(text_page)
    wait_js(
        text_page,
        f"fleetVoice.player.totalPlayed === {8 * RATE_HZ // 10} && !fleetVoice.player.playing",
    )
    assert int(str(js(text_page, "fleetVoice.player.underruns"))) > 0
    expect(text_page.locator(".turn.assistant .notes")).to_contain_text("gap")
    reported = sum(int(str(event["underruns"])) for event in server.of_type("fleet.played"))
    assert reported == js(text_page, "fleetVoice.player.underruns")


def test_stop_silences_answer_and_keeps_heard_text(
    text_page: Page, server: FakeVoiceServer
) -> None:
    server.script = VoiceScript(
        text="one two three four five six seven eight nine ten", samples=tone(10.0), lead_s=20
    )
    server.script.stall_after, server.script.late = 9 * RATE_HZ, 5
    ask(text_page)
    wait_js(text_page, "fleetVoice.player.totalPlayed > 2 * 24000")
    text_page.keyboard.press("Escape")
    wait_js(text_page, "fleetVoice.player.buffered === 0 && !fleetVoice.player.playing")
    expect(text_page.locator("#state")).to_have_text("Interrupted")
    wait_until(lambda: server.of_type("conversation.item.truncate"), "the truncation")
    played = int(str(js(text_page, "fleetVoice.player.totalPlayed")))
    assert played < 9 * RATE_HZ
    (truncate,) = server.of_type("conversation.item.truncate")
    assert truncate["audio_end_ms"] == played * 1000 // RATE_HZ and truncate["item_id"] == "item_1"
    assert server.of_type("response.cancel")
    # text that was not heard is struck out
    expect(text_page.locator(".turn.assistant .cut")).to_contain_text("ten")
    expect(text_page.locator(".turn.assistant .heard")).to_contain_text("one")
    expect(text_page.locator("#state")).to_have_text("Ready")
    # frames that arrive after the interruption are not played
    assert int(str(js(text_page, "fleetVoice.player.totalPlayed"))) == played
    server.script = VoiceScript()
    ask(text_page, "and now?")
    wait_js(text_page, f"fleetVoice.player.totalPlayed === {played + RATE_HZ}")


def test_new_question_interrupts_answer(text_page: Page, server: FakeVoiceServer) -> None:
    server.script = VoiceScript(samples=tone(10.0))
    ask(text_page, "first")
    wait_js(text_page, "fleetVoice.player.totalPlayed > 4800")
    server.script = VoiceScript(text="second answer")
    ask(text_page, "second")
    expect(text_page.locator(".turn.assistant .words").last).to_have_text("second answer")
    events = [
        event
        for event in server.events
        if str(event["type"]).startswith(("response.", "conversation.item."))
    ]
    kinds = [
        str(event["type"]).removeprefix("conversation.")
        for event in events
        if event["type"] != "conversation.item.retrieve"
    ]
    first = ["item.create", "response.create"]
    assert kinds == [*first, "response.cancel", "item.truncate", *first], (
        "the truncation precedes the question"
    )
    (truncate,) = server.of_type("conversation.item.truncate")
    assert 200 <= int(str(truncate["audio_end_ms"])) < 10_000
    expect(text_page.locator(".reason")).to_have_count(0)


def test_messages_before_first_answer_share_one_answer(
    text_page: Page, server: FakeVoiceServer
) -> None:
    server.script = VoiceScript(samples=tone(1.5))
    text_page.locator("#message").press("Shift")
    js(text_page, "fleetVoice.player.open()")
    js(text_page, "['one', 'two', 'three'].forEach((text) => fleetVoice.conversation.ask(text))")
    expect(text_page.locator(".turn.user .words")).to_have_text(["one", "two", "three"])
    wait_js(
        text_page,
        f"fleetVoice.player.totalPlayed === {3 * RATE_HZ // 2} && !fleetVoice.player.playing",
    )
    expect(text_page.locator(".reason")).to_have_count(0)
    created = [
        event["item"]["content"][0]["text"]  # pyright: ignore
        for event in server.of_type("conversation.item.create")
    ]
    assert created == ["one", "two", "three"] and len(server.of_type("response.create")) == 1


def test_latency_shows_parts_and_links_to_request(text_page: Page, server: FakeVoiceServer) -> None:
    ask(text_page)
    latency = text_page.locator(".turn.assistant .latency")
    expect(latency).to_be_visible()
    names = [name for name, _ in PARTS if name != "endpointing"]
    expect(latency.locator(".legend .name")).to_have_text([*names, "network", "buffer"])
    assert latency.get_attribute("href") == "/requests/req-1"
    numbers = [int(text) for text in latency.locator(".legend .ms").all_inner_texts()]
    total = int(latency.locator(".total").inner_text().removesuffix(" ms"))
    assert abs(sum(numbers) - total) <= len(numbers)
    expect(text_page.locator("#headline")).to_be_hidden()  # it shows spoken turns only
    label = latency.get_attribute("aria-label") or ""
    assert "To first audio" in label and "talker 48 ms" in label


def test_chosen_voice_is_remembered(text_page: Page, server: FakeVoiceServer) -> None:
    chosen = text_page.locator("#voice option").nth(1).get_attribute("value") or ""
    choose(text_page, "voice", chosen)
    text_page.reload()
    expect(text_page.locator("#state")).to_have_text("Ready")
    assert text_page.locator("#voice").input_value() == chosen
    audio = server.of_type("session.update")[-1]["session"]["audio"]  # pyright: ignore
    assert audio["output"] == {"voice": chosen}


def test_failed_answer_shows_reason_and_remedy(text_page: Page, server: FakeVoiceServer) -> None:
    message = "no worker serves talker; start one with `fleet worker talker`"
    failure: dict[str, object] = {"type": "server_error", "code": "overloaded", "message": message}
    server.script = VoiceScript(failure=failure)
    ask(text_page)
    reason = text_page.locator(".reason")
    expect(reason).to_contain_text("no worker serves talker")
    expect(reason).to_contain_text("Then ask again.")
    expect(text_page.locator(".turn.assistant .notes")).to_contain_text("no worker serves talker")
    server.script = VoiceScript()
    ask(text_page)
    expect(text_page.locator(".turn.assistant .words").last).to_have_text(TEXT)
    expect(reason).to_have_count(0)


def test_protocol_error_is_shown(text_page: Page, server: FakeVoiceServer) -> None:
    server.script = VoiceScript(error={"code": "x", "message": "instructions: too long"})
    ask(text_page)
    expect(text_page.locator(".reason")).to_contain_text("instructions: too long")


def test_suggestions_return_with_new_conversation(text_page: Page, server: FakeVoiceServer) -> None:
    suggestions = text_page.locator(".example")
    expect(suggestions).to_have_text(EXAMPLES)
    suggestions.last.click()
    expect(text_page.locator(".turn.user .words")).to_have_text(EXAMPLES[-1])
    expect(text_page.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(suggestions).to_have_count(0)
    text_page.locator("#choices summary").click()
    text_page.locator("#clear").click()
    expect(suggestions).to_have_text(EXAMPLES)
    wait_until(lambda: len(server.connections) == 2, "a new session")
    assert "session" not in server.connections[1].query
