"""Typing on the Voice page: answers in text and in sound that is really played, to the sample."""

import numpy as np
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.web.voice.browsers import ask, js, tap, tapped, wait_js
from tests.web.voice.fake_server import PARTS, RATE_HZ, TEXT, Double, Script, tone


def test_a_typed_message_is_answered_in_text_and_sound(typist: Page, double: Double) -> None:
    ask(typist)
    expect(typist.locator(".turn.user .words")).to_have_text("hello")
    expect(typist.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(typist.locator("#state")).to_have_text("Speaking")
    wait_js(typist, f"fleetVoice.player.totalPlayed === {RATE_HZ} && !fleetVoice.player.playing")
    expect(typist.locator("#state")).to_have_text("Ready")
    expect(typist.locator(".turn.assistant .notes")).to_contain_text("1.0 s of speech")
    last = wait_until(lambda: double.of_type("fleet.played")[-1:], "the page to say what was heard")[0]
    assert (last["response_id"], last["samples"]) == ("resp_1", RATE_HZ)


def test_what_is_played_is_what_was_sent(typist: Page, double: Double) -> None:
    """No fade inside, no click at joins, nothing lost or repeated: the frames' edges cannot be found in it."""
    noise = np.random.default_rng(5).integers(-9000, 9000, 3 * RATE_HZ).astype(np.int16)
    typist.locator("#message").press("Shift")
    js(typist, "fleetVoice.player.open()")
    tap(typist)
    double.script = Script(samples=noise, lead_s=20)
    ask(typist)
    wait_js(typist, f"fleetVoice.player.totalPlayed === {len(noise)} && !fleetVoice.player.playing")
    assert js(typist, "fleetVoice.player.underruns") == 0
    played = tapped(typist, len(noise))
    first = int(np.flatnonzero(played)[0]) - int(np.flatnonzero(noise)[0])
    assert np.array_equal(played[first : first + len(noise)], noise)
    assert not played[:first].any() and not played[first + len(noise) :].any()


def test_an_underrun_loses_and_repeats_nothing(typist: Page, double: Double) -> None:
    double.script = Script(samples=tone(0.8), gap_s=0.16, lead_s=0.0)
    ask(typist)
    wait_js(typist, f"fleetVoice.player.totalPlayed === {8 * RATE_HZ // 10} && !fleetVoice.player.playing")
    assert int(str(js(typist, "fleetVoice.player.underruns"))) > 0
    expect(typist.locator(".turn.assistant .notes")).to_contain_text("gap")
    told = sum(int(str(event["underruns"])) for event in double.of_type("fleet.played"))
    assert told == js(typist, "fleetVoice.player.underruns")


def test_stop_silences_at_once_and_keeps_what_was_heard(typist: Page, double: Double) -> None:
    double.script = Script(text="one two three four five six seven eight nine ten", samples=tone(10.0), lead_s=20)
    double.script.stall_after, double.script.late = 9 * RATE_HZ, 5
    ask(typist)
    wait_js(typist, "fleetVoice.player.totalPlayed > 2 * 24000")
    typist.keyboard.press("Escape")
    wait_js(typist, "fleetVoice.player.buffered === 0 && !fleetVoice.player.playing")
    expect(typist.locator("#state")).to_have_text("Interrupted")
    wait_until(lambda: double.of_type("conversation.item.truncate"), "the page to say where it was cut off")
    played = int(str(js(typist, "fleetVoice.player.totalPlayed")))
    assert played < 9 * RATE_HZ
    (truncate,) = double.of_type("conversation.item.truncate")
    assert truncate["audio_end_ms"] == played * 1000 // RATE_HZ and truncate["item_id"] == "item_1"
    assert double.of_type("response.cancel")
    # what was not heard is struck out, as the server cut it
    expect(typist.locator(".turn.assistant .cut")).to_contain_text("ten")
    expect(typist.locator(".turn.assistant .heard")).to_contain_text("one")
    expect(typist.locator("#state")).to_have_text("Ready")
    # frames that came after the cut are not played
    assert int(str(js(typist, "fleetVoice.player.totalPlayed"))) == played
    double.script = Script()
    ask(typist, "and now?")
    wait_js(typist, f"fleetVoice.player.totalPlayed === {played + RATE_HZ}")


def test_a_new_question_interrupts_the_answer(typist: Page, double: Double) -> None:
    double.script = Script(samples=tone(10.0))
    ask(typist, "first")
    wait_js(typist, "fleetVoice.player.totalPlayed > 4800")
    double.script = Script(text="second answer")
    ask(typist, "second")
    expect(typist.locator(".turn.assistant .words").last).to_have_text("second answer")
    told = [event for event in double.events if str(event["type"]).startswith(("response.", "conversation.item."))]
    kinds = [str(event["type"]).removeprefix("conversation.") for event in told if event["type"] != "conversation.item.retrieve"]
    first = ["item.create", "response.create"]
    assert kinds == [*first, "response.cancel", "item.truncate", *first], "what was heard is known before the question is asked"
    (truncate,) = double.of_type("conversation.item.truncate")
    assert 200 <= int(str(truncate["audio_end_ms"])) < 10_000
    expect(typist.locator(".reason")).to_have_count(0)


def test_what_is_typed_before_an_answer_began_is_answered_together(typist: Page, double: Double) -> None:
    """Nothing is refused, and nothing is answered over another answer."""
    double.script = Script(samples=tone(1.5))
    typist.locator("#message").press("Shift")
    js(typist, "fleetVoice.player.open()")
    js(typist, "['one', 'two', 'three'].forEach((text) => fleetVoice.conversation.ask(text))")
    expect(typist.locator(".turn.user .words")).to_have_text(["one", "two", "three"])
    wait_js(typist, f"fleetVoice.player.totalPlayed === {3 * RATE_HZ // 2} && !fleetVoice.player.playing")
    expect(typist.locator(".reason")).to_have_count(0)
    created = [event["item"]["content"][0]["text"] for event in double.of_type("conversation.item.create")]  # pyright: ignore
    assert created == ["one", "two", "three"] and len(double.of_type("response.create")) == 1


def test_latency_is_shown_by_part_and_leads_to_the_request(typist: Page, double: Double) -> None:
    ask(typist)
    latency = typist.locator(".turn.assistant .latency")
    expect(latency).to_be_visible()
    names = [name for name, _ in PARTS if name != "endpointing"]
    expect(latency.locator(".legend .name")).to_have_text([*names, "network", "buffer"])
    assert latency.get_attribute("href") == "/requests/req-1"
    numbers = [int(text) for text in latency.locator(".legend .ms").all_inner_texts()]
    total = int(latency.locator(".total").inner_text().removesuffix(" ms"))
    assert abs(sum(numbers) - total) <= len(numbers)
    expect(typist.locator("#headline")).to_be_hidden()  # which is of spoken turns
    label = latency.get_attribute("aria-label") or ""
    assert "To first audio" in label and "talker 48 ms" in label


def test_text_only_plays_nothing(typist: Page, double: Double) -> None:
    typist.locator("#choices summary").click()
    typist.locator("#voice").select_option("text only")
    wait_until(lambda: double.modalities == ["text"], "the choice to arrive")
    ask(typist)
    expect(typist.locator(".turn.assistant .words")).to_have_text(TEXT)
    expect(typist.locator(".turn.assistant .notes")).to_contain_text("first text")
    assert js(typist, "fleetVoice.player.totalPlayed") == 0


def test_the_chosen_voice_is_remembered_and_used_from_the_next_answer_on(typist: Page, double: Double) -> None:
    typist.locator("#choices summary").click()
    chosen = typist.locator("#voice option").nth(1).get_attribute("value")
    typist.locator("#voice").select_option(chosen)
    typist.reload()
    expect(typist.locator("#state")).to_have_text("Ready")
    assert typist.locator("#voice").input_value() == chosen
    audio = double.of_type("session.update")[-1]["session"]["audio"]  # pyright: ignore
    assert audio["output"] == {"voice": chosen}


def test_a_failure_names_its_reason_and_what_to_do(typist: Page, double: Double) -> None:
    message = "no worker serves talker; start one with `fleet worker talker`"
    failure: dict[str, object] = {"type": "server_error", "code": "overloaded", "message": message}
    double.script = Script(failure=failure)
    ask(typist)
    reason = typist.locator(".reason")
    expect(reason).to_contain_text("no worker serves talker")
    expect(reason).to_contain_text("Then ask again.")
    expect(typist.locator(".turn.assistant .notes")).to_contain_text("no worker serves talker")
    double.script = Script()
    ask(typist)
    expect(typist.locator(".turn.assistant .words").last).to_have_text(TEXT)
    expect(reason).to_have_count(0)


def test_an_error_of_the_protocol_is_shown(typist: Page, double: Double) -> None:
    double.script = Script(error={"code": "x", "message": "instructions: too long"})
    ask(typist)
    expect(typist.locator(".reason")).to_contain_text("instructions: too long")


def test_a_suggestion_is_asked_by_a_click_and_comes_back_with_a_new_talk(typist: Page, double: Double) -> None:
    suggestions = typist.locator(".example")
    words = suggestions.all_inner_texts()
    assert words
    suggestions.last.click()
    expect(typist.locator(".turn.user .words")).to_have_text(words[-1])
    expect(suggestions).to_have_count(0)
    typist.locator("#choices summary").click()
    typist.locator("#clear").click()
    expect(suggestions).to_have_text(words)
    wait_until(lambda: len(double.connections) == 2, "a session of its own")
    assert "session" not in double.connections[1].query
