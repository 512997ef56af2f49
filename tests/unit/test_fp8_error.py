"""Error of experts in 8-bit floating point: logits and greedy tokens of whole decoders in three
precisions, float32, bfloat16 and fp8, on a CPU, which emulates the products of a GPU.

By hand, from the root of the repository (minutes, and 5 GB of memory for the second):

  python -c "from tests.unit import test_fp8_error as e; print(*e.measure_pocket(), sep='\\n')"
  python -c "from tests.unit import test_fp8_error as e; print(*e.measure_published(), sep='\\n')"

Legend: N positions, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.engine.torch.experts import grouped_experts
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.layout import Extent
from fleet.graphs.qwen3_omni import QWEN3_OMNI
from fleet.models.checkpoint import CheckpointReader, WeightReader
from fleet.models.qwen3_omni.config import DividedStage, OmniConfig, read_config
from fleet.models.qwen3_omni.full_size import parsed, published_config, weight_shapes
from fleet.models.qwen3_omni.load import EXPERTS, THINKER_EMBEDDING
from fleet.models.qwen3_omni.span import ALL_LAYERS, OmniSpan, load_omni_span
from fleet.models.qwen3_omni.tiny_config import resized
from fleet.models.qwen3_omni.tiny_weights import fill_full_size
from fleet.models.random_weights import RandomWeightReader
from fleet.spans.torch.model import SpanComputer

CPU, PAGE_SIZE = torch.device("cpu"), 16
NUM_TOKENS = 300
PRECISIONS: Mapping[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "fp8": (torch.bfloat16, True),
}
"""Dtype, and whether experts are rounded to 8 bits, by name of the precision."""
PAIRS = (("bfloat16", "float32"), ("fp8", "bfloat16"))
PUBLISHED_WIDTHS: Mapping[str, Any] = {
    "thinker_config": {
        "text_config": {"num_hidden_layers": 6, "num_experts": 16, "vocab_size": 8192}
    },
    "talker_config": {
        "accept_hidden_layer": 2,
        "text_config": {"num_hidden_layers": 2, "num_experts": 8},
    },
}
"""Sizes in which the measured model is smaller than the published one. All widths, the heads and
the number of chosen experts are the published ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionError:
    """Difference of one precision from another. `relative_error`: norm of the difference of all
    logits, relative to the reference; `equal_tokens`: share of positions with equal greedy tokens.
    """

    model: str
    precision: str
    reference: str
    num_positions: int
    relative_error: float
    equal_tokens: float


