"""Trimming of an answer's leading silence: at most 60 ms of it is sent, the same at every
gateway.
"""

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from tests.web.conftest import Loaded, ServedGateway, bounded, serving, usage_of
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script, sine
from tests.web.test_resume import events, reported, streamed

LEAD = 5 * FRAME_SAMPLES
KEPT = RATE_HZ * 60 // 1000
SCRIPT = Script(lead_samples=LEAD, num_samples=RATE_HZ)
SENT = bytes(2 * KEPT) + sine(RATE_HZ).tobytes()
WHOLE = bytes(2 * LEAD) + sine(RATE_HZ).tobytes()
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}


@pytest.fixture(scope="module")
def keeping(loaded: Loaded, shared_gateway: ServedGateway) -> Iterator[ServedGateway]:
    """A gateway that does not trim leading silence, beside the shared one that does."""
    with serving(
        bounded(loaded, max_leading_silence_ms=None), client=shared_gateway.client
    ) as gateway:
        yield gateway


def speech(gateway: ServedGateway, text: str = "Hello there.") -> bytes:
    body = {"model": "omni", "input": text, "voice": "ethan", "response_format": "pcm"}
    return gateway.http.post("/v1/audio/speech", json=body).content


def test_leading_silence_is_trimmed_in_every_spoken_answer(gateway: ServedGateway) -> None:
    gateway.client.script = SCRIPT
    whole = gateway.create(**SPOKEN)
    audio = whole.choices[0].message.audio
    assert audio is not None and base64.b64decode(audio.data) == SENT
    assert reported(streamed(gateway)[1])[1] == SENT
    assert speech(gateway) == SENT
    details = usage_of(whole).completion_tokens_details
    assert details is not None and details.audio_tokens == -(-len(WHOLE) // 2 // FRAME_SAMPLES), (
        "what was made is counted"
    )


def test_leading_silence_is_not_trimmed_without_limit(
    gateway: ServedGateway, keeping: ServedGateway
) -> None:
    gateway.client.script = SCRIPT
    assert reported(streamed(keeping)[1])[1] == WHOLE == speech(keeping)


def test_resumed_answer_has_same_audio_at_gateway_with_other_limit(
    gateway: ServedGateway, keeping: ServedGateway
) -> None:
    gateway.client.script = SCRIPT
    request, _ = streamed(gateway)
    path = f"/v1/fleet/requests/{request}/stream"
    whole = events(keeping.http.get(path).text)
    assert reported(whole)[1] == SENT
    ids = [event_id for event_id, _ in whole if event_id]
    for last_id in ids[:: len(ids) // 3]:
        kept = max(position for position, (event_id, _) in enumerate(whole) if event_id == last_id)
        rest = events(keeping.http.get(path, headers={"last-event-id": last_id}).text)
        assert reported(whole[: kept + 1])[1] + reported(rest)[1] == SENT, last_id


def test_silent_answer_is_trimmed(gateway: ServedGateway) -> None:
    gateway.client.script = Script(lead_samples=3 * RATE_HZ, num_samples=0)
    answer = gateway.create(**SPOKEN)
    audio = answer.choices[0].message.audio
    assert (
        audio is not None
        and base64.b64decode(audio.data) == bytes(2 * KEPT)
        and answer.choices[0].finish_reason == "stop"
    )
    assert speech(gateway) == bytes(2 * KEPT)


def test_pauses_between_speech_pieces_are_not_trimmed(gateway: ServedGateway) -> None:
    gateway.client.script = SCRIPT
    sound = speech(gateway, "The first sentence is here. And then comes another one! " * 4)
    num_pieces = len(gateway.client.submitted)
    assert num_pieces > 1 and sound == SENT + WHOLE * (num_pieces - 1)


def test_request_audio_is_not_trimmed(gateway: ServedGateway) -> None:
    gateway.client.script = SCRIPT
    request, _ = streamed(gateway)
    wav = gateway.http.get(f"/v1/fleet/requests/{request}/audio").content
    assert np.frombuffer(wav[44:], "<i2").tobytes() == WHOLE
