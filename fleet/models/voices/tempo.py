"""Faster speech at the same pitch, by FFmpeg's filter `atempo`."""

from fractions import Fraction

import av
import av.error
import numpy as np
from av.filter import Graph
from numpy.typing import NDArray


def faster(samples: NDArray[np.float32], rate_hz: int, factor: float) -> NDArray[np.float32]:
    """Return samples played `factor` times as fast: round(length / factor) samples."""
    length = round(len(samples) / factor)
    if not length or factor == 1:
        return samples[:length]
    graph = Graph()
    source = graph.add_abuffer(
        sample_rate=rate_hz, format="flt", layout="mono", time_base=Fraction(1, rate_hz)
    )
    tempo, sink = graph.add("atempo", f"{factor:.6f}"), graph.add("abuffersink")
    source.link_to(tempo)
    tempo.link_to(sink)
    graph.configure()
    frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
    frame.sample_rate, frame.pts = rate_hz, 0
    graph.push(frame)
    graph.push(None)
    played = _pull_all(graph)[:length]
    return np.pad(played, (0, length - len(played)))


def _pull_all(graph: Graph) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    while True:
        try:
            frame = graph.pull()
        except av.error.EOFError:
            return np.concatenate(parts)
        assert isinstance(frame, av.AudioFrame)
        parts.append(frame.to_ndarray()[0])
