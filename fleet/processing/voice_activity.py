"""Silero's voice activity detector: probability of speech in each 32 ms of a stream.

One model per process, one state per stream. The model runs without the interpreter lock.
Source: silero-vad 6.2.3 (MIT), `silero_vad.onnx` and the `OnnxWrapper` beside it. Knows no turn and
no request.
"""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, cast

import numpy as np

from fleet.processing.base import Samples

if TYPE_CHECKING:
    import onnxruntime

RATE_HZ = 16_000
FRAME_SAMPLES = 512
FRAME_MS = 1000 * FRAME_SAMPLES // RATE_HZ
MODEL = "silero_vad.onnx"
CONTEXT_SAMPLES = 64
"""Samples of the previous frame that the model reads before each frame."""
STATE_SHAPE = (2, 1, 128)
_RATE = np.array(RATE_HZ, np.int64)


@cache
def model() -> "onnxruntime.InferenceSession":
    """Return the detector's model, loaded on the first call. Loading takes most of a second, so do
    it before the first session. The runtime is imported here, since it starts a thread, and a
    process with two threads forks no workers.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    model = (resources.files("fleet.processing") / "vad_model" / MODEL).read_bytes()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class VadState:
    """The detector's state for one stream of audio. `paced_s`: time at which the next frame would
    arrive in real time.
    """

    def __init__(self) -> None:
        self.paced_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the audio so far, so that a turn is detected independently of the one before."""
        self.state: Samples = np.zeros(STATE_SHAPE, np.float32)
        self.context: Samples = np.zeros(CONTEXT_SAMPLES, np.float32)


def speech_probabilities(vads: Sequence[VadState], frames: Sequence[Samples]) -> list[float]:
    """Return the probability of speech in the next frame of each stream. The model runs once for
    all: a single frame takes about 0.1 ms, each of twenty frames a third of that.

    Shapes: a frame is [512] samples at 16 kHz in -1..1. Invariants: no stream occurs twice.
    """
    windows = np.empty((len(vads), CONTEXT_SAMPLES + FRAME_SAMPLES), np.float32)
    for window, vad, frame in zip(windows, vads, frames, strict=True):
        window[:CONTEXT_SAMPLES], window[CONTEXT_SAMPLES:] = vad.context, frame
    states = (
        vads[0].state if len(vads) == 1 else np.concatenate([vad.state for vad in vads], axis=1)
    )
    outputs = model().run(None, {"input": windows, "state": states, "sr": _RATE})
    probabilities, next_states = cast("tuple[Samples, Samples]", tuple(outputs))
    for row, vad in enumerate(vads):
        vad.state, vad.context = next_states[:, row : row + 1], windows[row, -CONTEXT_SAMPLES:]
    return [float(probability) for probability in probabilities[:, 0]]
