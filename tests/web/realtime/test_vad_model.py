"""The detector's model is the released one, and tells speech from noise."""

import hashlib

import numpy as np

from tests.support import REPO
from tests.web.realtime.spoken import blocks, silence, speech
from web.realtime.ear import Ear
from web.realtime.turns import Started, Stopped, TurnEvent, TurnRules
from web.realtime.vad import judge

FOLDER = REPO / "web" / "realtime" / "vad_model"
SHA256 = {
    "silero_vad.onnx": "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    "LICENSE": "2e63e9a38b6e8fc0c7bc37ce174caca1862870856c6daf5697cfb785e925520b",
}
"""Of silero-vad 6.2.3 on PyPI."""


def events(pcm: bytes, block_ms: int = 20) -> list[TurnEvent]:
    ear, told = Ear(24_000, TurnRules()), list[TurnEvent]()
    for block in blocks(pcm, block_ms):
        for piece in ear.pieces(block):
            ear.hear(piece)
            while (frame := ear.next_frame()) is not None:
                (probability,) = judge([ear.vad], [frame.samples])
                told += ear.judged(frame, probability)
            ear.forget_silence()
    return told


def test_the_vendored_model_is_the_released_one() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    assert found == SHA256


def test_speech_is_a_turn_however_it_is_cut() -> None:
    pcm = silence(500) + speech("what day comes after monday") + silence(900)
    whole = events(pcm)
    started, stopped = whole[0], whole[-1]
    assert isinstance(started, Started) and isinstance(stopped, Stopped)
    assert 400 <= started.voiced / 16 <= 700 and stopped.voiced_ms > 1_000
    for block_ms in (7, 100, 3_000):
        assert events(pcm, block_ms) == whole


def test_noise_and_a_tone_are_no_speech() -> None:
    noise = (np.random.default_rng(0).normal(0, 3_000, 3 * 24_000)).astype("<i2").tobytes()
    tone = (8_000 * np.sin(2 * np.pi * 700 * np.arange(3 * 24_000) / 24_000)).astype("<i2").tobytes()
    assert events(noise) == [] and events(tone) == []
