"""The Voice page with a real gateway, in Chromium."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Error, Page, expect

from fleet.core.errors import EngineError, RedisUnreachable
from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, allowing, serving
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import RATE_HZ as SPOKEN_HZ
from tests.web.realtime.speech_samples import speech
from tests.web.test_transcription import sound
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, choose, js, visiting, wait_js

pytestmark = pytest.mark.one_file_in(4, "pages in a browser")

SECOND = Script(num_samples=RATE_HZ, gap_s=0.01)


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("sounds")) as browsers:
        yield browsers


@pytest.fixture
def page(browsers: Browsers, gateway: ServedGateway) -> Iterator[Page]:
    with visiting(browsers.with_microphone("nothing", None), gateway.url) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        yield page


def said(text: str) -> NDArray[np.int16]:
    """Return speech of `text` at the rate of the browser's fake microphone."""
    return np.repeat(np.frombuffer(speech(text), "<i2"), MIC_RATE_HZ // SPOKEN_HZ)


def number(page: Page, expression: str) -> float:
    return float(str(js(page, expression)))


def test_typed_message_is_answered_in_text_and_audio(page: Page, gateway: ServedGateway) -> None:
    gateway.client.script = SECOND
    ask(page)
    expect(page.locator(".turn.user .words")).to_have_text("hello")
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    expect(page.locator(".turn.assistant .notes")).to_contain_text("1.0 s of speech")
    # all of it is played, no sample twice, at the level of the sine that was sent
    wait_js(page, f"fleetVoice.player.totalPlayed === {RATE_HZ} && !fleetVoice.player.playing")
    spec, _ = gateway.client.submitted[0]
    assert spec.params["voice"] == page.locator("#voice").input_value()
    latency = page.locator(".turn.assistant .latency")
    expect(latency.locator(".legend .name")).to_have_text(
        [
            "endpointing",
            "queue",
            *(stage.name for stage in gateway.client.graph.stages),
            "gateway",
            "silence",
            "network",
            "buffer",
        ]
    )
    assert latency.get_attribute("href") == f"/requests/{spec.id}"


def test_pipeline_status_follows_request(page: Page, gateway: ServedGateway) -> None:
    expect(page.locator(".stage h2")).to_have_text(["thinker", "talker", "code2wav"])
    gateway.client.script = Script(stall_at=6)
    ask(page)
    expect(page.locator("#stage-thinker .task")).to_contain_text("running")
    expect(page.locator("#edge-text .num")).to_have_text("3/3")
    expect(page.locator("#stage-talker .up")).to_contain_text("1/16 running")
    page.locator("#stop").click()
    expect(page.locator(".shown-request")).to_contain_text("aborted")
    gateway.client.missing = ["talker"]
    trouble, note = page.locator("#trouble"), page.locator("#talk-note")
    expect(trouble).to_contain_text("Speech is down: no worker of talker accepts tasks")
    expect(trouble).to_contain_text("fleet worker talker")
    expect(trouble).to_contain_text("Typed messages are answered as text")
    expect(note).to_have_text("Speech is down: no answer")
    choose(page, "voice", "text only")
    expect(note).to_have_text("Opens the microphone")
    gateway.client.unreachable = RedisUnreachable("no Redis answers")
    expect(trouble).to_have_text("Speech is down: no Redis answers")
    gateway.client.reset()
    expect(trouble).to_have_count(0)
    expect(note).to_have_text("Opens the microphone")


def test_stop_ends_playback_and_aborts_request(page: Page, gateway: ServedGateway) -> None:
    gateway.client.script = Script(
        num_samples=10 * RATE_HZ, samples_per_chunk=10 * RATE_HZ, stall_at=3
    )
    ask(page)
    wait_js(page, "fleetVoice.player.totalPlayed > 2400")
    page.locator("#stop").click()
    wait_js(page, "fleetVoice.player.buffered === 0 && !fleetVoice.player.playing")
    assert number(page, "fleetVoice.player.totalPlayed") < 9 * RATE_HZ
    (fake,) = gateway.client.streams.values()
    wait_until(lambda: fake.aborted, "the abort")
    expect(page.locator(".turn.assistant .notes")).to_contain_text("interrupted")
    gateway.client.script = Script()
    ask(page, "and now?")
    expect(page.locator(".turn.assistant .words").last).to_have_text(Script().text)
    assert len(gateway.client.submitted) == 2


def test_new_question_interrupts_answer(page: Page, gateway: ServedGateway) -> None:
    gateway.client.script = Script(stall_at=4)
    ask(page, "first")
    expect(page.locator(".turn.assistant .words")).not_to_be_empty()
    gateway.client.script = Script(text="second answer")
    ask(page, "second")
    expect(page.locator(".turn.assistant .words").last).to_have_text("second answer")
    wait_until(
        lambda: [s.aborted for s in gateway.client.streams.values()][0], "the abort of the first"
    )


def test_text_only_answer_plays_no_audio(page: Page, gateway: ServedGateway) -> None:
    choose(page, "voice", "text only")
    ask(page)
    expect(page.locator(".turn.assistant .words")).to_have_text(Script().text)
    expect(page.locator(".turn.assistant .notes")).to_contain_text("first text")
    assert (
        gateway.client.submitted[0][0].outputs == ("text",)
        and js(page, "fleetVoice.player.totalPlayed") == 0
    )


def test_failure_is_shown_with_reason(page: Page, gateway: ServedGateway) -> None:
    gateway.client.script = Script(fail_at=4, failure=EngineError("the engine ran out of memory"))
    ask(page)
    expect(page.locator(".reason")).to_contain_text("the engine ran out of memory")
    gateway.client.script = Script()
    ask(page)
    expect(page.locator(".turn.assistant .words").last).to_have_text(Script().text)
    expect(page.locator(".reason")).to_have_count(0)


def test_spoken_question_is_answered_and_interrupted(
    browsers: Browsers, gateway: ServedGateway
) -> None:
    """A spoken question is answered, and the answer interrupted. The microphone plays speech and
    not a tone, since the gateway detects voice.
    """
    gateway.client.script = Script(num_samples=20 * RATE_HZ, samples_per_chunk=RATE_HZ)
    quiet = np.zeros(MIC_RATE_HZ, np.int16)
    words, more = (
        said("What is the opposite of hot?"),
        said("Stop that now, and tell me something else."),
    )
    sound = np.concatenate([quiet, words, *[quiet] * 5, more, *[quiet] * 60])
    with visiting(browsers.with_microphone("words", sound), gateway.url) as page:
        page.locator("#talk-button").click()
        expect(page.locator("#state")).to_have_text("Speaking")
        expect(page.locator(".turn.assistant .latency .what").first).to_have_text("voice to voice")
        expect(page.locator(".turn.assistant.cut-off .notes").first).to_contain_text("interrupted")
        expect(page.locator(".turn.user")).to_have_count(2)
        expect(page.locator(".turn.assistant")).to_have_count(2)
        first = next(iter(gateway.client.streams.values()))
        wait_until(lambda: first.aborted or first.finished, "the first answer to be over")


FROM_ANOTHER_ORIGIN = """
async ({ api, key, kinds, speech }) => {
  const authorization = `Bearer ${key}`;
  const body = JSON.stringify({
    model: "omni", stream: true, messages: [{ role: "user", content: "hello" }] });
  const headers = { authorization, "content-type": "application/json", "x-stainless-os": "Linux" };
  const chat = await fetch(`${api}/v1/chat/completions`, { method: "POST", headers, body });
  const read = {
    seed: chat.headers.get("x-fleet-seed"),
    request: chat.headers.get("x-request-id"),
    stream: await chat.text(),
  };
  const context = new AudioContext();
  const microphone = context.createMediaStreamDestination();
  const encoded = Uint8Array.from(atob(speech), (character) => character.charCodeAt(0));
  const speaker = context.createBufferSource();
  speaker.buffer = await context.decodeAudioData(encoded.buffer);
  speaker.connect(microphone);
  const recording = kinds.map((mimeType) => new Promise((resolve) => {
    const recorder = new MediaRecorder(microphone.stream, { mimeType });
    const parts = [];
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = () => resolve(new Blob(parts, { type: mimeType }));
    recorder.start(100);
    speaker.addEventListener("ended", () => recorder.stop());
  }));
  speaker.start();
  speaker.stop(context.currentTime + 1);
  read.written = [];
  for (const file of await Promise.all(recording)) {
    const form = new FormData();
    form.append("model", "whisper-1");
    form.append("response_format", "verbose_json");
    form.append("file", file, "recording");
    const answer = await fetch(`${api}/v1/audio/transcriptions`, {
      method: "POST", headers: { authorization }, body: form });
    read.written.push(await answer.json());
  }
  return read;
}
"""


def test_page_of_allowed_origin_streams_chat_and_uploads_recordings(
    browsers: Browsers, gateway: ServedGateway, loaded: Loaded
) -> None:
    """A page of an allowed origin streams a chat and uploads recordings. The page is served by one
    gateway and calls two others, of which only one allows its origin.
    """
    host = gateway.url.replace("127.0.0.1", "localhost")
    asked = {
        "key": "secret",
        "kinds": ["audio/webm;codecs=opus", "audio/mp4;codecs=opus"],
        "speech": base64.b64encode(sound()).decode(),
    }
    complaints = ["CORS policy", "Failed to load resource"]
    opened = visiting(
        browsers.with_microphone("nothing", None), f"{host}/health", complaints, bypass_csp=True
    )
    with (
        serving(allowing(loaded, host), "secret") as api,
        serving(loaded, "secret") as closed,
        opened as page,
    ):
        page.locator("body").click()
        read = page.evaluate(FROM_ANOTHER_ORIGIN, {"api": api.url, **asked})
        assert (
            read["stream"].endswith("data: [DONE]\n\n")
            and read["request"] == api.client.submitted[0][0].id
        )
        assert int(read["seed"]) >= 0 and len(read["written"]) == len(asked["kinds"])
        for written in read["written"]:
            assert written["text"] == Script().text and written["duration"] > 0.2
        with pytest.raises(Error, match="Failed to fetch"):
            page.evaluate(FROM_ANOTHER_ORIGIN, {"api": closed.url, **asked})
        assert not closed.client.submitted


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_voice_page_has_no_horizontal_overflow(
    browsers: Browsers, gateway: ServedGateway, scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    width, height = size
    options: dict[str, Any] = {
        "viewport": {"width": width, "height": height},
        "color_scheme": scheme,
    }
    with visiting(browsers.with_microphone("nothing", None), gateway.url, **options) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        ask(page, "How do the stages work together, and what does each of them send to the next?")
        expect(page.locator(".turn.assistant .notes")).to_contain_text("tokens")
        expect(page.locator("#edge-audio .num")).to_have_text(
            re.compile("7/7"), use_inner_text=False
        )
        for part in ("html", "main", ".dock", "#composer", ".controls"):
            edge = (
                f"(({{ right }}) => "
                f"right)(document.querySelector('{part}').getBoundingClientRect())"
            )
            assert number(page, edge) <= width, part
        assert number(page, "document.documentElement.scrollWidth") <= width
        tall = (
            "[...document.querySelectorAll('.turn .words')].filter((one) => one.scrollHeight "
            "> one.clientHeight + 1).length"
        )
        assert number(page, tall) == 0, "words stand in what follows them"
        for button in ("#send", "#talk-button", "#choices summary"):
            box = page.locator(button).bounding_box()
            assert box is not None and box["y"] + box["height"] <= height
            assert width > 640 or box["height"] >= 44, button
        page.screenshot(path=str(tmp_path / f"console-{scheme}-{width}.png"))


@pytest.mark.parametrize(
    "ended_by", ["its gateway", "another gateway", "another gateway while the page is away"]
)
def test_page_shows_session_ended_by_operator(
    browsers: Browsers, loaded: Loaded, ended_by: str
) -> None:
    with serving(loaded) as here, serving(loaded, client=here.client) as there:
        with visiting(
            browsers.with_microphone("quiet", np.zeros(MIC_RATE_HZ, np.int16)),
            here.url,
            ["status of"],
        ) as page:
            page.locator("#talk-button").click()
            expect(page.locator("#state")).to_have_text("Listening")
            session = str(js(page, "fleetVoice.conversation.session"))
            wait_until(
                lambda: "view" in here.client.voice.held[session].fields, "the session to be listed"
            )
            if ended_by.endswith("away"):
                js(page, "fleetVoice.socket.socket.close(4001)")
            gateway = here if ended_by == "its gateway" else there
            assert gateway.http.delete(f"/v1/fleet/sessions/{session}").json()["ended"]
            expect(page.locator("#state")).to_have_text("Ended")
            expect(page.locator(".reason")).to_contain_text("An operator ended this conversation")
            assert not js(page, "fleetVoice.mic.on")
            assert list(here.client.voice.held) == []
