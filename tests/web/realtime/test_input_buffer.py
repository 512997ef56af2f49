"""The audio input buffer is exact to the sample: the resampler neither cuts the end of audio nor
leaks it into later audio.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.web.realtime.socket_client import SocketClient
from web.realtime.audio.formats import AudioFormat, PcmaFormat, PcmFormat, PcmuFormat
from web.realtime.audio.input_buffer import AudioInputBuffer
from web.realtime.audio.turn_detector import RATE_HZ, TurnRules

RATES = [8_000, 11_025, 16_000, 24_000, 44_100, 48_000]
NEAR = RATE_HZ // 500
"""Upper bound, in samples, of the resampler's blur at an edge between sound and silence."""
DITHER = 2
"""Upper bound of a resampled silent sample, of 32768."""


def tone(rate_hz: int, ms: int) -> bytes:
    return (
        (10_000 * np.sin(2 * np.pi * 400 * np.arange(rate_hz * ms // 1000) / rate_hz))
        .astype("<i2")
        .tobytes()
    )


def quiet(rate_hz: int, ms: int) -> bytes:
    return bytes(2 * (rate_hz * ms // 1000))


def hear(buffer: AudioInputBuffer, pcm: bytes, step: int | None = None) -> None:
    for piece in _cut(buffer, pcm, step):
        buffer.append(piece)


def _cut(buffer: AudioInputBuffer, pcm: bytes, step: int | None) -> Iterator[bytes]:
    for start in range(0, len(pcm), step or len(pcm)):
        yield from buffer.split(pcm[start : start + (step or len(pcm))])


def level(pcm: bytes) -> NDArray[np.int_]:
    return np.abs(np.frombuffer(pcm, "<i2").astype(int))


def loud(pcm: bytes) -> NDArray[np.intp]:
    """Return the positions of the samples that are loud and outside a blurred edge."""
    return np.flatnonzero(level(pcm) > 3_000)


def same(one: bytes, other: bytes) -> bool:
    return len(one) == len(other) and int(np.abs(level(one) - level(other)).max()) <= 2 * DITHER


@pytest.mark.parametrize("rate_hz", RATES)
def test_end_of_audio_is_retained_before_silence(rate_hz: int) -> None:
    """The end of audio is retained before a silence, even if recorded pieces are as long as the
    silence that is skipped.
    """
    buffer = AudioInputBuffer(PcmFormat(rate=rate_hz), TurnRules())
    pcm = quiet(rate_hz, 420) + tone(rate_hz, 80) + quiet(rate_hz, 1_500)
    hear(buffer, pcm)
    at = loud(buffer.peek(0, buffer.position))
    assert abs(int(at[0]) - RATE_HZ * 420 // 1000) < NEAR and abs(int(at[-1]) - RATE_HZ // 2) < NEAR
    assert buffer.position == len(pcm) // 2 * RATE_HZ // rate_hz, (
        "and the stillness after it was none to resample"
    )


@pytest.mark.parametrize("rate_hz", RATES)
@pytest.mark.parametrize("rules", [None, TurnRules()])
def test_taken_audio_ends_with_its_last_sample(rate_hz: int, rules: TurnRules | None) -> None:
    buffer, before = AudioInputBuffer(PcmFormat(rate=rate_hz), rules), 0
    for ms in (100, 3, 1_234, 700):
        pcm = tone(rate_hz, ms)
        hear(buffer, pcm, 2 * rate_hz // 50)
        end = before + len(pcm) // 2
        length = end * RATE_HZ // rate_hz - before * RATE_HZ // rate_hz
        assert (buffer.received, buffer.retained_ms) == (
            end * RATE_HZ // rate_hz,
            length * 1000 // RATE_HZ,
        )
        taken = buffer.take_all()
        assert len(taken) == 2 * length and int(loud(taken)[-1]) > length - NEAR, "its end is there"
        assert (buffer.position, buffer.retained_ms) == (buffer.received, 0)
        before = end


@pytest.mark.parametrize("rate_hz", RATES)
@pytest.mark.parametrize("take", [True, False])
def test_removed_audio_does_not_leak_into_later_audio(rate_hz: int, take: bool) -> None:
    buffer = AudioInputBuffer(PcmFormat(rate=rate_hz), None)
    hear(buffer, tone(rate_hz, 300))
    if take:
        buffer.take_all()
    else:
        buffer.clear()
    assert (buffer.position, buffer.retained_ms) == (buffer.received, 0)
    hear(buffer, quiet(rate_hz, 200))
    assert int(level(buffer.take_all()).max()) <= DITHER


@pytest.mark.parametrize("take", [True, False])
def test_half_a_sample_does_not_shift_the_next_turn(take: bool) -> None:
    buffer = AudioInputBuffer(PcmFormat(rate=24_000), None)
    hear(buffer, tone(24_000, 200) + b"\x55")
    if take:
        buffer.take_all()
    else:
        buffer.clear()
    clean = AudioInputBuffer(PcmFormat(rate=24_000), None)
    for listening in (buffer, clean):
        hear(listening, tone(24_000, 200))
    assert same(buffer.take_all(), clean.take_all())


def test_half_a_sample_is_completed_within_its_turn() -> None:
    buffer, clean, pcm = (
        AudioInputBuffer(PcmFormat(rate=24_000), None),
        AudioInputBuffer(PcmFormat(rate=24_000), None),
        tone(24_000, 200),
    )
    hear(buffer, pcm, 801)
    hear(clean, pcm)
    assert same(buffer.take_all(), clean.take_all())


@pytest.mark.parametrize("rate_hz", RATES)
def test_taking_audio_does_not_move_later_positions(rate_hz: int) -> None:
    """A tick keeps its position whether silence is skipped or audio is taken or cleared."""
    buffer, silent = AudioInputBuffer(PcmFormat(rate=rate_hz), TurnRules()), quiet(rate_hz, 500)
    second = silent + tone(rate_hz, 20) + silent
    for number in range(12):
        begin = buffer.received
        hear(buffer, second, 2 * rate_hz // 50)
        assert buffer.received - buffer.position <= RATE_HZ * 12 // 100
        at = begin + loud(buffer.peek(begin, buffer.position))
        middle = begin + len(silent) // 2 * RATE_HZ / rate_hz
        assert abs(int(at[0]) - middle) < NEAR and abs(int(at[-1]) - middle - RATE_HZ // 50) < NEAR
        if number % 3 == 1:
            buffer.take_all()
        elif number % 3 == 2:
            buffer.clear()
    assert buffer.received == 12 * (len(second) // 2) * RATE_HZ // rate_hz


@pytest.mark.parametrize("form", [PcmuFormat(), PcmaFormat()])
def test_telephone_audio_is_heard_as_its_samples(form: AudioFormat) -> None:
    telephone, plain = AudioInputBuffer(form, None), AudioInputBuffer(PcmFormat(rate=8_000), None)
    audio = form.of_pcm(np.frombuffer(tone(8_000, 700) + quiet(8_000, 300), "<i2"))
    hear(telephone, audio, 161)
    hear(plain, form.to_pcm(audio), 322)
    assert telephone.received == plain.received == RATE_HZ
    assert same(telephone.take_all(), plain.take_all())


@pytest.mark.parametrize("rate_hz", RATES)
def test_change_of_the_format_within_a_turn_loses_no_sample(rate_hz: int) -> None:
    """A tone goes on without a gap where its format changes, and what follows keeps its place."""
    buffer = AudioInputBuffer(PcmFormat(rate=rate_hz), None)
    hear(buffer, tone(rate_hz, 300) + b"\x55")
    buffer.set_format(PcmuFormat())
    hear(buffer, PcmuFormat().of_pcm(np.frombuffer(tone(8_000, 300) + quiet(8_000, 300), "<i2")))
    assert abs(buffer.received - RATE_HZ * 9 // 10) <= 1 and buffer.retained_ms in (899, 900)
    at = loud(buffer.take_all())
    assert abs(int(at[-1]) - RATE_HZ * 6 // 10) < NEAR
    assert int(np.diff(at).max()) < RATE_HZ // 400, "longer quiet than a zero crossing"


async def test_commit_of_a_tenth_of_a_second_is_complete(page: SocketClient) -> None:
    """A commit contains all its audio: the client commits two turns, and audio cleared in between
    is in neither.
    """
    sound, still = tone(24_000, 100), quiet(24_000, 100)
    await page.detect_turns(None)
    kept: list[bytes] = []
    for pcm, event in (
        (sound, "commit"),
        (sound, "clear"),
        (still + b"\x55", "commit"),
        (still + sound, "commit"),
    ):
        await page.send("input_audio_buffer.append", audio=b64encode(pcm).decode())
        await page.send(f"input_audio_buffer.{event}")
        if event == "clear":
            await page.until("input_audio_buffer.cleared")
            continue
        item = (await page.until("conversation.item.done"))["item"]["id"]
        body = await page.retrieve(item)
        kept.append(b64decode(body["content"][0]["audio"]))
    assert "error" not in page.kinds() and [len(pcm) for pcm in kept] == [
        len(sound),
        len(still),
        len(still + sound),
    ]
    assert int(loud(kept[0])[-1]) > len(sound) // 2 - NEAR and int(level(kept[1]).max()) <= DITHER
    assert int(loud(kept[2])[0]) > len(still) // 2 - NEAR, (
        "no noise, and nothing of what was before"
    )