class Decoding:
    """A decoder of which positions are computed one after another, or many at once."""

    def __init__(self, layers: OmniSpan, num_positions: int) -> None:
        self._layers = layers
        dtype = layers.decoder.layers[0].input_norm.dtype
        num_pages = -(-num_positions // PAGE_SIZE)
        self._pool = KVPool(
            layers.kv_shape, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype, device=CPU
        )
        self._table, self._num_done = self._pool.open_table(), 0
        self._computer = SpanComputer(layers, self._pool, tiled=False)

    @torch.inference_mode()
    def logits(self, rows_NH: Tensor) -> Tensor:
        """Compute further positions: hidden states [N, H] that enter the first layer -> float32 [N,
        V].
        """
        start, self._num_done = self._num_done, self._num_done + len(rows_NH)
        assert self._pool.grow(self._table, self._num_done)
        extent = Extent(table=self._table, start=start, stop=self._num_done)
        done = self._computer.run(rows_NH.to(self._pool.data.dtype), [extent])
        return self._layers.head(done.rows_NH).float()


Read = Callable[[torch.dtype, bool], WeightReader]
"""Function that opens a model's weights in a dtype, with or without experts in 8 bits."""


def errors_of(
    model: str,
    read: Read,
    config: OmniConfig,
    stage: DividedStage,
    rows: Callable[[WeightReader, OmniSpan], Tensor],
) -> Iterator[PrecisionError]:
    """Compute the same positions in all precisions, and compare them. `rows`: function that returns
    the hidden states which enter the first layer, given the model in bfloat16.
    """
    logits: dict[str, Tensor] = {}
    rows_NH = torch.empty(0)
    for name in ("bfloat16", "float32", "fp8"):
        reader = read(*PRECISIONS[name])
        layers = load_omni_span(reader, config, stage, ALL_LAYERS, grouped_experts, 4096)
        if name == "bfloat16":
            rows_NH = rows(reader, layers)
        logits[name] = Decoding(layers, len(rows_NH)).logits(rows_NH)
    for name, reference in PAIRS:
        got, wanted = logits[name], logits[reference]
        yield PrecisionError(
            model=model,
            precision=name,
            reference=reference,
            num_positions=len(rows_NH),
            relative_error=((got - wanted).norm() / wanted.norm()).item(),
            equal_tokens=(got.argmax(1) == wanted.argmax(1)).float().mean().item(),
        )


def greedy_rows(reader: WeightReader, layers: OmniSpan, first: int, num_tokens: int) -> Tensor:
    """Return the embeddings of a token and of the greedy tokens after it: [N, H]."""
    table_VH = reader.get(reader.first_prefix(THINKER_EMBEDDING))
    decoding, rows = Decoding(layers, num_tokens), [table_VH[first : first + 1]]
    while len(rows) < num_tokens:
        rows.append(F.embedding(decoding.logits(rows[-1]).argmax(1), table_VH))
    return torch.cat(rows)


def measure_tiny(folder: Path, num_tokens: int = NUM_TOKENS) -> list[PrecisionError]:
    """Measure the Thinker of a tiny checkpoint over its own greedy answer in bfloat16."""

    def read(dtype: torch.dtype, fp8_experts: bool) -> WeightReader:
        return CheckpointReader(folder, device=CPU, dtype=dtype, fp8_experts=fp8_experts)

    config = read_config(folder)
    return list(
        errors_of(
            "tiny Thinker",
            read,
            config,
            "thinker",
            lambda reader, layers: greedy_rows(reader, layers, 5, num_tokens),
        )
    )


def measure_pocket(num_positions: int = NUM_TOKENS) -> list[PrecisionError]:
    """Measure the Talker of Pocket, a small trained model, over random codes after one another. Its
    layers have one expert each; its Thinker has none.
    """
    folder = QWEN3_OMNI.shipped_folder()
    assert folder is not None

    def read(dtype: torch.dtype, fp8_experts: bool) -> WeightReader:
        return CheckpointReader(folder, device=CPU, dtype=dtype, fp8_experts=fp8_experts)

    def rows(reader: WeightReader, _: OmniSpan) -> Tensor:
        table_VH = reader.get("talker.model.codec_embedding.weight")
        generator = torch.Generator().manual_seed(0)
        return table_VH[torch.randint(len(table_VH), (num_positions,), generator=generator)]

    return list(errors_of("Talker of Pocket", read, read_config(folder), "talker", rows))


def measure_published(num_tokens: int = NUM_TOKENS) -> list[PrecisionError]:
    """Measure a random Thinker of the published widths, with fewer layers and experts, over its own
    greedy answer in bfloat16. Weights are Gaussian with the variance that keeps activations near 1.
    """
    raw = resized(published_config(), PUBLISHED_WIDTHS)

    def read(dtype: torch.dtype, fp8_experts: bool) -> WeightReader:
        return RandomWeightReader(
            weight_shapes(raw), fill_alike, device=CPU, dtype=dtype, fp8_experts=fp8_experts
        )

    return list(
        errors_of(
            "random Thinker of the published widths",
            read,
            parsed(raw)[0],
            "thinker",
            lambda reader, layers: greedy_rows(reader, layers, 5, num_tokens),
        )
    )


def fill_alike(name: str, weight: Tensor) -> None:
    """Fill a weight with the same random values in any dtype, and expert by expert or at once."""
    if EXPERTS in name and weight.dim() > 2:
        for number, part in enumerate(weight):
            fill_alike(f"{name}.{number}", part)
        return
    wide = torch.empty(weight.shape)
    fill_full_size(name, wide)
    weight.copy_(wide)


def test_fp8_errs_by_a_few_percent_and_rarely_changes_a_token(tiny_checkpoint: Path) -> None:
    plain, rounded = measure_tiny(tiny_checkpoint, num_tokens=120)
    assert (plain.precision, rounded.precision) == ("bfloat16", "fp8")
    assert 0 < plain.relative_error < 0.05 and plain.equal_tokens > 0.9
    assert plain.relative_error < rounded.relative_error < 0.2 and rounded.equal_tokens > 0.7
