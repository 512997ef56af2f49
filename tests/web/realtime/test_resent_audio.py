"""Audio of a complete response is sent again to a reconnected client, and can be stopped like other
audio.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import SocketClient, opened
from tests.web.realtime.speech_samples import QUESTION, silence, speech

pytestmark = pytest.mark.one_file_in(2, "voice sockets")

SECONDS = 6
"""Length of the response in seconds. Audio is sent about one second ahead of playback."""
WHOLE = 2 * SECONDS * RATE_HZ


@asynccontextmanager
async def resending(gateway: ServedGateway) -> AsyncIterator[tuple[SocketClient, str]]:
    """Reconnect a client that lost all audio of a complete response; once audio arrives, yield the
    client with the response's id.
    """
    gateway.client.script = Script(num_samples=SECONDS * RATE_HZ)
    async with opened(gateway) as page:
        await page.ask("count")
        response = (await page.until("response.created"))["response"]["id"]
        for second in range(1, SECONDS):
            await page.until_audio(response, second * RATE_HZ)
            await page.send("fleet.played", response_id=response, samples=second * RATE_HZ)
        await page.until("response.done")
        await page.drop()
    async with opened(gateway, session=page.session, response=response, samples=0) as again:
        await again.until_audio(response, FRAME_SAMPLES)
        yield again, response


async def test_resent_audio_stops_when_its_format_is_refused(gateway: ServedGateway) -> None:
    async with resending(gateway) as (page, response):
        await page.update(audio={"output": {"format": {"type": "audio/opus"}}})
        sent = len(page.audio[response])
        await page.until("fleet.state", state="listening")
    assert len(page.audio[response]) == sent < WHOLE


async def test_resent_audio_of_an_earlier_response_stops_when_its_format_is_refused(
    gateway: ServedGateway,
) -> None:
    async with resending(gateway) as (page, response):
        await page.complete("and in writing?", output_modalities=["text"])
        await page.update(audio={"output": {"format": {"type": "audio/opus"}}})
        sent = len(page.audio[response])
        gateway.client.script = Script(gap_s=0.05)
        await page.complete("and then?", output_modalities=["text"])
    assert len(page.audio[response]) == sent < WHOLE


async def test_resent_audio_stops_when_the_user_speaks(gateway: ServedGateway) -> None:
    spoken = silence(100) + speech(QUESTION) + silence(800)
    async with resending(gateway) as (page, response):
        gateway.client.script = Script(gap_s=0.05)
        await page.speak(spoken)
        await page.until("input_audio_buffer.speech_started")
        sent = len(page.audio[response])
        await page.until("response.done")
    assert len(page.audio[response]) == sent < WHOLE
