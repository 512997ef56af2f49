"""Spectrograms of several answers in one picture, on one time axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ
from fleet.lab.report.plot import saved_figure

WINDOW_SAMPLES, HOP_SAMPLES = 720, 240
"""Windows of 30 ms, long enough to resolve harmonics, every 10 ms."""
TOP_HZ: Final = 8_000
DEPTH_DB: Final = 60.0
"""Levels further below the loudest are drawn as silence."""
NUM_COLOURS: Final = 20
"""Steps of 3 dB. With more colours or interpolation the file is several times as large."""
MIN_S: Final = 1.0
WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.0, 2.3, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One spectrogram. `samples`: mono at 24 kHz in -1..1."""

    title: str
    samples: NDArray[np.float32]


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the picture; `panels` has at least one."""
    from matplotlib import colormaps

    size = (WIDTH_INCHES, HEIGHT_INCHES * len(panels))
    longest_s = max(MIN_S, *(len(panel.samples) / SAMPLE_RATE_HZ for panel in panels))
    with saved_figure(path, len(panels), 1, size, dpi=DPI, sharex=True) as (_, places):
        for panel, place in zip(panels, places, strict=True):
            levels = levels_db(panel.samples)
            length_s = levels.shape[1] * HOP_SAMPLES / SAMPLE_RATE_HZ
            extent = (0, length_s, 0, TOP_HZ / 1000)
            style = {
                "cmap": colormaps["magma"].resampled(NUM_COLOURS),
                "vmin": -DEPTH_DB,
                "vmax": 0,
                "interpolation": "nearest",
            }
            place.imshow(levels, origin="lower", aspect="auto", extent=extent, **style)
            place.set_title(panel.title, fontsize=9)
            place.set(xlim=(0, longest_s), ylabel="kHz")
        places[-1].set_xlabel("s")


def levels_db(samples: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return [frequencies up to `TOP_HZ`, hops] in dB below the loudest level, clipped at
    `-DEPTH_DB`; lowest frequency first.

    Silence is `-DEPTH_DB` everywhere.
    """
    padded = np.pad(samples.astype(np.float64), WINDOW_SAMPLES // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES]
    power = np.abs(np.fft.rfft(windows * np.hanning(WINDOW_SAMPLES), axis=1)) ** 2
    power = power[:, : 1 + TOP_HZ * WINDOW_SAMPLES // SAMPLE_RATE_HZ]
    floor = max(float(power.max(initial=0)), 1e-12) * 10 ** (-DEPTH_DB / 10)
    loudest = floor * 10 ** (DEPTH_DB / 10)
    return 10 * np.log10(np.maximum(power, floor) / loudest).T
