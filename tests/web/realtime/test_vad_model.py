"""The voice detection model: the released file's digest, batching, and probabilities of speech and
noise.
"""

import asyncio
import hashlib

import numpy as np

from fleet.processing.voice_activity import FRAME_SAMPLES, VadState, speech_probabilities
from tests.support import REPO
from tests.web.realtime.speech_samples import QUESTION, blocks, silence, speech
from web.realtime.audio.formats import PcmFormat
from web.realtime.audio.input_buffer import AudioInputBuffer
from web.realtime.audio.turn_detector import (
    TurnEvent,
    TurnPaused,
    TurnRules,
    TurnStarted,
    TurnStopped,
)
from web.realtime.audio.vad import VadBatcher

FOLDER = REPO / "fleet" / "processing" / "vad_model"
SHA256 = {
    "silero_vad.onnx": "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    "LICENSE": "2e63e9a38b6e8fc0c7bc37ce174caca1862870856c6daf5697cfb785e925520b",
}
"""SHA-256 digests of files in silero-vad 6.2.3 on PyPI."""


def events(pcm: bytes, block_ms: int = 20, *, gated: bool = True) -> list[TurnEvent]:
    buffer, found = AudioInputBuffer(PcmFormat(), TurnRules()), list[TurnEvent]()
    for block in blocks(pcm, block_ms):
        for piece in buffer.split(block):
            buffer.append(piece)
            while (frame := buffer.next_frame()) is not None:
                found += buffer.classify(
                    frame,
                    0.0
                    if frame.is_silent and gated
                    else speech_probabilities([buffer.vad], [frame.samples])[0],
                )
            buffer.drop_silence()
    return found


def test_vendored_model_is_the_released_one() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    assert found == SHA256


def test_speech_is_one_turn_in_blocks_of_any_length() -> None:
    """Speech is one turn for any block length. Silence resets the model by blocks, so that a frame
    more or less may be classified before the speech.
    """
    pcm = silence(500) + speech(QUESTION) + silence(900)
    for block_ms in (7, 20, 40, 100, 3_000):
        started, paused, stopped = events(pcm, block_ms)
        assert (
            isinstance(started, TurnStarted)
            and isinstance(paused, TurnPaused)
            and isinstance(stopped, TurnStopped)
        )
        assert (
            8_000 <= started.voiced <= 8_000 + 2 * FRAME_SAMPLES
            and started.voiced - started.start == 4_800
        )
        assert (paused.end, stopped.end, stopped.voiced_end) == (
            40_448,
            40_448,
            36_864,
        ) and stopped.voiced_ms > 1_700


def test_skipped_silence_preserves_audio_and_positions() -> None:
    """Skipped silence preserves audio and its positions after any number of silences: the
    resampler's delay does not add up.
    """
    tick = np.zeros(24_000, "<i2")
    tick[12_000:12_240] = 10_000
    buffer = AudioInputBuffer(PcmFormat(), TurnRules())
    for block in blocks(20 * tick.tobytes() + silence(1_000), 20):
        buffer.append(block)
    assert buffer.position == 21 * 16_000
    levels = np.abs(np.frombuffer(buffer.peek(0, 20 * 16_000), "<i2").astype(int)).reshape(
        20, 16_000
    )
    loud = [np.flatnonzero(second > 5_000) for second in levels]
    assert all(abs(int(at[0]) - 8_000) < 32 and abs(int(at[-1]) - 8_160) < 32 for at in loud)


def test_skipping_silence_changes_no_turn() -> None:
    hum = np.random.default_rng(1).integers(-40, 40, 2 * 24_000).astype("<i2").tobytes()
    pcm = hum + speech(QUESTION) + hum + speech("count from one to five") + hum
    gated, ungated = events(pcm), events(pcm, gated=False)
    ends = [
        [event.voiced_end for event in those if isinstance(event, TurnStopped)]
        for those in (gated, ungated)
    ]
    starts = [
        [event.voiced for event in those if isinstance(event, TurnStarted)]
        for those in (gated, ungated)
    ]
    assert len(ends[0]) == 2
    for one, other in (ends, starts):
        assert np.allclose(one, other, atol=2 * FRAME_SAMPLES), (
            "no more than where a frame's verdict is a close one"
        )


def test_batched_streams_have_the_probabilities_of_single_ones() -> None:
    spoken = np.frombuffer(speech(QUESTION), "<i2").astype(np.float32) / np.float32(32768)
    streams = [spoken[offset : offset + 20 * 512].reshape(20, 512) for offset in (0, 700, 5_000)]
    alone = [
        [speech_probabilities([vad], [frame])[0] for frame in stream]
        for vad, stream in ((VadState(), stream) for stream in streams)
    ]
    vads = [VadState() for _ in streams]
    together = [speech_probabilities(vads, [stream[at] for stream in streams]) for at in range(20)]
    assert np.abs(np.array(alone).T - together).max() < 1e-4 and np.array(alone).max() > 0.9


async def test_streams_share_a_batch_and_a_recording_does_not_wait() -> None:
    """Streams share a batch, and a recording does not wait for the batch interval: the clock stands
    still.
    """
    together, streams, frame = (
        VadBatcher(lambda: 100.0),
        [VadState() for _ in range(8)],
        np.zeros(512, np.float32),
    )
    first = await together.probability(streams[0], frame)
    others = await asyncio.gather(*(together.probability(vad, frame) for vad in streams[1:]))
    assert np.allclose(others, first, atol=1e-6)
    assert all(vad.state.base is streams[1].state.base for vad in streams[1:]), (
        "one call of the model for all"
    )
    recording, crowd = VadState(), [VadState() for _ in range(3)]
    for number in range(40):
        asked = asyncio.ensure_future(
            together.probability(recording, frame, behind=number % 2 == 0)
        )
        if number < 8:
            await asked
        else:
            for _ in range(3):
                await asyncio.sleep(0)
            assert asked.done(), "judged as soon as the loop has turned, without any time passing"
    await asyncio.gather(*(together.probability(vad, frame, behind=True) for vad in crowd))
    assert crowd[0].state.base is crowd[2].state.base, (
        "those who are behind are judged together too"
    )


def test_noise_and_a_tone_are_not_speech() -> None:
    noise = (np.random.default_rng(0).normal(0, 3_000, 3 * 24_000)).astype("<i2").tobytes()
    tone = (
        (8_000 * np.sin(2 * np.pi * 700 * np.arange(3 * 24_000) / 24_000)).astype("<i2").tobytes()
    )
    assert events(noise) == [] and events(tone) == []
