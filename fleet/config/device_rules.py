"""Rules over devices, dtypes and shares of a GPU's memory. There is one function per rule."""

from collections.abc import Iterator

from fleet.config.placement import (
    SHARED,
    PlacedWorkers,
    configured_shares,
    gpu_of,
    place_workers,
    workers_by_gpu,
)
from fleet.config.problems import Place, Problem
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import HalfConfig, StageConfig
from fleet.config.values import AUTO
from fleet.core.ids import StageName
from fleet.drafts.figures.speculation import OFF
from fleet.graphs.base import FP8, INVARIANT_DTYPES, Stage

CPU = "cpu"


def invariant_numerics_are_possible(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each stage that does not compute invariantly on its devices or in its
    dtype, and for settings with which it would not. `auto` is a CPU.
    """
    if config.numerics != "invariant":
        return
    found = [
        problem
        for stage in config.graph_declaration().stages
        for problem in _problems_of_invariant(config, stage)
    ]
    yield from dict.fromkeys(found)


def _problems_of_invariant(config: FleetConfig, stage: Stage) -> Iterator[Problem]:
    own, devices = config.stage(stage.name), _devices(config, stage.name)
    kinds = [CPU if device == AUTO else device.partition(":")[0] for _, device in devices]
    for (path, device), kind in zip(devices, kinds, strict=True):
        if kind not in stage.invariant_on:
            yield Problem(
                path,
                f"numerics: invariant runs {stage.name} on {' or '.join(stage.invariant_on)}, not "
                f"on {device}; set cpu, or numerics: fast",
            )
        elif kind != kinds[0]:
            yield Problem(
                path,
                f"numerics: invariant needs devices of one kind for {stage.name}, not {kinds[0]} "
                f"and {kind}, which round differently; set one kind, or numerics: fast",
            )
    dtypes, dtype = INVARIANT_DTYPES[kinds[0]], config.dtype_of(stage.name)
    if dtype not in (AUTO, *dtypes):
        yield Problem(
            ("dtype",) if own.dtype is None else ("stages", stage.name, "dtype"),
            f"numerics: invariant computes in {' or '.join(dtypes)} on {kinds[0]}, not in {dtype}; "
            f"set {dtypes[0]} or auto, or numerics: fast",
        )
    if kinds[0] == CPU:
        return
    here, by_kernels = ("stages", stage.name), "with numerics: invariant on a GPU"
    if own.spans is not None:
        yield Problem((*here, "spans"), f"layers are not divided {by_kernels}; remove it")
    if own.speculation.drafter != OFF:
        field = (*here, "speculation", "drafter")
        yield Problem(field, f"drafts are not verified {by_kernels}; set off")
    if stage.main and config.training.enabled:
        field = ("training", "enabled")
        yield Problem(field, f"captures are not computed {by_kernels}; set false")


def _devices(config: FleetConfig, stage: StageName) -> list[tuple[Place, str]]:
    """Return the configured devices of a stage's workers, each with its field."""
    own = config.stage(stage)
    sections: dict[Place, StageConfig | HalfConfig] = {(): own}
    if own.split is not None:
        sections = {("split", "prefill"): own.split.prefill, ("split", "decode"): own.split.decode}
    found: list[tuple[Place, str]] = []
    for half, section in sections.items():
        path, given = ("stages", stage, *half, "device"), section.device
        if given is None:
            path, given = ("stages", stage, "device"), own.device
        if given is None:
            path, given = ("device",), config.device
        found += [(path, device) for device in ((given,) if isinstance(given, str) else given)]
    return found


def fp8_is_possible(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each stage in the precision fp8 that has no experts, or runs on another
    engine than torch or on a CPU. A worker whose device is `auto` checks its device when it starts.
    """
    graph = config.graph_declaration()
    able = [stage.name for stage in graph.stages if stage.has_experts]
    for stage in graph.stages:
        own, engine = config.stage(stage.name), config.engine_of(stage.name)
        if own.dtype != FP8:
            continue
        message = None
        if not stage.has_experts:
            which = f"{' and '.join(able)} have" if able else f"no stage of graph {graph.name} has"
            message = f"rounds the weights of experts, which {which}; set bfloat16, or remove it"
        elif engine == "vllm":
            message = (
                f"is for engine torch; remove it, and set stages.{stage.name}.vllm.quantization"
            )
        elif CPU in [device for _, device in _devices(config, stage.name)]:
            message = "runs on a GPU, not on cpu; set bfloat16 or float32, or device: cuda"
        if message is not None:
            yield Problem(("stages", stage.name, "dtype"), f"{FP8} {message}")


def device_lists_are_usable(config: FleetConfig) -> Iterator[Problem]:
    for name, stage in config.stages.items():
        if not isinstance(stage.device, tuple):
            continue
        if stage.split is not None:
            message = (
                "a split stage has no workers of its own; set split.prefill.device and "
                "split.decode.device instead"
            )
            yield Problem(("stages", name, "device"), message)
        elif config.engine_of(StageName(name)) == "vllm" and stage.vllm.tensor_parallel_size > 1:
            message = (
                f"one worker uses {stage.vllm.tensor_parallel_size} devices itself "
                "(vllm.tensor_parallel_size); set one device, "
                "or tensor_parallel_size: 1"
            )
            yield Problem(("stages", name, "device"), message)


def shares_fit_their_gpu(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each GPU whose workers' memory shares add up to more than the GPU. Assumes
    that all replicas run on one host, as `fleet up` starts them.
    """
    for gpu, workers in workers_by_gpu(config).items():
        total = configured_shares(workers)
        shared = [placed for placed in workers if placed.share is not None]
        without = [placed for placed in workers if placed.share is None and placed.has_pages]
        listed = ", ".join(
            f"{placed.number} x {placed.share:g} {placed.role.name}" for placed in shared
        )
        if total > 1:
            message = (
                f"workers on {gpu} have {total:g} of it together ({listed}); lower them "
                "to 1 or less, or set another device"
            )
            yield Problem(_share_field(shared[0]), message)
        elif without and total >= SHARED:
            message = (
                f"other workers on {gpu} leave nothing of {SHARED:g} ({listed}); set it, "
                "lower theirs, or set another device"
            )
            yield Problem(_share_field(without[0]), message)


def _share_field(placed: PlacedWorkers) -> Place:
    role = placed.role
    half = (
        ()
        if role.hosts_spans or role.name == role.stage
        else ("split", role.name.rpartition(".")[2])
    )
    return ("stages", role.stage, *half, "gpu_memory_utilization")


def buffer_device_exists(config: FleetConfig) -> Iterator[Problem]:
    if config.transfer.buffer_device != "cuda":
        return
    here = ("transfer", "buffer_device")
    if config.transfer.kind == "redis":
        yield Problem(
            here,
            "transfer.kind redis sends copies in host memory; set transfer.kind: nixl, or "
            "buffer_device: auto",
        )
    for placed in place_workers(config):
        if (
            config.stage(placed.role.stage).split is not None
            and gpu_of(config, placed.device) is None
        ):
            yield Problem(
                here,
                f"{placed.role.name} computes on a CPU, which has no such memory; set auto, or "
                "another device",
            )


def halves_share_a_dtype(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error if the halves of a split stage have different dtypes, since KV cache is copied
    between them without conversion. If a device is `auto`, the workers compare their dtypes when
    they join.
    """
    for name, stage in config.stages.items():
        if stage.split is None or config.dtype_of(StageName(name)) != "auto":
            continue
        halves = {"prefill": stage.split.prefill, "decode": stage.split.decode}
        given = {half: own.device or stage.device or config.device for half, own in halves.items()}
        devices = {
            half: device if isinstance(device, str) else device[0] for half, device in given.items()
        }
        if {device.partition(":")[0] for device in devices.values()} >= {"cpu", "cuda"}:
            where = " and ".join(f"{half} on {device}" for half, device in devices.items())
            message = (
                f"computes {where}, and dtype auto is float32 on a CPU and bfloat16 on a GPU, "
                "but the halves must share one; "
                "set dtype to float32 or bfloat16, or set the same device for both"
            )
            yield Problem(("stages", name, "split"), message)
