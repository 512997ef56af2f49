"""Voice sessions in G.711 have the audio, the positions and the times of the same session in
PCM16.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator

import numpy as np
import pytest
import soxr

from fleet.processing import g711
from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import Event, SocketClient, opened
from tests.web.realtime.speech_samples import QUESTION, question, speech, spoken
from web.realtime.audio.client_audio import in_format
from web.realtime.audio.echo import ECHO_SCORE, echo_score
from web.realtime.audio.formats import AudioFormat, PcmaFormat, PcmuFormat
from web.realtime.snapshot import STATE

LAWS: list[AudioFormat] = [PcmuFormat(), PcmaFormat()]
NAMES = ["audio/pcmu", "audio/pcma"]
WAVE = spoken(RATE_HZ + 1)
"""A second of speech, whose last sample has no place in whole samples at 8 kHz."""
SPOKEN = Script(text="one two three", wave=WAVE, words=[("one", 8_000), (" two", 16_000)])


def telephone(pcm: bytes, form: AudioFormat) -> bytes:
    """Return audio at 24 kHz as a telephone network sends it."""
    return form.of_pcm(soxr.resample(np.frombuffer(pcm, "<i2"), RATE_HZ, g711.RATE_HZ))


def heard(audio: bytes, form: AudioFormat) -> np.ndarray:
    return np.frombuffer(form.to_pcm(audio), "<i2")


def wave_audio(first: int, last: int) -> bytes:
    return WAVE[max(0, first) : last].astype("<i2").tobytes()


def pieces(sizes: Iterator[int], form: AudioFormat, length: int) -> bytes:
    audio, first = b"", 0
    while first < length:
        last = min(length, first + form.stride * next(sizes))
        audio, first = audio + in_format(wave_audio, first, last, form), last
    return audio


@pytest.mark.parametrize("form", LAWS, ids=NAMES)
def test_pieces_of_any_length_join_to_the_whole_audio(form: AudioFormat) -> None:
    whole = in_format(wave_audio, 0, len(WAVE), form)
    assert len(whole) == len(WAVE) // 3 + 1
    sizes = np.random.default_rng(5).integers(1, 900, 10_000)
    assert pieces(iter(sizes.tolist()), form, len(WAVE)) == whole
    ideal = soxr.resample(WAVE.astype(np.float32), RATE_HZ, g711.RATE_HZ)
    error = np.abs(heard(whole, form)[: len(ideal)] - ideal)
    assert (error <= np.abs(ideal) / 30 + 18).all()


@pytest.mark.parametrize("form", LAWS, ids=NAMES)
def test_echo_over_a_telephone_is_an_echo(form: AudioFormat) -> None:
    """A telephone's echo returns narrow, quieter and coded twice."""
    played = np.frombuffer(speech(QUESTION), "<i2")
    once = heard(telephone(played.tobytes(), form), form)
    back = heard(form.of_pcm((once * 0.3).astype(np.int16)), form)
    wide = soxr.resample(back, g711.RATE_HZ, 16_000)
    for first in range(1_600, len(wide) - 6_400, 3_200):
        piece = wide[first : first + 6_400]
        if np.abs(piece).mean() > 100:
            near = played[first * 3 // 2 : (first + 6_400) * 3 // 2]
            assert echo_score(piece, near, RATE_HZ) > ECHO_SCORE


async def use(client: SocketClient, name: str) -> None:
    form = {"type": name}
    errors, now = await client.update(
        audio={"input": {"format": form}, "output": {"format": {**form, "rate": 8_000}}}
    )
    assert not errors
    assert now["audio"]["input"]["format"] == now["audio"]["output"]["format"] == form


async def append(client: SocketClient, audio: bytes) -> None:
    for start in range(0, len(audio), 160):
        block = b64encode(audio[start : start + 160]).decode()
        await client.send("input_audio_buffer.append", audio=block)


def received(events: list[Event], response: str) -> bytes:
    """Return the audio of a response, whose base64 can be joined before it is decoded."""
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.output_audio.delta" and event["response_id"] == response
    ]
    assert not any("=" in delta for delta in deltas[:-1])
    return b64decode("".join(deltas))


