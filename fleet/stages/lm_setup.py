"""Common parts of the builders of autoregressive stages: device, checkpoint, memory for keys and
values, batch loop, end ids.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from fleet.drafts.drafters import Drafter, NgramDrafter, SuffixDrafter
from fleet.drafts.eagle3.config import Eagle3Config, default_layer_ids
from fleet.drafts.eagle3.drafter import HeadDrafter, check_fit
from fleet.drafts.eagle3.files import in_dtype, load_head
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.figures.speculation import EAGLE3, NGRAM, SUFFIX
from fleet.drafts.speculation import Speculation
from fleet.engine.base import Engine
from fleet.engine.torch.build import ComputeDevice, open_device
from fleet.engine.torch.fastest import TIME_LIMIT_S, Fastest
from fleet.engine.torch.graph_runner import GraphRunner, buckets_up_to, can_capture
from fleet.engine.torch.kv_memory import GIB, allocated_bytes, num_pages, read_memory, share_for
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.lm_engine import LMEngine, LoopLimits
from fleet.engine.torch.pass_queue import LocalPasses
from fleet.engine.torch.passes import FastRunner, PassRunner, TileRunner
from fleet.engine.torch.program import (
    DraftedProgram,
    DraftedTask,
    GraphProgram,
    GraphTaskT,
    Program,
    TaskT,
)
from fleet.engine.torch.prompt_graphs import PROMPT_BUCKETS
from fleet.engine.torch.step_forms import MAX_FUSED_ROWS
from fleet.engine.vllm.start import TappedModel, VllmOptions
from fleet.models.checkpoint import CheckpointReader
from fleet.models.target_hash import hash_of_target
from fleet.spans.anchor.passes import SpanPasses, SpanPassOptions, SpanProgram
from fleet.spans.protocol.chain import RouteSlot
from fleet.stages.base import AdapterFactory, BuiltStage
from fleet.stages.capture import capturing
from fleet.stages.draft_heads import exchange_of
from fleet.stages.options import BuildOptions

log = logging.getLogger(__name__)

FUSED_BUCKETS = tuple(rows for rows in PROMPT_BUCKETS if rows <= MAX_FUSED_ROWS)
"""Numbers of prompt rows of a step that only fused kernels compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """Checked options of an autoregressive stage with its opened device; builds the stage's reader
    and batch loop.

    `context`: context length of the model in positions; 0 if the stage limits its requests itself.
    `allocated_before`: device memory in bytes that was in use before the stage was loaded.
    `fastest`: choice between implementations of a step; None to measure nothing.
    """

    options: BuildOptions
    where: ComputeDevice
    context: int = 0
    allocated_before: int = 0
    fastest: Fastest | None = None

    @property
    def num_positions(self) -> int:
        """Most positions of one request: the capacity of the KV pool if `options.kv_pages` is not
        0, else `context`.
        """
        return self.options.kv_pages * self.options.own.page_size_tokens or self.context

    def reader(self, is_read: Callable[[str], bool]) -> CheckpointReader:
        """Open the checkpoint and return its reader. `is_read`: returns True for the names of
        weights that the stage reads, by which loading progress is reported.
        """
        reader = CheckpointReader(
            self.options.checkpoint,
            device=self.where.device,
            dtype=self.where.dtype,
            fp8_experts=self.where.fp8_experts,
        )
        reader.report_to(
            self.options.progress, [name for name in reader.under("") if is_read(name)]
        )
        return reader

    def loop(self, program: Program[TaskT]) -> LMEngine[TaskT]:
        """Return the batch loop of a loaded program. Raises: ConfigError if its KV pool would be
        too small for one request.
        """
        pool, speculation = self._pool_and_speculation(program)
        runner: PassRunner[TaskT] = (
            TileRunner(program, pool) if self.where.tiled else FastRunner(program, pool)
        )
        return LMEngine(program, pool, LocalPasses(runner), self._limits, speculation)

    def graph_loop(
        self, program: GraphProgram[GraphTaskT], *, on_cpu: bool = False
    ) -> LMEngine[GraphTaskT]:
        """Return the batch loop of a program whose decode step can be captured as a CUDA graph; a
        plain loop where the device cannot capture.

        On a GPU, invariant numerics compute all rows by fused kernels. `on_cpu`: if the device is a
        CPU, use the graph's operations too, run one by one.
        """
        where = self.where
        runs_one_by_one = on_cpu and where.device.type == "cpu"
        kernels_only = where.needs_kernels or (runs_one_by_one and where.tiled)
        if not (kernels_only or runs_one_by_one or can_capture(where.device, where.dtype)):
            return self.loop(program)
        pool, speculation = self._pool_and_speculation(program)
        # A captured step does not return the rows that a draft head reads.
        runner = GraphRunner(
            program,
            pool,
            buckets_up_to(self.options.own.max_batch),
            lambda: speculation is not None and speculation.reads_features,
            fastest=None if runs_one_by_one else self.fastest,
            prompt_buckets=FUSED_BUCKETS if kernels_only else None,
            is_fused=True if kernels_only else None,
        )
        limits = dataclasses.replace(self._limits, prompt_buckets=runner.prompt_buckets)
        return LMEngine(program, pool, LocalPasses(runner), limits, speculation)

    def anchor_loop(
        self, program: SpanProgram[TaskT], num_layers: int
    ) -> tuple[LMEngine[TaskT], RouteSlot]:
        """Return the batch loop of an anchor, whose program has a span of the layers, and the slot
        in which the loop finds its span workers. `num_layers`: layers of the whole model.
        """
        anchor, pool = self.options.anchor, self._pool(program.kv_shape, mirrored=True)
        assert anchor is not None, "not an anchor"
        route = RouteSlot(num_layers=num_layers, num_pages=pool.num_pages, page_size=pool.page_size)
        options = SpanPassOptions(
            returned=anchor.returned,
            tiled=self.where.tiled,
            wire_dtype=anchor.wire_dtype,
            window=anchor.window,
            keep_bytes=anchor.keep_bytes,
        )
        return LMEngine(
            program, pool, SpanPasses(program, pool, route, options), self._limits
        ), route

    def _pool_and_speculation(self, program: Program[TaskT]) -> tuple[KVPool, Speculation | None]:
        """Return the KV pool, which has an extra layer if the program uses a draft head, and the
        drafters; no drafters (None) without speculation.

        Raises: ConfigError for a draft head that does not fit the program.
        """
        own, shape, trains = (
            self.options.speculation,
            program.kv_shape,
            self.options.capture_share is not None,
        )
        drafted = cast("DraftedProgram[DraftedTask]", program)
        layer_ids = default_layer_ids(shape.num_layers) if trains else ()
        head = self._configured_head(shape)
        if head is not None and layer_ids and head.config.layer_ids != layer_ids:
            wanted = ", ".join(map(str, layer_ids))
            raise self.options.refusal(
                "speculation.head",
                f"training needs a head that reads the layers {wanted}; remove it",
            )
        if head is not None or trains:
            drafted.read_features(layer_ids if head is None else head.config.layer_ids)
        if own is None:
            return self._pool(shape), None
        drafters: dict[str, Drafter] = {
            NGRAM: NgramDrafter(),
            SUFFIX: SuffixDrafter(own.table_tokens),
        }
        if head is None and not trains:
            return self._pool(shape), Speculation(drafters, own.drafter, own.num_drafts)
        pool = self._pool(dataclasses.replace(shape, num_layers=shape.num_layers + 1))
        drafters[EAGLE3] = HeadDrafter(head, pool, lambda ids_S: drafted.draft_rows(ids_S.tolist()))
        return pool, Speculation(drafters, own.drafter, own.num_drafts)

    def _configured_head(self, shape: KVShape) -> Eagle3Head | None:
        """Load the draft head that the deployment names; None if it names none. Raises: ConfigError
        if the head does not fit the stage's model.
        """
        own = self.options.speculation
        if own is None or own.head is None:
            return None
        target = hash_of_target(self.options.checkpoint)
        head = in_dtype(
            load_head(own.head, device=self.where.device, target_hash=target),
            self.options.compute_dtype,
        )
        check_fit(head.config, shape, str(own.head))
        return head

    @property
    def _limits(self) -> LoopLimits:
        return LoopLimits(
            max_batch=self.options.own.max_batch,
            prefill_chunk_tokens=self.options.prefill_chunk_tokens,
            max_positions=self.num_positions or None,
            capture_share=self.options.capture_share,
        )

    def _pool(self, shape: KVShape, *, mirrored: bool = False) -> KVPool:
        return KVPool(
            shape,
            num_pages=self._num_pages(shape),
            page_size=self.options.own.page_size_tokens,
            dtype=self.where.dtype,
            device=self.where.device,
            mirrored=mirrored,
        )

    def _num_pages(self, shape: KVShape) -> int:
        options, where = self.options, self.where
        needed = -(-options.min_positions // options.own.page_size_tokens)
        request = f"a request within the limits needs {options.min_positions} positions"
        if options.kv_pages:
            if options.kv_pages < needed:
                raise options.refusal(
                    "kv_pages",
                    f"{request}; set at least {needed} pages, or lower limits.max_prompt_tokens",
                )
            return options.kv_pages
        memory = read_memory(where.device, self.allocated_before)
        page_bytes, share = (
            shape.page_bytes(options.own.page_size_tokens, where.dtype),
            options.gpu_memory_utilization,
        )
        pages = num_pages(memory, share, page_bytes)
        beside = (
            f"{share:.2f} of {where.device} ({memory.total / GIB:.1f} GiB, "
            f"{memory.free / GIB:.1f} GiB free)"
        )
        weights = f"{memory.own / GIB:.1f} GiB of weights"
        if pages < needed:
            enough = share_for(memory, needed, page_bytes)
            remedy = (
                f"set at least {enough:.2f}"
                if share < enough <= 1
                else "free memory, or set another device"
            )
            held = max(pages, 0) * options.own.page_size_tokens
            message = (
                f"{beside} holds {held} positions beside {weights}, and {request}; "
                f"{remedy}, or lower limits.max_prompt_tokens"
            )
            raise options.refusal("gpu_memory_utilization", message)
        positions, size = pages * options.own.page_size_tokens, pages * page_bytes / GIB
        log.info(
            "%s: %d KV pages, %d positions, %.1f GiB in %s, beside %s",
            options.stage,
            pages,
            positions,
            size,
            beside,
            weights,
        )
        return pages


def vllm_options(
    options: BuildOptions, num_positions: int | None, model: TappedModel | None = None
) -> VllmOptions:
    """Return a stage's options for vLLM. `num_positions`: context length of the model, if limited;
    `model`: model class to use instead of vLLM's own.
    """
    capacity = options.kv_pages * options.own.page_size_tokens
    return VllmOptions(
        checkpoint=options.checkpoint,
        device=options.device,
        dtype=options.dtype,
        kv_bytes=options.own.vllm.kv_mib << 20,
        max_positions=min(capacity, num_positions or capacity),
        block_size=options.own.page_size_tokens,
        max_batch=options.own.max_batch,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        tensor_parallel_size=options.own.vllm.tensor_parallel_size,
        quantization=options.own.vllm.quantization,
        model=model,
        half=options.half,
        address=options.address,
    )


def prepare_stage(
    options: BuildOptions, context: int = 0, *, measuring_s: float = TIME_LIMIT_S
) -> StageSetup:
    """Open a stage's device and return its setup. `context`: context length in positions, see
    `StageSetup`. `measuring_s`: time for the choice between implementations. Raises: ConfigError
    for an unusable option.
    """
    where = open_device(
        device=options.device,
        dtype=options.dtype,
        numerics=options.config.numerics,
        threads=options.own.threads,
    )
    if where.needs_kernels and options.own.max_batch > MAX_FUSED_ROWS:
        raise options.refusal(
            "max_batch",
            f"numerics: invariant on a GPU computes at most {MAX_FUSED_ROWS} requests in a step; "
            f"set {MAX_FUSED_ROWS} or less",
        )
    return StageSetup(
        options=options,
        where=where,
        context=context,
        allocated_before=allocated_bytes(where.device),
        fastest=Fastest(
            where.device, options.config.measured_folder, options.dtype, time_limit_s=measuring_s
        ),
    )


def answering_stage(
    options: BuildOptions,
    engine: Engine,
    adapter: AdapterFactory,
    head_config: Callable[[KVShape], Eagle3Config],
    *,
    num_layers: Callable[[], int],
    weight_names: tuple[str, ...] = (),
    route: RouteSlot | None = None,
) -> BuiltStage:
    """Return a graph's main stage around its engine and adapter, with support for hidden-state
    samples and for the exchange of draft heads.

    `head_config`: function that returns the configuration of a new head for a KV shape;
    `num_layers`: function that counts the model's layers.
    """
    captures = capturing(options, num_layers)
    return BuiltStage(
        engine=engine,
        adapter=lambda spec, blob: captures(spec, adapter(spec, blob)),
        weight_names=weight_names,
        route=route,
        heads=exchange_of(options, engine, head_config),
    )
