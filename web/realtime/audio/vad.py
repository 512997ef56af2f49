"""Silero's voice activity detector: probability of speech in each 32 ms of a stream. One model per process, one state per stream.

Source: silero-vad 6.2.3 (MIT), `silero_vad.onnx` and the `OnnxWrapper` beside it. Knows no turn.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from web.realtime.audio.turn_detector import FRAME_MS, FRAME_SAMPLES, RATE_HZ

MODEL = "silero_vad.onnx"
CONTEXT_SAMPLES = 64
"""The model reads each frame together with the end of the one before."""
STATE_SHAPE = (2, 1, 128)
GATHER_S = 0.012
"""Time between two batches. A frame is 32 ms: of fifty streams, about twenty share a batch."""
AHEAD_S = 0.1
"""A stream that arrives so much faster than real time, such as a recording, waits for no batch."""

Samples = NDArray[np.float32]
_RATE = np.array(RATE_HZ, np.int64)


@cache
def model() -> onnxruntime.InferenceSession:
    """Load the model once; that takes most of a second, so do it before the first session."""
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.log_severity_level = 3
    model = (resources.files("web.realtime.audio") / "vad_model" / MODEL).read_bytes()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Vad:
    """State of one stream. `paced_s`: the time at which its next frame would arrive in real time."""

    def __init__(self) -> None:
        self.paced_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the audio so far, so that a turn is detected independently of the one before."""
        self.state: Samples = np.zeros(STATE_SHAPE, np.float32)
        self.context: Samples = np.zeros(CONTEXT_SAMPLES, np.float32)


def speech_probabilities(vads: Sequence[Vad], frames: Sequence[Samples]) -> list[float]:
    """Run the model once for the next frame of each stream. A frame alone takes about 0.1 ms, among twenty a third of that.

    Shapes: a frame is [512] samples at 16 kHz in -1..1. Invariants: no stream occurs twice.
    """
    windows = np.empty((len(vads), CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)
    for window, vad, frame in zip(windows, vads, frames, strict=True):
        window[:CONTEXT_SAMPLES], window[CONTEXT_SAMPLES:] = vad.context, frame
    states = vads[0].state if len(vads) == 1 else np.concatenate([vad.state for vad in vads], axis=1)
    outputs = model().run(None, {"input": windows, "state": states, "sr": _RATE})
    probabilities, next_states = cast("tuple[Samples, Samples]", tuple(outputs))
    for row, vad in enumerate(vads):
        vad.state, vad.context = next_states[:, row : row + 1], windows[row, -CONTEXT_SAMPLES:]
    return [float(probability) for probability in probabilities[:, 0]]


class VadBatcher:
    """Runs the model for the streams of one event loop in batches, one each `GATHER_S`, at a third of the cost.

    A single live stream never waits; of many, each waits a little. A recording is processed as fast as the loop runs, in the same
    batches, so that a gateway that falls behind does not pay more for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[Vad, Samples, asyncio.Future[float]]] = []
        self._last_batch_s = 0.0
        self._due: asyncio.Handle | None = None

    async def probability(self, vad: Vad, frame: Samples, *, behind: bool = False) -> float:
        """Return the probability of speech. `behind`: the stream's next frame has arrived already."""
        loop, now_s = asyncio.get_running_loop(), self._clock()
        vad.paced_s = max(vad.paced_s, now_s) + FRAME_MS / 1000
        wait_s = self._last_batch_s + GATHER_S - now_s
        if behind or vad.paced_s - now_s > AHEAD_S:
            wait_s = 0.0
        result: asyncio.Future[float] = loop.create_future()
        self._waiting.append((vad, frame, result))
        if self._due is not None and wait_s <= 0:
            self._due.cancel()
            self._due = None
        if self._due is None:
            self._due = loop.call_later(wait_s, self._run_batch) if wait_s > 0 else loop.call_soon(self._run_batch)
        return await result

    def _run_batch(self) -> None:
        waiting, self._waiting, self._due = self._waiting, [], None
        self._last_batch_s = self._clock()
        probabilities = speech_probabilities([vad for vad, _, _ in waiting], [frame for _, frame, _ in waiting])
        for (_, _, result), probability in zip(waiting, probabilities, strict=True):
            if not result.done():
                result.set_result(probability)
