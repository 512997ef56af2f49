"""ONNX models on one thread, whose results depend on the inputs alone.

The runtime starts a thread when it is imported, and a process with two threads forks no workers: so
it is imported with the first model.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import ConfigError, EngineError

_ERROR_NAMES = (
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "NotImplemented",
    "RuntimeException",
)


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Return the exception types of the runtime."""
    module = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    return tuple(getattr(module, name) for name in _ERROR_NAMES)


class OnnxModel:
    """A model loaded from `data`. `path`: file named in the error. Raises: ConfigError if the data
    are no model.
    """

    def __init__(self, data: bytes, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.inter_op_num_threads = 1
        options.intra_op_num_threads = 1
        options.use_deterministic_compute = True
        options.log_severity_level = 3
        providers = ["CPUExecutionProvider"]
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=providers)
        except _errors() as error:
            raise ConfigError(
                f"checkpoint: {path} is no model that onnxruntime {onnxruntime.__version__} reads "
                f"({error}); fetch it again",
                param="checkpoint",
            ) from error

    @property
    def input_names(self) -> set[str]:
        return {each.name for each in self._session.get_inputs()}

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.float32]]:
        """Run the model on `inputs`, arrays by input name, and return all outputs in the model's
        order. Raises: EngineError if the run fails.
        """
        try:
            return cast("list[NDArray[np.float32]]", self._session.run(None, dict(inputs)))
        except _errors() as error:
            raise EngineError(f"the voice failed: {error}") from error


def with_output(model: bytes, name: str) -> bytes:
    """Return a serialized model that also returns its inner float tensor `name`.

    A protocol buffer is extended at its end, since later fields are merged into earlier ones: here
    by ModelProto { graph { output { name, type { tensor_type { elem_type: FLOAT } } } } }.
    """
    float_type = _field(2, _field(1, bytes([1 << 3, 1])))
    return model + _field(7, _field(12, _field(1, name.encode()) + float_type))


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer. The content is shorter than 128."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content
