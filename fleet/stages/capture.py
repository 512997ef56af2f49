"""Adapter of a capture, a request for a hidden-state sample to train on, in a graph's main stage:
takes the prompt and the known answer, and sends hidden states to the trainer.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from fleet.core.captures import INPUT_ROWS, LAST_ROWS, TAPS
from fleet.core.errors import BadInput
from fleet.core.request import RequestSpec
from fleet.drafts.eagle3.config import default_layer_ids
from fleet.engine.base import NUM_POSITIONS, TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.graphs.training import CAPTURE, FEATURES, TRAINED
from fleet.models.target_hash import hash_of_target
from fleet.stages.base import NO_OUTPUT, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.options import BuildOptions


def capturing(
    options: BuildOptions, num_layers: Callable[[], int]
) -> Callable[[RequestSpec, TaskAdapter], TaskAdapter]:
    """Return a function (request, ordinary adapter) -> adapter. If the request asks for a
    hidden-state sample, the result is the adapter that makes or refuses it; otherwise the ordinary
    adapter.

    `num_layers`: function that counts the layers of the stage's model.
    """
    if options.capture_share is None:
        return lambda spec, own: RefusedCapture() if TRAINED in spec.outputs else own
    layer_ids, target = default_layer_ids(num_layers()), hash_of_target(options.checkpoint)
    return lambda spec, own: (
        CaptureAdapter(spec, own, layer_ids, target) if TRAINED in spec.outputs else own
    )


class RefusedCapture(TaskAdapter):
    """Adapter that refuses every request for a hidden-state sample, for deployments without
    training.
    """

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Refuse the request. Raises: BadInput, always."""
        raise BadInput(
            "this worker computes no captures; set training.enabled: true for all processes",
            param="outputs",
        )

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        raise AssertionError("a refused capture has no output")


class CaptureAdapter(TaskAdapter):
    """Adapter of a request for a hidden-state sample: computes prompt and known answer as one
    prefill, and sends the hidden states of all positions to the trainer.

    `inner`: ordinary adapter of the request, which prepares the prompt. `layer_ids`: layers whose
    input is sent. `target`: hexadecimal hash of the model's weights.
    """

    def __init__(
        self, spec: RequestSpec, inner: TaskAdapter, layer_ids: Sequence[int], target: str
    ) -> None:
        self._spec, self._inner = spec, inner
        self._ids = np.array([*spec.prompt_ids, *spec.given], np.int32)
        self._layer_ids = np.array(layer_ids, np.int32)
        self._target = np.frombuffer(bytes.fromhex(target), np.uint8)
        self._num_sent = 0

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request and the prompt. Raises: BadInput if the request has no answer
        to train on; errors of the ordinary adapter.
        """
        spec = self._spec
        if not spec.given:
            raise BadInput("given: a capture needs the answer to train on", param="given")
        request, pieces = self._inner.open()
        names = (TAPS, LAST_ROWS, INPUT_ROWS) if spec.audio else (TAPS, LAST_ROWS)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=len(spec.given))
        return dataclasses.replace(
            request,
            sampling=sampling,
            captured=names,
            session="",
            params={NUM_POSITIONS: str(len(self._ids))},
            history={TOKEN: np.array(spec.given, np.int32)},
        ), pieces

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        first = self._num_sent
        self._num_sent += len(output.arrays[TAPS])
        arrays = {
            "ids": self._ids[first : self._num_sent],
            **output.arrays,
            "layer_ids": self._layer_ids,
            "target": self._target,
        }
        return [EdgeItem(edge=FEATURES, walk=CAPTURE, arrays=arrays, final=output.final)]
