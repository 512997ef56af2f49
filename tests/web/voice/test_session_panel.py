"""The panel Session of the Voice page with a real gateway: settings applied at once, refusals under
their field, calls of functions, folds that are remembered.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support import wait_until
from tests.tool_template import ARGUMENTS, WEATHER
from tests.web.conftest import SAID, ServedGateway
from tests.web.fake_client import Script
from tests.web.voice.browsers import Browsers, ask, choose, js, visiting, wait_js

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

TOOL = {"type": "function", **WEATHER["function"]}
NOTE_UPDATES = """
() => {
  window.updated = [];
  fleetVoice.socket.addEventListener("event", ({ detail }) => {
    if (detail.type === "session.updated") updated.push(detail.session);
  });
}
"""
SHIFTS = """
new Promise((resolve) => new PerformanceObserver((list) =>
  resolve(list.getEntries().reduce((sum, { value }) => sum + value, 0))
).observe({ type: "layout-shift", buffered: true }))
"""


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


@pytest.fixture
def page(browsers: Browsers, gateway: ServedGateway) -> Iterator[Page]:
    with visiting(browsers.with_microphone("nothing", None), gateway.url) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        js(page, NOTE_UPDATES)
        yield page


def fill(page: Page, field: str, text: str) -> None:
    """Fill in a field of the opened panel, as a person who then leaves it."""
    page.locator(f"#{field}").fill(text)
    page.locator(f"#{field}").blur()


def served(page: Page) -> dict[str, Any]:
    """Return the settings that the server holds after its last update."""
    return json.loads(str(js(page, "JSON.stringify(updated.at(-1))")))


def unfold(page: Page) -> None:
    page.locator("#session-fold > summary").click()


def test_settings_are_applied_as_served(page: Page, gateway: ServedGateway) -> None:
    choose(page, "turns", "server_vad")
    unfold(page)
    expect(page.locator("#silence_duration_ms")).to_have_value("500")
    fill(page, "silence_duration_ms", "900")
    fill(page, "instructions", "Answer briefly.")
    wait_js(page, "updated.at(-1)?.instructions === 'Answer briefly.'")
    detection = served(page)["audio"]["input"]["turn_detection"]
    assert detection["silence_duration_ms"] == 900 and detection["type"] == "server_vad"
    expect(page.locator("#session-line")).to_have_text(
        "ethan · turns end after silence · instructions"
    )
    ask(page)
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    spec, _ = gateway.client.submitted[-1]
    assert "Answer briefly." in gateway.client.tokenizer.decode(spec.prompt_ids)


def test_refusal_stands_under_its_field(page: Page) -> None:
    choose(page, "turns", "server_vad")
    unfold(page)
    fill(page, "threshold", "7")
    wrong = page.locator("#threshold-wrong")
    expect(wrong).to_contain_text("session.audio.input.turn_detection.threshold")
    expect(wrong).to_contain_text("less than or equal to 1")
    expect(page.locator("#threshold")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#threshold")).to_have_value("7")
    expect(page.locator(".reason")).to_have_count(0)
    fill(page, "threshold", "0.7")
    expect(wrong).to_be_empty()
    wait_js(page, "updated.at(-1).audio.input.turn_detection.threshold === 0.7")
    fill(page, "threshold", "")
    expect(page.locator("#threshold")).to_have_value("0.7")  # nothing cannot be set


def test_function_is_called_and_answered_by_hand(browsers: Browsers, caller: ServedGateway) -> None:
    with visiting(browsers.with_microphone("nothing", None), caller.url) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        js(page, NOTE_UPDATES)
        unfold(page)
        wrong = page.locator("#tools-wrong")
        fill(page, "tools", '[{"type": "function"')
        expect(wrong).to_contain_text("in JSON at position 20")
        fill(page, "tools", '{"type": "function"}')
        expect(wrong).to_contain_text("an array of functions is expected")
        fill(page, "tools", '[{"type": "function"}]')
        expect(wrong).to_contain_text("session.tools")
        fill(page, "tools", json.dumps([TOOL]))
        expect(wrong).to_be_empty()
        wait_js(page, "updated.at(-1).tools[0]?.name === 'get_weather'")
        unfold(page)
        ask(page)
        call = page.locator(".turn.tool")
        expect(call.locator(".name")).to_have_text("get_weather")
        expect(call.locator(".arguments")).to_have_text(ARGUMENTS)
        expect(page.locator(".turn.assistant .words")).to_have_text(SAID)
        wait_js(page, "fleetVoice.conversation.current.done")
        caller.client.script = Script(text="It is warm.")
        call.locator("textarea").fill("25 C")
        call.locator("button").click()
        expect(page.locator(".turn.assistant .words").last).to_have_text("It is warm.")
        expect(call.locator("form")).to_be_hidden()
        expect(call.locator(".words")).to_have_text("25 C")
        spec, _ = caller.client.submitted[-1]
        prompt = caller.client.tokenizer.decode(spec.prompt_ids, skip_special_tokens=False)
        assert "<tool_response>25 C</tool_response>" in prompt and '"city": "Paris"' in prompt


def test_open_folds_are_remembered_without_a_jump(page: Page) -> None:
    folds = page.locator(".folds details")
    assert folds.evaluate_all("all => all.map(({ open }) => open)") == [False] * 3
    page.locator("#pipeline-fold > summary").click()
    page.locator("#code-fold > summary").press("Enter")
    wait_until(
        lambda: (
            js(page, "localStorage['fleet-folds']") is not None
            and "code-fold" in str(js(page, "localStorage['fleet-folds']"))
        ),
        "the folds to be stored",
    )
    page.reload()
    expect(page.locator("#state")).to_have_text("Ready")
    assert folds.evaluate_all("all => all.map(({ open }) => open)") == [True, False, True]
    ask(page)
    expect(page.locator("#first-sound")).to_contain_text("first sound")
    # text that appears where the conversation scrolls is no shift of the page
    assert float(str(js(page, SHIFTS))) < 0.1


def test_microphone_meter_follows_level_and_noise(page: Page) -> None:
    """A tenth of the blocks is as quiet as the noise of the room: the pauses between words."""
    meter = """(rms) => import("/static/voice/noise.js").then(({ NoiseMeter }) => {
      const meter = new NoiseMeter();
      for (let n = 0; n < 250; n += 1) meter.add(n % 5 ? 0.2 : rms);
      return [Math.round(meter.level), Math.round(meter.floor), meter.hint];
    })"""
    assert page.evaluate(meter, 0) == [-14, -90, "Quiet"]
    assert page.evaluate(meter, 0.005) == [-14, -46, "Some noise"]
    assert page.evaluate(meter, 0.05) == [-14, -26, "Noisy: speech is detected late"]
