"""Rules over the settings of stages on vLLM, with one function per rule."""

from collections.abc import Iterator

from fleet.config.placement import device_of
from fleet.config.problems import Problem
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import VllmConfig
from fleet.core.ids import StageName
from fleet.graphs import Stage


def vllm_settings_are_used(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each vLLM setting of a stage that runs on another engine. Default values
    are accepted, since a printed configuration names every default.
    """
    for stage in config.graph_declaration().stages:
        engine = config.engine_of(stage.name)
        if engine in ("vllm", "fake"):
            continue
        given, default = config.stage(stage.name).vllm.model_dump(), VllmConfig().model_dump()
        for name in (name for name, value in given.items() if value != default[name]):
            remedy = (
                f"set stages.{stage.name}.engine: vllm, or remove it"
                if "vllm" in stage.engines
                else "remove it"
            )
            message = f"{stage.name} runs on {engine}, which does not use it; {remedy}"
            yield Problem(("stages", stage.name, "vllm", name), message)


def tensor_parallel_stages_run_on_gpus(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each stage with tensor parallelism on a CPU. A worker whose device is
    `auto` checks this when it starts.
    """
    for stage in _on_vllm(config):
        size = config.stage(stage.name).vllm.tensor_parallel_size
        where = next(
            (half for half, kind in _device_kinds(config, stage.name).items() if kind == "cpu"),
            None,
        )
        if size > 1 and where is not None:
            message = (
                f"{size} devices share the model, and {where} runs on cpu; set 1, or device: cuda"
            )
            yield Problem(("stages", stage.name, "vllm", "tensor_parallel_size"), message)


def vllm_halves_use_nixl(config: FleetConfig) -> Iterator[Problem]:
    for stage in _split_on_vllm(config):
        if config.transfer.kind == "redis":
            message = (
                f"the halves of {stage.name} on vLLM exchange keys and values by NIXL; set auto "
                "or nixl, or "
                f"stages.{stage.name}.engine: torch"
            )
            yield Problem(("transfer", "kind"), message)


def vllm_halves_share_a_kind_of_device(config: FleetConfig) -> Iterator[Problem]:
    """Yield an error for each split stage with one half on a CPU and the other on a GPU, since
    block sizes and buffers differ between the halves. If a device is `auto`, the devices are
    compared when the workers join.
    """
    for stage in _split_on_vllm(config):
        kinds = _device_kinds(config, stage.name)
        if set(kinds.values()) >= {"cpu", "cuda"}:
            where = " and ".join(f"{role} on {kind}" for role, kind in kinds.items())
            message = (
                f"runs {where}, but vLLM's halves read each other's blocks; set cpu, or "
                "CUDA devices, for both"
            )
            yield Problem(("stages", stage.name, "split"), message)


def _on_vllm(config: FleetConfig) -> Iterator[Stage]:
    return (
        stage
        for stage in config.graph_declaration().stages
        if config.engine_of(stage.name) == "vllm"
    )


def _split_on_vllm(config: FleetConfig) -> Iterator[Stage]:
    return (stage for stage in _on_vllm(config) if config.stage(stage.name).split is not None)


def _device_kinds(config: FleetConfig, name: StageName) -> dict[str, str]:
    """Return the kind of device (cpu, cuda or auto) of each role of a stage, by the role's name."""
    devices = {
        role.name: device_of(config, config.of_role(role), replica=1)
        for role in config.roles_of(name)
    }
    return {role: device.partition(":")[0] for role, device in devices.items()}
