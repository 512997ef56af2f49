"""Silero's voice activity detector: the probability of speech in each 32 ms of a stream. One model a process, a state a stream.

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
"""Each frame is seen together with the end of the one before."""
STATE_SHAPE = (2, 1, 128)
GATHER_S = 0.012
"""A frame is 32 ms: among fifty streams twenty are judged together."""
AHEAD_S = 0.1
"""Who sends sound so much faster than it is spoken waits for nobody: a recording is heard as fast as it comes."""

Samples = NDArray[np.float32]
_RATE = np.array(RATE_HZ, np.int64)


@cache
def model() -> onnxruntime.InferenceSession:
    """Loaded once, which takes a good part of a second: best before anybody listens."""
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.log_severity_level = 3
    model = (resources.files("web.realtime.audio") / "vad_model" / MODEL).read_bytes()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Vad:
    """What is remembered of one stream. `paced_s`: when its next frame is due, were it spoken as it comes."""

    def __init__(self) -> None:
        self.paced_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget what was heard: a turn is not judged by the one before."""
        self.state: Samples = np.zeros(STATE_SHAPE, np.float32)
        self.context: Samples = np.zeros(CONTEXT_SAMPLES, np.float32)


def judge(vads: Sequence[Vad], frames: Sequence[Samples]) -> list[float]:
    """The next frame of each stream, all in one call of the model. Alone a frame takes about 0.1 ms, among twenty a third of it.

    Shapes: a frame is [512] samples at 16 kHz in -1..1. Invariants: no stream is there twice.
    """
    windows = np.empty((len(vads), CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)
    for window, vad, frame in zip(windows, vads, frames, strict=True):
        window[:CONTEXT_SAMPLES], window[CONTEXT_SAMPLES:] = vad.context, frame
    states = vads[0].state if len(vads) == 1 else np.concatenate([vad.state for vad in vads], axis=1)
    told, after = cast("tuple[Samples, Samples]", tuple(model().run(None, {"input": windows, "state": states, "sr": _RATE})))
    for place, vad in enumerate(vads):
        vad.state, vad.context = after[:, place : place + 1], windows[place, -CONTEXT_SAMPLES:]
    return [float(one) for one in told[:, 0]]


class Together:
    """Judges the streams of one event loop, all that wait in one call of the model, once each `GATHER_S`: a single live stream
    never waits for that, and of many each waits a little, so that the model costs a third. A recording is judged as fast as the
    loop turns, still together with whoever else is there: a gateway that fell behind must not pay more for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[Vad, Samples, asyncio.Future[float]]] = []
        self._judged_s = 0.0
        self._due: asyncio.Handle | None = None

    async def probability(self, vad: Vad, frame: Samples, *, behind: bool = False) -> float:
        """`behind`: more of the stream is there already."""
        loop, now_s = asyncio.get_running_loop(), self._clock()
        vad.paced_s = max(vad.paced_s, now_s) + FRAME_MS / 1000
        wait_s = self._judged_s + GATHER_S - now_s
        if behind or vad.paced_s - now_s > AHEAD_S:
            wait_s = 0.0
        told: asyncio.Future[float] = loop.create_future()
        self._waiting.append((vad, frame, told))
        if self._due is not None and wait_s <= 0:
            self._due.cancel()
            self._due = None
        if self._due is None:
            self._due = loop.call_later(wait_s, self._judge) if wait_s > 0 else loop.call_soon(self._judge)
        return await told

    def _judge(self) -> None:
        waiting, self._waiting, self._due = self._waiting, [], None
        self._judged_s = self._clock()
        probabilities = judge([vad for vad, _, _ in waiting], [frame for _, frame, _ in waiting])
        for (_, _, told), probability in zip(waiting, probabilities, strict=True):
            if not told.done():
                told.set_result(probability)
