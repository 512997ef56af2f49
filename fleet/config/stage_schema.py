"""Sections of a deployment file about one stage: its workers, engine, division and sampling."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from fleet.config import values
from fleet.config.fields import Devices, Folder, Items, Share, Span, Strict, Text
from fleet.config.values import Number, Whole
from fleet.drafts.figures.speculation import OFF
from fleet.spans.protocol.layers import LayerSpan

KV_PAGES = 1024
"""KV pages by default on a CPU; with vLLM, the most positions of one request in pages."""
PREFILL_CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
MIN_CHUNK_TOKENS = 64
CACHE_KEYS = ("prefill_chunk_tokens", "kv_pages", "page_size_tokens")
"""Keys for stages with a KV cache."""


class SamplingDefaults(Strict):
    """Fields of `stages.NAME.sampling`, with the ranges of the API. Seed and stop strings are
    parameters of each request.
    """

    temperature: Annotated[float, Number(0, 2)] = 0.0
    top_p: Annotated[float, Number(0, 1, above=True)] = 1.0
    top_k: Annotated[int, Whole(0, 1_000_000)] = 0
    repetition_penalty: Annotated[float, Number(0, 10, above=True)] = 1.0
    frequency_penalty: Annotated[float, Number(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Number(-2, 2)] = 0.0
    max_tokens: Items = 256


class HalfConfig(Strict):
    """Workers of one half of a split stage; unset fields default to the stage's."""

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
    """A stage on vLLM. `kv_mib`: memory for keys and values, so that it does not depend on the
    other processes of a device.

    `tensor_parallel_size` devices share the model. `quantization`: a method of vLLM's, for a
    checkpoint stored in it.
    """

    kv_mib: Annotated[int, Whole(16, 10_000_000)] = 1024
    tensor_parallel_size: Annotated[int, Whole(1, 64)] = 1
    quantization: Text | None = None


class SpansConfig(Strict):
    """Division of a stage's layers among an anchor, which is the stage's worker, and span workers;
    see `spans/protocol/layers.py`.

    `workers`: spans of the span workers; `[auto]`: all workers that join divide the layers that the
    anchor lacks. With `auto`, `replicas` is the number of span workers that `fleet up` starts for
    each anchor and that the first division waits for, `memory_mib` is the memory that each worker
    may occupy (None: what the device or the host has), and `anchor` may be auto too: the anchor
    then has the first layers, a share as if there were one worker more than `replicas`.

    `standby`: further span workers, each of which replaces a lost worker. `window`: the most passes
    in flight; None: two more than there are workers. `wire_dtype`: dtype of hidden states between
    processes; auto: the stage's dtype. `keep_mib`: memory of each process for hidden states that it
    has sent, which are sent again to the successor of a lost worker. `nixl_kib`: size of a pass
    from which its hidden states are read by NIXL; None: `MIN_BLOCK_BYTES`; 0: never.
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
        """Read `auto` as automatic spans of workers. Beside these, an anchor's span that is not
        given is automatic too.
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
        """True if the workers' spans follow from their number."""
        return self.workers == (values.AUTO,)

    @property
    def num_workers(self) -> int:
        """Number of the span workers of one anchor, without those that stand by."""
        return self.replicas if self.is_auto else len(self.workers)

    @property
    def anchor_span(self) -> LayerSpan:
        """The anchor's span, which must be known: see `of_model`."""
        return LayerSpan.parse(self.anchor, "anchor")

    @property
    def worker_spans(self) -> tuple[LayerSpan, ...]:
        """Return the workers' spans, if they are given, in the order of the layers."""
        given = () if self.is_auto else self.workers
        return tuple(
            sorted(
                (LayerSpan.parse(each, "workers") for each in given), key=lambda span: span.first
            )
        )

    @property
    def has_head_on_anchor(self) -> bool:
        """True if given spans leave the output head to the anchor, wherever its layers are: the
        workers then return rows.
        """
        return not self.is_auto and not any(span.has_output for span in self.worker_spans)

    def of_model(self, num_layers: int) -> "SpansConfig":
        """Return the division with the anchor's span in a model of `num_layers` layers."""
        if self.anchor != values.AUTO:
            return self
        share = max(1, num_layers // (self.replicas + 2))
        return self.model_copy(update={"anchor": str(LayerSpan(0, share - 1))})


class SpeculationConfig(Strict):
    """Guesses of the next tokens of answers, which a worker verifies several in one pass: answers
    stay the same, and come sooner.

    `drafter`: see `drafts/drafters.py`. `num_drafts`: the most draft tokens for one request in one
    step; measured times decide how many there are. `table_tokens`: size of each worker's table of
    answers, from which `suffix` guesses. `head`: folder of the draft head with which `eagle3`
    guesses.
    """

    drafter: Annotated[
        Literal["off", "ngram", "suffix", "eagle3", "auto"], BeforeValidator(values.drafter)
    ] = OFF
    num_drafts: Annotated[int, Whole(1, 15)] = 3
    table_tokens: Annotated[int, Whole(1, 100_000_000)] = 200_000
    head: Folder | None = None


class StageConfig(Strict):
    """Workers of one stage. `threads` x replicas over all stages should not exceed the machine's
    cores.

    `replicas` is at least 1, since a fleet is not ready while a stage has no worker. `standby`
    counts further workers that are loaded and receive no tasks until a worker of the stage is lost.
    `sampling` holds `SamplingDefaults` fields. `engine`: the deployment's if it is not set; `vllm`
    is refused with another engine.

    `device`: one device, or a list: replica N uses the Nth GPU, and the first again after the last.
    `gpu_memory_utilization`: the share of its GPU that each worker may use, weights included; None:
    an equal part of what other shares leave (`placement.py`). `kv_pages` is by default (None) as
    many as that share holds on a GPU, else `KV_PAGES`. `prefill_chunk_tokens` is by default
    `PREFILL_CHUNK_TOKENS` for the kind of device, divided by the number of processes if layers are
    divided.
    """

    engine: Literal["torch", "vllm"] | None = None
    vllm: VllmConfig = VllmConfig()

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
