"""Spectrograms: levels of a tone and of silence, and the written image file."""

from pathlib import Path

import numpy as np

from fleet.lab.pocket.judge.demo import DEPTH_DB, HOP_SAMPLES, TOP_HZ, Panel, draw, levels_db
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ


def test_spectrogram_of_tone_is_one_line() -> None:
    tone = 0.3 * np.sin(2 * np.pi * 2000 * np.arange(SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ).astype(
        np.float32
    )
    levels = levels_db(np.concatenate([np.zeros_like(tone), tone]))
    assert levels.shape[1] == 2 * SAMPLE_RATE_HZ // HOP_SAMPLES + 1
    of_silence, of_tone = levels[:, 2:98], levels[:, 102:198]
    assert of_silence.max() == -DEPTH_DB
    loudest = of_tone.argmax(0)
    assert set(loudest.tolist()) == {round(2000 / TOP_HZ * (len(levels) - 1))}
    assert of_tone.max(0).min() > -1
    assert np.mean(of_tone == -DEPTH_DB) > 0.9


def test_spectrogram_of_silence_and_empty_audio_is_drawn(tmp_path: Path) -> None:
    assert set(levels_db(np.zeros(0, np.float32)).ravel().tolist()) == {-DEPTH_DB}
    panels = [
        Panel(title=str(length), samples=np.zeros(length, np.float32)) for length in (0, 2400)
    ]
    draw(panels, tmp_path / "silence.png")
    assert (tmp_path / "silence.png").read_bytes().startswith(b"\x89PNG")
