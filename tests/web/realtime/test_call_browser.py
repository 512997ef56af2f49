"""A page in Chromium calls as OpenAI's example does, and hears the answer to its microphone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soxr

from tests.support import wait_until
from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.speech_samples import question
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, js, visiting, wait_js

CALL = """
async () => {
  const call = window.call = new RTCPeerConnection();
  window.events = [];
  call.ontrack = ({ streams }) => {
    const audio = window.audio = new Audio();
    audio.srcObject = streams[0];
    audio.play();
  };
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  call.addTrack(microphone.getTracks()[0]);
  const events = window.channel = call.createDataChannel("oai-events");
  events.onmessage = ({ data }) => window.events.push(JSON.parse(data));
  await call.setLocalDescription(await call.createOffer());
  const answer = await fetch("/v1/realtime/calls?model=gpt-realtime", {
    method: "POST", body: call.localDescription.sdp,
    headers: { "Content-Type": "application/sdp" } });
  await call.setRemoteDescription({ type: "answer", sdp: await answer.text() });
  return answer.headers.get("location");
}
"""
NO_ICON = ("404 (Not Found)",)
HEARD = """
async () => {
  for (const report of (await window.call.getStats()).values()) {
    if (report.type === "inbound-rtp") return [report.totalAudioEnergy, report.packetsLost];
  }
  return [0, 0];
}
"""


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    with Browsers.started(tmp_path_factory.mktemp("audio")) as browsers:
        yield browsers


@pytest.mark.usefixtures("only_loopback")
def test_page_calls_and_hears_the_answer(browsers: Browsers, gateway: ServedGateway) -> None:
    gateway.client.script = Script(text="Hello there.", num_samples=RATE_HZ, heard="what")
    asked = soxr.resample(np.frombuffer(question(), "<i2"), RATE_HZ, MIC_RATE_HZ)
    browser = browsers.with_microphone("asks", asked, "--allow-loopback-in-peer-connection")
    with visiting(browser, f"{gateway.url}/v1/models", NO_ICON) as page:
        location = page.evaluate(CALL)
        wait_js(page, "events.some(({ type }) => type === 'output_audio_buffer.stopped')")
        events: Any = js(page, "window.events")
        kinds = [event["type"] for event in events]
        assert kinds[0] == "session.created" and "error" not in kinds
        assert "input_audio_buffer.speech_stopped" in kinds
        wait_until(lambda: page.evaluate(HEARD)[0] > 0.01, "the answer to be heard")
        assert page.evaluate(HEARD)[1] == 0
        assert gateway.http.post(f"{location}/hangup").status_code == 200
        wait_js(page, "channel.readyState === 'closed'")
