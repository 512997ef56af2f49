"""A spoken conversation with Pocket over `WS /v1/realtime`: an answer, a barge-in, and the
conversation's history after it.
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from fleet.lab.client.client import ApiClient
from tests.e2e.fleets import fleet_up
from tests.support import wait_until
from tests.web.realtime.speech_samples import RATE_HZ, blocks, silence, speech

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

BLOCK_MS = 20
QUESTION, ANSWER = "what is the opposite of hot", "the opposite of hot is cold"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with fleet_up(tmp_path_factory.mktemp("fleet"), "web.port=0") as fleet:
        yield fleet.url


class RealtimeTalk:
    """A voice session client that sends the user's audio in real time."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.events: list[dict[str, Any]] = []

    async def speak(self, pcm: bytes) -> None:
        """Send the audio in blocks, each at its time, as a microphone does."""
        began, loop = time.monotonic(), asyncio.get_running_loop()
        for number, block in enumerate(blocks(pcm, BLOCK_MS), 1):
            await self._connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())
            tick = loop.create_future()
            loop.call_later(
                max(0.0, began + number * BLOCK_MS / 1000 - time.monotonic()), tick.set_result, None
            )
            await tick

    async def until(self, kind: str) -> dict[str, Any]:
        while True:
            event = (await asyncio.wait_for(self._connection.recv(), 60)).to_dict()
            self.events.append(event)
            assert event["type"] != "error", event
            if event["type"] == kind:
                return event

    def audio(self, response: str) -> bytes:
        deltas = [
            e["delta"]
            for e in self.events
            if e["type"] == "response.output_audio.delta" and e["response_id"] == response
        ]
        return b"".join(base64.b64decode(delta) for delta in deltas)


@asynccontextmanager
async def open_session(url: str) -> AsyncIterator[RealtimeTalk]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        async with client.realtime.connect(
            model="pocket", extra_query={"fleet": "1"}
        ) as connection:
            yield RealtimeTalk(connection)


async def test_spoken_question_is_answered_in_audio_without_seams(url: str) -> None:
    async with open_session(url) as one:
        await one.speak(silence(300) + speech(QUESTION) + silence(900))
        done = (await one.until("response.done"))["response"]
        timing = next(event for event in one.events if event["type"] == "fleet.timing")
    assert done["output"][0]["content"][0]["transcript"] == ANSWER
    streamed = one.audio(done["id"])
    assert len(streamed) > RATE_HZ
    assert [part["name"] for part in timing["parts"]][:2] == ["endpointing", "queue"] and timing[
        "voice_to_voice_ms"
    ] > 0
    # The log of the same request holds the same audio.
    assert ApiClient(url).answer_audio(timing["request_id"])[-len(streamed) :] == streamed


async def test_barge_in_stops_every_stage_and_history_keeps_only_heard_words(url: str) -> None:
    async with open_session(url) as one:
        await one.speak(silence(300) + speech(QUESTION) + silence(900))
        # its prefix is cached; that of a cancelled first turn is not
        await one.until("response.done")
        await one.speak(silence(1_200) + speech("what day comes after monday") + silence(700))
        await one.until("response.output_audio.delta")
        await one.speak(speech(QUESTION) + silence(900))
        cut = (await one.until("response.done"))["response"]
        done = (await one.until("response.done"))["response"]
        cut_item = cut["output"][0]["id"]
        connection = one._connection  # pyright: ignore[reportPrivateUsage]
        await connection.conversation.item.retrieve(item_id=cut_item)
        item = (await one.until("conversation.item.retrieved"))["item"]
    assert cut["status"] == "cancelled" and cut["status_details"]["reason"] == "turn_detected"
    assert done["status"] == "completed" and done["output"][0]["content"][0]["transcript"] == ANSWER
    assert cut["output"][0]["content"][0]["transcript"].startswith(item["content"][0]["transcript"])
    assert done["usage"]["input_token_details"]["cached_tokens"] > 0, (
        "the first turn is not recomputed"
    )
    wait_until(lambda: ApiClient(url).resources_in_use().tasks == 0, "every stage to be idle")