@pytest.mark.parametrize("form", LAWS, ids=NAMES)
async def test_telephone_conversation_has_the_times_of_a_conversation_in_pcm(
    gateway: ServedGateway, form: AudioFormat
) -> None:
    gateway.client.script = SPOKEN
    name = NAMES[LAWS.index(form)]
    times: list[tuple[int, int]] = []
    for is_telephone in (False, True):
        async with opened(gateway, "/v1/realtime") as client:
            if is_telephone:
                await use(client, name)
                await append(client, telephone(question(), form))
            else:
                await client.append(question())
            started = await client.until("input_audio_buffer.speech_started")
            stopped = await client.until("input_audio_buffer.speech_stopped")
            times.append((started["audio_start_ms"], stopped["audio_end_ms"]))
            done = await client.completed()
            audio = received(client.events, done["id"])
            item = (await client.retrieve(stopped["item_id"]))["content"][0]
            spec, _ = gateway.client.submitted[-1]
            if is_telephone:
                assert done["audio"]["output"]["format"] == {"type": name}
                assert audio == in_format(wave_audio, 0, len(WAVE), form)
                assert len(b64decode(item["audio"])) * 2 == spec.audio[0].num_samples
            else:
                assert audio == WAVE.astype("<i2").tobytes()
    (begun, ended), (begun_again, ended_again) = times
    shift = max(abs(begun - begun_again), abs(ended - ended_again))
    assert shift <= 64, "two frames of voice detection"


@pytest.mark.parametrize("name", ["audio/pcm", *NAMES])
async def test_truncation_keeps_the_same_words_in_every_format(
    gateway: ServedGateway, client: SocketClient, name: str
) -> None:
    gateway.client.script = SPOKEN
    await client.update(audio={"output": {"format": {"type": name}}})
    item = (await client.complete("count"))["output"][0]["id"]
    error = await client.refusal_of(
        "conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1_100
    )
    assert "1000 ms" in error["message"]
    await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=500)
    await client.until("conversation.item.truncated")
    kept = (await client.retrieve(item))["content"][0]["transcript"]
    assert "one two three".startswith(kept) and kept != "one two three"


async def test_response_may_have_a_format_of_its_own(client: SocketClient) -> None:
    done = await client.complete("hi", audio={"output": {"format": {"type": "audio/pcma"}}})
    assert done["audio"]["output"]["format"] == {"type": "audio/pcma"}
    num_samples = -(-Script().num_samples // 3)
    assert len(received(client.events, done["id"])) == num_samples
    later = await client.complete("and now?")
    assert later["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": RATE_HZ}
    assert len(received(client.events, later["id"])) == 2 * Script().num_samples


async def test_response_continues_at_another_gateway_from_the_sample_that_was_received(
    loaded: Loaded,
) -> None:
    """The rest that another gateway sends joins the received audio to the byte; the client counts
    samples as it receives them.
    """
    wave = spoken(3 * RATE_HZ)
    form = PcmuFormat()

    def read(first: int, last: int) -> bytes:
        return wave[max(0, first) : last].astype("<i2").tobytes()

    whole = in_format(read, 0, len(wave), form)
    with serving(loaded) as here, serving(loaded, client=here.client) as there:
        here.client.script = Script(wave=wave, samples_per_chunk=FRAME_SAMPLES)
        async with opened(here, "/v1/realtime", fleet=1) as client:
            await use(client, "audio/pcmu")
            await client.ask("count")
            response = (await client.until("response.created"))["response"]["id"]
            voiced = await client.until("fleet.voiced")
            await client.until("response.output_audio.delta")

            async def is_written() -> bool:
                stored = here.client.voice.held[client.session].fields
                return response.encode() in stored.get(STATE, b"")

            await await_until(is_written, "the response to be written down")
            had = received(client.events, response)
            await client.drop()
        assert whole.startswith(had) and voiced["sample"] < 800
        query = {"session": client.session, "response": response, "samples": len(had) - 100}
        async with opened(there, "/v1/realtime", fleet=1, **query) as again:
            while len(rest := received(again.events, response)) < len(whole) - len(had) + 100:
                played = len(had) - 100 + len(rest)
                await again.send("fleet.played", response_id=response, samples=played)
                await again.until("response.output_audio.delta")
    assert whole == had[:-100] + rest
