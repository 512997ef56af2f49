"""Plan of `fleet spans plan`: the model's sizes, the division of its layers by memory, and remedies
if the model does not fit.

Imports torch, for the shapes of the model; reads no weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fleet.core.byte_sizes import format_byte_size, option_of_byte_size
from fleet.core.errors import ConfigError
from fleet.engine.torch.build import compute_dtype
from fleet.graphs import Stage
from fleet.graphs.base import FP8
from fleet.models.weight_headers import WeightHeaders, check_weight_headers, read_weight_headers
from fleet.spans.protocol.buffers import PassLimits
from fleet.spans.protocol.plan import ModelSizes, SpanPlan, further_worker_bytes, plan_spans
from fleet.stages.options import BuildOptions
from fleet.stages.span_sizes import pass_buffer_bytes, process_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Inputs of a plan: the stage to divide, and the memory budget of each process.

    `budgets`: bytes per process, the anchor's first. `num_pages`: pages of the KV pool. `kv_pages`:
    number of pages in the deployment file, None if the file sets none. `changed`: deployment keys
    that command-line options replace. `keep_bytes`, `window`: see `PassLimits`.
    """

    graph: str
    stage: Stage
    options: BuildOptions
    num_pages: int
    budgets: tuple[int, ...]
    anchor_is_last: bool
    keep_bytes: int
    window: int
    changed: Mapping[str, str]
    kv_pages: int | None

    @property
    def head_on_anchor(self) -> bool:
        """True if only the anchor can have the model's output head."""
        return not self.stage.span_head

    @property
    def device_kind(self) -> str:
        return self.options.device.partition(":")[0]

    @property
    def num_positions(self) -> int:
        return self.num_pages * self.options.own.page_size_tokens

    @property
    def limits(self) -> PassLimits:
        return PassLimits(
            max_batch=self.options.own.max_batch,
            prefill_chunk_tokens=self.options.prefill_chunk_tokens,
            num_positions=self.num_positions,
            window=self.window,
            keep_bytes=self.keep_bytes if len(self.budgets) > 1 else 0,
        )

    @property
    def min_pages(self) -> int:
        """Smallest number of KV pages that holds the longest request within the deployment's
        limits.
        """
        return -(-self.options.min_positions // self.options.own.page_size_tokens)

    def in_dtype(self, dtype: str) -> "PlanRequest":
        """Return the request with the stage in another dtype or precision."""
        return replace(self, options=replace(self.options, dtype=dtype))

    def divide(self, sizes: ModelSizes) -> SpanPlan:
        return plan_spans(
            sizes,
            self.budgets[0],
            self.budgets[1:],
            anchor_is_last=self.anchor_is_last,
            head_on_anchor=self.head_on_anchor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePlan:
    """A plan of the division, with the request and the model sizes that it was made from.

    `headers`: headers of the checkpoint's weight files, None if there are none. If the model does
    not fit, `further_worker_bytes` is the memory of one more worker with which it would fit, or
    None; `remedies`: changes each of which alone makes it fit.
    """

    request: PlanRequest
    sizes: ModelSizes
    plan: SpanPlan
    headers: WeightHeaders | None
    further_worker_bytes: int | None = None
    remedies: tuple[str, ...] = ()


def make_plan(request: PlanRequest) -> MadePlan:
    """Divide the stage's layers by the requested memory; find remedies if they do not fit. Raises:
    ConfigError for more processes than layers, and for weight files that contradict config.json.
    """
    dtype = compute_dtype(request.options.dtype)
    sizes = _read_sizes(request)
    if len(request.budgets) > len(sizes.layers):
        raise ConfigError(
            f"--memory: {len(request.budgets)} processes for a model of {len(sizes.layers)} "
            "layers, and each needs a layer; give "
            f"--memory at most {len(sizes.layers)} times",
            param="memory",
        )
    headers = read_weight_headers(request.options.checkpoint)
    if headers is not None and not headers.missing:
        plain = (
            sizes
            if request.options.dtype != FP8
            else _read_sizes(request.in_dtype(request.options.compute_dtype))
        )
        check_weight_headers(request.options.checkpoint, headers, plain, dtype.itemsize)
    plan = request.divide(sizes)
    if not plan.lacking_bytes:
        return MadePlan(request=request, sizes=sizes, plan=plan, headers=headers)
    further = further_worker_bytes(
        sizes,
        request.budgets[0],
        request.budgets[1:],
        anchor_is_last=request.anchor_is_last,
        head_on_anchor=request.head_on_anchor,
    )
    remedies = tuple(_remedies(request, further, _max_pages(request, sizes, dtype)))
    return MadePlan(
        request=request,
        sizes=sizes,
        plan=plan,
        headers=headers,
        further_worker_bytes=further,
        remedies=remedies,
    )


def _read_sizes(request: PlanRequest) -> ModelSizes:
    return process_sizes(
        request.graph,
        request.stage.name,
        request.options.checkpoint,
        compute_dtype(request.options.dtype),
        limits=request.limits,
        page_size=request.options.own.page_size_tokens,
        device_kind=request.device_kind,
        fp8_experts=request.options.dtype == FP8,
    )


def _buffers(request: PlanRequest, sizes: ModelSizes, dtype: torch.dtype) -> int:
    return pass_buffer_bytes(
        request.graph,
        request.stage.name,
        request.options.checkpoint,
        dtype,
        sizes,
        limits=request.limits,
        device_kind=request.device_kind,
    )


def _max_pages(request: PlanRequest, sizes: ModelSizes, dtype: torch.dtype) -> int:
    """Return the largest number of KV pages, below the requested number, with which the model fits;
    0 if it does not fit with any.
    """
    page = request.options.own.page_size_tokens
    position_bytes = sizes.kv_bytes // (request.num_positions + page)
    fixed = sizes.buffer_bytes - _buffers(request, sizes, dtype)

    def fits(num_pages: int) -> bool:
        other = replace(request, num_pages=num_pages)
        kv_bytes = position_bytes * (num_pages + 1) * page
        resized = replace(
            sizes, kv_bytes=kv_bytes, buffer_bytes=fixed + _buffers(other, sizes, dtype)
        )
        return not request.divide(resized).lacking_bytes

    low, high = 0, request.num_pages - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _remedies(request: PlanRequest, further: int | None, max_pages: int) -> list[str]:
    """Return descriptions of changes, each of which alone makes the model fit. `further`: memory of
    a further worker, if one would suffice. `max_pages`: see `_max_pages`.
    """
    found: list[str] = []
    options, name = request.options, request.stage.name
    if further is not None:
        found.append(
            f"a further worker of at least {format_byte_size(further)}: add --memory "
            f"{option_of_byte_size(further)}"
        )
    if max_pages and max_pages >= request.min_pages:
        positions = max_pages * options.own.page_size_tokens
        found.append(
            f"fewer keys and values: set stages.{name}.kv_pages to at most {max_pages} "
            f"({positions} positions)"
        )
    if options.dtype == "float32" and options.config.numerics != "invariant":
        smaller = request.in_dtype("bfloat16")
        if not smaller.divide(_read_sizes(smaller)).lacking_bytes:
            found.append("weights of half the size: set dtype: bfloat16 (--dtype bfloat16)")
    if options.dtype == "bfloat16" and request.stage.has_experts and request.device_kind == "cuda":
        rounded = request.in_dtype(FP8)
        if not rounded.divide(_read_sizes(rounded)).lacking_bytes:
            found.append(f"experts in 8 bits: set stages.{name}.dtype: {FP8}")
    return found
