"""Sections of a deployment file about one stage: its workers, engine, division into spans,
speculation and sampling.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from fleet.config import values
from fleet.config.fields import Devices, Folder, Items, Share, Span, Strict, Text
from fleet.config.values import Number, Whole
from fleet.drafts.figures.speculation import OFF
from fleet.spans.protocol.layers import LayerSpan

KV_PAGES = 1024
"""Default number of KV pages on a CPU. With vLLM, the number of pages limits the positions of one
request, not the size of the KV cache.
"""
PREFILL_CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
MIN_CHUNK_TOKENS = 64
CACHE_KEYS = ("prefill_chunk_tokens", "kv_pages", "page_size_tokens")
"""Keys of a stage's section that have an effect only on stages with a KV cache."""


class SamplingDefaults(Strict):
    """Sampling defaults of a stage: the section `stages.NAME.sampling`, with the ranges of the API.
    Seed and stop strings are parameters of each request, so they have no default here.
    """

    temperature: Annotated[float, Number(0, 2)] = 0.0
    top_p: Annotated[float, Number(0, 1, above=True)] = 1.0
    top_k: Annotated[int, Whole(0, 1_000_000)] = 0
    repetition_penalty: Annotated[float, Number(0, 10, above=True)] = 1.0
    frequency_penalty: Annotated[float, Number(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Number(-2, 2)] = 0.0
    max_tokens: Items = 256


class HalfConfig(Strict):
    """Settings of the workers of one half of a split stage. A field that is not set takes the
    stage's value.
    """

    replicas: Annotated[int, Whole(1, 256)] = 1
    standby: Annotated[int, Whole(0, 256)] = 0
    max_batch: Annotated[int, Whole(1, 4096)] | None = None
    device: Devices | None = None
    gpu_memory_utilization: Share | None = None


class SplitConfig(Strict):
    """Split of a stage into the roles STAGE.prefill and STAGE.decode, each with its own workers."""

    prefill: HalfConfig = HalfConfig()
    decode: HalfConfig = HalfConfig()


class VllmConfig(Strict):
    """Settings of a stage that runs on vLLM.

    `kv_mib`: memory for the KV cache; a fixed size, independent of other processes on the device.
    `tensor_parallel_size`: devices that share the model. `quantization`: vLLM's name of the method
    with which the checkpoint is quantized.
    """

    kv_mib: Annotated[int, Whole(16, 10_000_000)] = 1024
    tensor_parallel_size: Annotated[int, Whole(1, 64)] = 1
    quantization: Text | None = None


class SpansConfig(Strict):
    """Division of a stage's layers among an anchor (the stage's worker, which owns the tasks) and
    span workers; see `spans/protocol/layers.py`.

    `anchor`: span of the anchor. `workers`: spans of the span workers; `[auto]`: all workers that
    join divide the layers that the anchor lacks. With `auto`: `replicas` is the number of span
    workers that `fleet up` starts per anchor and that the first division waits for; `memory_mib` is
    the memory that each worker may occupy (None: all of its device or host); and `anchor: auto`
    gives the anchor the first layers, as many as if there were `replicas` + 2 equal shares.

    `standby`: additional span workers that replace lost workers. `window`: most passes in flight;
    None: number of workers plus two. `wire_dtype`: dtype of hidden states between processes;
    `auto`: the stage's dtype. `keep_mib`: memory of each process for sent hidden states, which are
    sent again to the successor of a lost worker. `nixl_kib`: size of a pass from which its hidden
    states are read by NIXL; None: `MIN_BLOCK_BYTES`; 0: never.
    """

    anchor: Span = "0:output"
    workers: Annotated[tuple[Span, ...], BeforeValidator(values.worker_spans)] = ()
    replicas: Annotated[int, Whole(1, 256)] = 1
    memory_mib: Annotated[int, Whole(1, 16 * 1024 * 1024)] | None = None
    standby: Annotated[int, Whole(0, 256)] = 0
    window: Annotated[int, Whole(1, 64)] | None = None
    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    keep_mib: Annotated[int, Whole(0, 1024 * 1024)] = 256
    nixl_kib: Annotated[int, Whole(0, 1024 * 1024)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, given: object) -> object:
        """Expand the short form `spans: auto` to `workers: auto`. With automatic workers, the
        anchor's span defaults to `auto` too.
        """
        found = {"workers": values.AUTO} if given == values.AUTO else given
        if isinstance(found, dict) and found.get("workers") in (
            values.AUTO,
            (values.AUTO,),
            [values.AUTO],
        ):
            return {"anchor": values.AUTO, **found}
        return found

    @property
    def is_auto(self) -> bool:
        """True if the workers' spans are computed from the workers that join, not configured."""
        return self.workers == (values.AUTO,)

    @property
    def num_workers(self) -> int:
        """Number of span workers per anchor, standby workers excluded."""
        return self.replicas if self.is_auto else len(self.workers)

    @property
    def anchor_span(self) -> LayerSpan:
        """The anchor's span, parsed. Raises: ConfigError if the span is still `auto`; see
        `of_model`.
        """
        return LayerSpan.parse(self.anchor, "anchor")

    @property
    def worker_spans(self) -> tuple[LayerSpan, ...]:
        """The configured spans of the workers in the order of the layers; empty for `auto`."""
        given = () if self.is_auto else self.workers
        return tuple(
            sorted(
                (LayerSpan.parse(each, "workers") for each in given), key=lambda span: span.first
            )
        )

    @property
    def has_head_on_anchor(self) -> bool:
        """True if no configured worker span has the output head, so that the anchor has it and the
        workers return hidden states; False for `auto`.
        """
        return not self.is_auto and not any(span.has_output for span in self.worker_spans)

    def of_model(self, num_layers: int) -> "SpansConfig":
        """Return the division with an `auto` anchor span resolved for a model of `num_layers`
        layers.
        """
        if self.anchor != values.AUTO:
            return self
        share = max(1, num_layers // (self.replicas + 2))
        return self.model_copy(update={"anchor": str(LayerSpan(0, share - 1))})


class SpeculationConfig(Strict):
    """Speculative decoding: a drafter guesses the next tokens of an answer, and a worker verifies
    several in one pass. Answers stay the same, and come sooner.

    `drafter`: name from `drafts/drafters.py`, or off. `num_drafts`: most draft tokens of one
    request per step; the actual number follows from measured times. `table_tokens`: size of each
    worker's table of earlier answers, for the drafter `suffix`. `head`: folder of the draft head,
    for the drafter `eagle3`.
    """

    drafter: Annotated[
        Literal["off", "ngram", "suffix", "eagle3", "auto"], BeforeValidator(values.drafter)
    ] = OFF
    num_drafts: Annotated[int, Whole(1, 15)] = 3
    table_tokens: Annotated[int, Whole(1, 100_000_000)] = 200_000
    head: Folder | None = None


class StageConfig(Strict):
    """Settings of one stage and its workers. `threads` times `replicas` over all stages should not
    exceed the machine's cores.

    `replicas`: workers that receive tasks; at least 1, since a fleet is not ready while a stage has
    no worker. `standby`: additional loaded workers, which receive no tasks until a worker of the
    stage is lost. `sampling`: fields of `SamplingDefaults`. `engine`: name of the engine; None: the
    deployment's. `vllm`: refused with another engine. `dtype`: None: the deployment's; `fp8`
    rounds the weights of experts to 8 bits, on a GPU.

    `checkpoint`: folder with the stage's weights, or a hub name `owner/name[@revision]`; None: its
    sub-folder of the deployment's checkpoint.
    `device`: one device, or a list of GPUs of which replica N uses the Nth, starting over after the
    last. `gpu_memory_utilization`: share of its GPU that each worker may use, weights included;
    None: an equal part of what configured shares leave (`placement.py`). `kv_pages`: KV pages per
    worker; None: what the share of a GPU holds, or `KV_PAGES` on a CPU. `prefill_chunk_tokens`:
    None: `PREFILL_CHUNK_TOKENS` of the kind of device, divided by the number of processes if layers
    are divided.
    """

    engine: Literal["torch", "vllm", "ctranslate2"] | None = None
    vllm: VllmConfig = VllmConfig()
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] | None = None
    checkpoint: Text | None = None

    replicas: Annotated[int, Whole(1, 256)] = 1
    standby: Annotated[int, Whole(0, 256)] = 0
    max_batch: Annotated[int, Whole(1, 4096)] = 16
    prefill_chunk_tokens: Items | None = None
    kv_pages: Annotated[int, Whole(1, 10_000_000)] | None = None
    page_size_tokens: Annotated[int, Whole(1, 1024)] = 16
    threads: Annotated[int, Whole(1, 1024)] = 1
    device: Devices | None = None
    gpu_memory_utilization: Share | None = None
    transition_source: Literal["producer", "conductor"] | None = None
    split: SplitConfig | None = None
    spans: SpansConfig | None = None
    speculation: SpeculationConfig = SpeculationConfig()
    sampling: dict[str, Annotated[float | int, BeforeValidator(values.number)]] = {}
    extra: dict[str, Annotated[str | int | float | bool, BeforeValidator(values.scalar)]] = {}
