"""Silero's voice activity detector: the probability of speech in each 32 ms of a stream. One model a process, a state a stream.

Source: silero-vad 6.2.3 (MIT), `silero_vad.onnx` and the `OnnxWrapper` beside it. Knows no turn.
"""

from functools import cache
from importlib import resources
from typing import cast

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from web.realtime.turns import FRAME_SAMPLES, RATE_HZ

MODEL = "silero_vad.onnx"
CONTEXT_SAMPLES = 64
"""Each frame is seen together with the end of the one before."""
STATE_SHAPE = (2, 1, 128)

Samples = NDArray[np.float32]
_RATE = np.array(RATE_HZ, np.int64)


@cache
def model() -> onnxruntime.InferenceSession:
    """Loaded once, which takes a good part of a second: best before anybody listens."""
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.log_severity_level = 3
    model = (resources.files("web.realtime") / "vad_model" / MODEL).read_bytes()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Vad:
    """One stream's detector. A frame takes about 0.1 ms."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was heard: a turn is not judged by the one before."""
        self._state: Samples = np.zeros(STATE_SHAPE, np.float32)
        self._context: Samples = np.zeros(CONTEXT_SAMPLES, np.float32)

    def probability(self, frame: Samples) -> float:
        """Shapes: `frame` is [512] samples at 16 kHz in -1..1."""
        assert frame.shape == (FRAME_SAMPLES,), frame.shape
        window = np.concatenate([self._context, frame])[np.newaxis, :]
        told, state = cast(
            "tuple[Samples, Samples]", tuple(model().run(None, {"input": window, "state": self._state, "sr": _RATE}))
        )
        self._state, self._context = state, frame[-CONTEXT_SAMPLES:]
        return float(told[0, 0])
