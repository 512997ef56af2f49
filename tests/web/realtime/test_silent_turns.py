"""Audio without speech makes no user turn, and its transcript is empty."""

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from tests.noises import Wave, hum, noise, pcm16
from tests.web.conftest import ServedGateway
from tests.web.fake_client import FRAME_SAMPLES, Script
from tests.web.fake_client import RATE_HZ as ANSWER_HZ
from tests.web.realtime.socket_client import SocketClient
from tests.web.realtime.speech_samples import QUESTION, RATE_HZ, silence, speech

TRANSCRIPTION = "conversation.item.input_audio_transcription"
STARTED = "input_audio_buffer.speech_started"
STOPPED = "input_audio_buffer.speech_stopped"
COMMITTED = "input_audio_buffer.committed"
SILENT: Mapping[str, Callable[[np.random.Generator], Wave]] = {
    "zeros": lambda chance: np.zeros(2 * RATE_HZ, np.float32),
    "white noise": lambda chance: noise(chance, RATE_HZ, 2, chance.uniform(-60, -10)),
    "pink noise": lambda chance: noise(chance, RATE_HZ, 2, chance.uniform(-60, -10), 0.5),
    "hum of 50 Hz": lambda chance: hum(chance, RATE_HZ, 2, chance.uniform(-60, -6)),
}


def buzz() -> bytes:
    """Return a buzz of 100 Hz that the turn detector takes for speech three times."""
    return silence(500) + pcm16(hum(np.random.default_rng(3), RATE_HZ, 1.5, -6, 100)) + silence(900)


def drawn(kind: str) -> bytes:
    return pcm16(SILENT[kind](np.random.default_rng(random.randrange(1 << 32))))


async def test_buzz_is_no_turn_and_is_not_answered(
    page: SocketClient, gateway: ServedGateway
) -> None:
    await page.speak(buzz())
    await page.until(STOPPED)
    await page.speak(silence(300) + speech(QUESTION) + silence(800))
    await page.until("response.done")
    kinds = page.kinds()
    assert (
        kinds.count(STARTED) > 1 and kinds.count(COMMITTED) == kinds.count("response.created") == 1
    )
    (spec, _) = gateway.client.submitted[-1]
    assert len(spec.audio) == 1, "the prompt holds the question alone"


async def test_short_word_is_a_turn(page: SocketClient, gateway: ServedGateway) -> None:
    for word in ("yes", "no"):
        await page.speak(silence(300) + speech(word) + silence(800))
        await page.until(COMMITTED)
        await page.until("response.done")


def num_heard(gateway: ServedGateway) -> int:
    """Return the number of submitted requests with audio. A response of an earlier test may still
    be submitted, but has none.
    """
    return sum(bool(spec.audio) for spec, _ in gateway.client.submitted)


@pytest.mark.parametrize("kind", sorted(SILENT))
async def test_silence_and_noise_begin_no_turn(
    page: SocketClient, gateway: ServedGateway, kind: str
) -> None:
    await page.speak(drawn(kind) + silence(800))
    await page.events_before_refusal()
    assert COMMITTED not in page.kinds() and not num_heard(gateway)


@pytest.mark.parametrize("kind", sorted(SILENT))
async def test_committed_audio_without_speech_is_an_item_with_an_empty_transcript(
    client: SocketClient, gateway: ServedGateway, kind: str
) -> None:
    await client.update(audio={"input": {"turn_detection": None, "transcription": {"model": "x"}}})
    await client.append(drawn(kind))
    await client.send("input_audio_buffer.commit")
    item = (await client.until(COMMITTED))["item_id"]
    done = await client.until(f"{TRANSCRIPTION}.completed")
    assert (done["item_id"], done["transcript"], done["usage"]["seconds"]) == (item, "", 2.0)
    assert f"{TRANSCRIPTION}.delta" not in client.kinds() and not num_heard(gateway)


async def test_buzz_during_a_response_interrupts_it_for_a_moment(
    page: SocketClient, gateway: ServedGateway
) -> None:
    """A buzz during a response interrupts it only for a moment, although the model would hear words
    in it.
    """
    gateway.client.script = Script(
        num_samples=8 * ANSWER_HZ, samples_per_chunk=FRAME_SAMPLES, gap_s=0.01, heard="thanks"
    )
    await page.ask("count")
    first = (await page.until("response.created"))["response"]
    await page.until_audio(first["id"], FRAME_SAMPLES)
    await page.speak(buzz())
    assert (await page.done())["status"] == "cancelled"
    assert (await page.until("response.created"))["response"]["id"] != first["id"]
    assert COMMITTED not in page.kinds()
    assert {spec.kind for spec, _ in gateway.client.submitted} == {"voice"}, "no transcription"
    assert all(not spec.audio for spec, _ in gateway.client.submitted)
