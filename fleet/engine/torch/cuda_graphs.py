"""Capture of functions as CUDA graphs: a replay starts all kernels of a function at once, without
Python. Knows no model.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

NUM_WARM_UPS = 2
"""Number of runs before a capture: they allocate and compile what must not be allocated or compiled
during the capture.
"""

OutputsT = TypeVar("OutputsT")


class GraphCapture:
    """Captures functions on one GPU. All graphs share their memory, which is safe since one runs at
    a time, and none reads what an earlier one left: outputs must be copied before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared_memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def captured(self, compute: Callable[[], OutputsT]) -> Callable[[], OutputsT]:
        """Capture a function as a graph; return a function that replays the graph and returns its
        output tensors. `compute` reads and writes fixed tensors only.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    compute()
            current.wait_stream(stream)
            # other threads of the process may use the GPU meanwhile
            with torch.cuda.graph(
                graph, pool=self._shared_memory, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = compute()

        def replay() -> OutputsT:
            graph.replay()
            return outputs

        return replay
