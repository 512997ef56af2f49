"""A client without echo cancellation: its loudspeaker's sound returns through its microphone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.web.conftest import ServedGateway
from tests.web.fake_client import RATE_HZ, Script
from tests.web.realtime.manual_clock import ManualClock
from tests.web.realtime.socket_client import SocketClient
from tests.web.realtime.speech_samples import QUESTION, speech
from web.realtime import turn_manager

STARTED = "input_audio_buffer.speech_started"
STEP_S = 0.1
STEP = int(STEP_S * RATE_HZ)
GAIN = 0.3
ANSWER = (
    "The green boat is near the bridge. It has two sails, one of them torn, and nobody has seen "
    "its owner since the storm. Take the second street on the left, walk past the old church, and "
    "you will see the station in front of you."
)
Samples = NDArray[np.float32]


@pytest.fixture(scope="module")
def shared_gateway(timed_cascade: ServedGateway) -> ServedGateway:
    return timed_cascade


class Room:
    """A client that plays what it receives and stops when the server has heard speech. Its
    microphone hears `GAIN` times what was played `delay_ms` ago, and a person.
    """

    def __init__(self, page: SocketClient, clock: ManualClock, delay_ms: int) -> None:
        self._page, self._clock = page, clock
        self._delay = delay_ms * RATE_HZ // 1000
        self._played = np.zeros(self._delay, np.float32)
        self._noise = np.random.default_rng(delay_ms)
        self._position = 0
        self._response = ""
        self._num_events = 0
        self.person = np.zeros(0, np.float32)

    @property
    def num_interruptions(self) -> int:
        return self._page.kinds().count(STARTED)

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self._clock.advance(STEP_S)
            await self._page.events_before_refusal()
            self._handle_events()
            await self._play()
            echo = GAIN * self._played[-STEP - self._delay :][:STEP]
            person, self.person = self.person[:STEP], self.person[STEP:]
            heard = echo + np.pad(person, (0, STEP - len(person))) + self._noise.normal(0, 20, STEP)
            await self._page.speak(heard.astype("<i2").tobytes())

    def _handle_events(self) -> None:
        for event in self._page.events[self._num_events :]:
            if event["type"] == "response.created":
                self._response, self._position = event["response"]["id"], 0
            elif event["type"] == STARTED:
                self._response = ""
        self._num_events = len(self._page.events)

    async def _play(self) -> None:
        begin = 2 * self._position
        pcm = bytes(self._page.audio.get(self._response, b"")[begin : begin + 2 * STEP])
        samples = np.frombuffer(pcm, "<i2").astype(np.float32)
        self._position += len(samples)
        self._played = np.concatenate([self._played, np.pad(samples, (0, STEP - len(samples)))])
        if len(samples):
            await self._page.send(
                "fleet.played", response_id=self._response, samples=self._position
            )


async def talking_to_itself(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock, delay_ms: int
) -> Room:
    """Begin an answer of a minute that a room echoes."""
    wave = np.resize(np.frombuffer(speech(ANSWER), "<i2"), 60 * RATE_HZ)
    gateway.client.script = Script(text=ANSWER, heard="the green boat", wave=wave)
    await page.ask("tell me")
    return Room(page, clock, delay_ms)


@pytest.mark.one_in(3, "echo loops")
@pytest.mark.parametrize("delay_ms", [57, 185, 355])
async def test_answer_does_not_interrupt_itself(
    page: SocketClient, gateway: ServedGateway, clock: ManualClock, delay_ms: int
) -> None:
    """The answer is not interrupted by its own echo for 30 s; a person interrupts it at once."""
    room = await talking_to_itself(page, gateway, clock, delay_ms)
    await room.run(30)
    assert room.num_interruptions <= 1
    before = room.num_interruptions
    room.person = np.frombuffer(speech(QUESTION), "<i2").astype(np.float32)
    await room.run(0.8)
    assert room.num_interruptions == before + 1, "the person was not heard over the answer"


async def test_session_is_half_duplex_after_the_first_self_interruption(
    page: SocketClient,
    gateway: ServedGateway,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An echo that is not noticed at its beginning interrupts the answer once. The answer is
    continued, and there is no turn of the user.
    """
    monkeypatch.setattr(turn_manager, "WINDOW_S", 0.05)
    room = await talking_to_itself(page, gateway, clock, 185)
    await room.run(12)
    assert room.num_interruptions == 1
    assert page.kinds().count("response.created") == 2
    assert "input_audio_buffer.committed" not in page.kinds()
