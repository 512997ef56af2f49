"""The client of calls in `fleet bench --voice --webrtc`, with a real gateway and a fake fleet."""

import asyncio

import numpy as np
import pytest

from fleet.lab.client.client import ApiClient
from fleet.lab.measure import voice_sessions
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context
from fleet.lab.measure.options import parse
from fleet.lab.measure.voice import SpokenQuestion
from fleet.lab.measure.voice_call import WebRtcClient, opus_speech
from fleet.lab.measure.voice_sessions import measure_voice_sessions
from fleet.lab.report.progress import meter
from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.call_client import sessions
from tests.web.realtime.speech_samples import QUESTION, speech

pytestmark = [
    pytest.mark.one_file_in(2, "voice sockets"),
    pytest.mark.usefixtures("only_loopback"),
]

ANSWER_S = 1.2
ANSWER = Script(
    text="Hello there.",
    num_samples=int(ANSWER_S * RATE_HZ),
    samples_per_chunk=FRAME_SAMPLES,
    heard="what",
)


def caller(gateway: ServedGateway, model: str | None = None) -> WebRtcClient:
    api = ApiClient(gateway.url)
    question = SpokenQuestion(name=QUESTION, samples=np.frombuffer(speech(QUESTION), "<i2"))
    return WebRtcClient(api, opus_speech([question]), model or api.model(), seed=1)


def begun() -> asyncio.Event:
    begin = asyncio.Event()
    begin.set()
    return begin


async def test_measured_call_asks_aloud_and_hears_whole_answers(gateway: ServedGateway) -> None:
    gateway.client.script = ANSWER
    client = await asyncio.to_thread(caller, gateway)
    result = await client.run(2, begun())
    assert result.fault == "" and len(result.turns) == 2
    for turn in result.turns:
        # The encoder's last frames of silence are heard too.
        assert turn.answer_s == pytest.approx(ANSWER_S, abs=0.1)
        assert turn.parts and turn.voice_to_voice_ms >= turn.first_audio_ms > 0
    assert client.left.is_set() and result.mic_late_ms and not result.console


async def test_measured_call_that_the_gateway_ends_is_a_fault(gateway: ServedGateway) -> None:
    client, others = await asyncio.to_thread(caller, gateway), sessions(gateway)
    run = asyncio.create_task(client.run(1, asyncio.Event()))
    await asyncio.wait_for(client.opened.wait(), 20)
    (session,) = sessions(gateway) - others
    call = session.replace("sess_", "rtc_")
    ended = await asyncio.to_thread(gateway.http.post, f"/v1/realtime/calls/{call}/hangup")
    assert ended.status_code == 200
    result = await asyncio.wait_for(run, 20)
    assert (result.turns, result.fault) == ((), "the call has ended before its last answer")


async def test_refused_measured_call_is_a_fault(gateway: ServedGateway) -> None:
    result = await caller(gateway, "another").run(1, begun())
    assert "another" in result.fault and not result.turns


def test_calls_without_their_package_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(voice_sessions, "find_spec", lambda _name: None)
    options = parse(["--sessions", "2", "--webrtc", "--engine", "fake"])
    remedy = r"--webrtc needs .*pip install 'fleet-serving\[webrtc\]'"
    with meter("fleet bench") as progress, pytest.raises(BenchError, match=remedy):
        measure_voice_sessions(Context(options, progress))
