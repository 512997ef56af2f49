"""Look-up of the builder functions that a graph names (imported only when needed), and of their
options.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from fleet.config import FleetConfig
from fleet.config.checkpoints import checkpoint_of
from fleet.config.placement import device_of
from fleet.config.values import AUTO
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.graphs import Graph
from fleet.graphs.base import FP8, INVARIANT_DTYPES
from fleet.spans.protocol.layers import LayerSpan, Topology, topology_of
from fleet.spans.protocol.messages import Returned
from fleet.stages.base import BuiltSpan, BuiltStage
from fleet.stages.options import AnchorOptions, BuildOptions, Half, compute_dtype_of

Builder = Callable[[BuildOptions], BuiltStage]
SpanBuilder = Callable[[BuildOptions, LayerSpan], BuiltSpan]


def stage_builder(graph: Graph, stage: StageName) -> Builder:
    return cast(Builder, _named(graph.stage(stage).builder))


def span_builder(graph: Graph, stage: StageName) -> SpanBuilder:
    """Return the function that loads a span of a stage's layers. The stage must be divisible."""
    return cast(SpanBuilder, _named(graph.stage(stage).span_builder))


def layer_counter(graph: Graph, stage: StageName) -> Callable[[Path], int]:
    """Return the function that counts the layers of a checkpoint, for a stage whose layers can be
    divided.
    """
    return cast("Callable[[Path], int]", _named(graph.stage(stage).layer_counter))


def _named(name: str) -> object:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def build_options(
    config: FleetConfig,
    stage: StageName,
    checkpoint: Path,
    progress: Callable[[float], None] = lambda _: None,
    *,
    half: Half = "",
    address: str = "127.0.0.1",
    is_here: bool = True,
) -> BuildOptions:
    """Return the options with which to build a stage: its device and dtype with `auto` resolved,
    its weights' folder, and its division into spans. `checkpoint`: the deployment's folder.
    `is_here`: the device must exist on this host. Raises: ConfigError.
    """
    folder = checkpoint_of(config, stage, checkpoint)
    device = device_of(config, config.stage(stage), replica=1)
    if device == "auto":
        device = _auto_device(config)
    elif is_here:
        _check_device(device)
    auto_dtype = "float32" if device == "cpu" else "bfloat16"
    given = config.dtype_of(stage)
    dtype = auto_dtype if given == "auto" else given
    options = BuildOptions(
        config=config,
        stage=stage,
        checkpoint=folder,
        device=device,
        dtype=dtype,
        half=half,
        anchor=anchor_options(
            config,
            stage,
            lambda: layer_counter(config.graph_declaration(), stage)(folder),
            dtype,
        ),
        address=address,
        progress=progress,
    )
    if config.numerics == "invariant":
        _check_invariant(options)
    if dtype == FP8 and device == "cpu":
        raise options.refusal(
            "dtype",
            "fp8 runs on a GPU, and the device is cpu; set bfloat16 or float32, or device: cuda",
        )
    num_devices = options.own.vllm.tensor_parallel_size
    if device == "cpu" and options.engine == "vllm" and num_devices > 1:
        raise options.refusal(
            "vllm.tensor_parallel_size",
            f"{num_devices} devices share the model, and none is here; set 1",
        )
    return options


def anchor_options(
    config: FleetConfig, stage: StageName, num_layers: Callable[[], int], dtype: str
) -> AnchorOptions | None:
    """Return the options of a stage's anchor; None if the stage's layers are not divided.
    `num_layers`: function that counts the model's layers, called only if the configured anchor span
    is `auto`.
    """
    spans, graph = config.stage(stage).spans, config.graph_declaration()
    if spans is None or not spans.workers:
        return None
    if spans.anchor == AUTO:
        spans = spans.of_model(num_layers())
    is_last = topology_of(spans.anchor_span, "anchor") is Topology.REVERSE
    head_on_anchor = spans.has_head_on_anchor or not graph.stage(stage).span_head
    from_workers: Returned = "last_rows" if head_on_anchor else "logits"
    return AnchorOptions(
        span=spans.anchor_span,
        returned="rows" if is_last else from_workers,
        window=spans.window,
        wire_dtype=compute_dtype_of(dtype) if spans.wire_dtype == "auto" else spans.wire_dtype,
        keep_bytes=spans.keep_mib << 20,
    )


def _check_invariant(options: BuildOptions) -> None:
    """Check that numerics can be invariant on the device and in the dtype. Raises: ConfigError."""
    kind, kinds = options.device_kind, options.declared.invariant_on
    if kind not in kinds:
        raise options.refusal(
            "device",
            f"numerics: invariant runs {options.stage} on {' or '.join(kinds)}, not on "
            f"{options.device}",
        )
    if options.dtype not in (able := INVARIANT_DTYPES[kind]):
        raise options.refusal(
            "dtype",
            f"numerics: invariant computes in {' or '.join(able)} on {kind}, not in "
            f"{options.dtype}",
        )


def _auto_device(config: FleetConfig) -> str:
    if config.numerics == "invariant":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_device(device: str) -> None:
    """Check that this machine has the device. Raises: ConfigError."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    import torch

    count = torch.cuda.device_count() if kind == "cuda" else 0
    if not count or (number and (not number.isdigit() or int(number) >= count)):
        raise ConfigError(
            f"device: {device!r} does not exist here ({count} CUDA devices); use auto or cpu",
            param="device",
        )
