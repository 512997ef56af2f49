"""A span of the layers of Qwen3-Omni's Thinker or Talker, loaded in one process. Knows no other
process.

Legend: N positions, H hidden size, S requests that sample, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.engine.torch.experts import Experts
from fleet.engine.torch.kernels.row_product import row_product
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.linear import linear
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import DividedStage, OmniConfig, TextConfig, decoder_config
from fleet.models.qwen3_omni.decoder import Decoder
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING, THINKER_TEXT, load_decoder, norm_beside
from fleet.spans.protocol.layers import LayerSpan
from fleet.spans.torch.model import SpanLayers, SpanRows

ALL_LAYERS = LayerSpan(0, has_output=True)
THINKER_HEAD = "thinker.lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecoder:
    """Names of a stage's decoder weights in a checkpoint, and its configuration.

    `layers`: prefix of the layers' names, up to the layer number. `head`: name of the output head,
    which is the Thinker's embedding if `tied`. `tap`: number of the layer whose input is sent to
    the next stage; None if there is none.
    """

    config: TextConfig
    layers: str
    head: str
    tied: bool = False
    tap: int | None = None

    @classmethod
    def of(cls, stage: DividedStage, reader: WeightReader, config: OmniConfig) -> Self:
        """Find a stage's decoder in a checkpoint. Raises: ConfigError if the checkpoint has no such
        decoder, or the Thinker lacks the tapped layer.
        """
        talker, text = config.talker_config, decoder_config(config, stage)
        if stage == "talker":
            return cls(config=text, layers="talker.model.layers.", head="talker.codec_head.weight")
        if talker.accept_hidden_layer >= text.num_hidden_layers:
            raise ConfigError(
                f"checkpoint: accept_hidden_layer {talker.accept_hidden_layer} is no layer",
                param="checkpoint",
            )
        tied = bool(text.tie_word_embeddings) and not reader.has(THINKER_HEAD)
        return cls(
            config=text,
            layers=reader.first_prefix(THINKER_TEXT),
            head=reader.first_prefix(THINKER_EMBEDDING) if tied else THINKER_HEAD,
            tied=tied,
            tap=talker.accept_hidden_layer,
        )

    @property
    def norm(self) -> str:
        return norm_beside(self.layers)

    def weights_of(
        self, reader: WeightReader, span: LayerSpan, *, with_head: bool = False
    ) -> list[str]:
        """Return the names of the weights that a span of this decoder reads. `with_head`: see
        `load_omni_span`.
        """
        layers = [
            reader.under(f"{self.layers}{number}.") for number in range(span.first, span.final + 1)
        ]
        ends = [self.norm, self.head] if span.has_output or with_head else []
        return [name for layer in layers for name in layer] + ends


class OmniSpan(SpanLayers):
    """A loaded span of decoder layers, with the final norm and the output head if they were loaded
    too.
    """

    def __init__(
        self, decoder: Decoder, span: LayerSpan, head_VH: Tensor | None, tap: int | None
    ) -> None:
        self.decoder = decoder
        self._span = span
        self._head_VH = head_VH
        self._tap = tap

    @property
    def span(self) -> LayerSpan:
        return self._span

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def head_VH(self) -> Tensor | None:
        return self._head_VH

    @property
    def has_tapped_layer(self) -> bool:
        return self._tap is not None and self._span.first <= self._tap <= self._span.final

    def weights(self) -> Mapping[str, Tensor]:
        """Return the loaded weights by name. Weights that a layer uses in one operation are joined
        to one tensor, such as `qkv`.
        """
        return self.decoder.weights() | (
            {"head": self._head_VH} if self._head_VH is not None else {}
        )

    def forward(self, rows_NH: Tensor, layout: Layout) -> SpanRows:
        """Run the layers: hidden states [N, H] -> [N, H]. The final norm follows if the span ends
        with the output head.
        """
        done_NH, tapped_NH = self.decoder.run_layers(rows_NH, layout, tap=self._tap)
        return SpanRows(
            rows_NH=self.finish(done_NH) if self._span.has_output else done_NH, tapped_NH=tapped_NH
        )

    def finish(self, rows_NH: Tensor) -> Tensor:
        """Apply the final norm to the output of the model's last layer."""
        return self.decoder.finish(rows_NH)

    def head(self, last_SH: Tensor, *, invariant: bool = False) -> Tensor:
        """Return the logits [S, V] of final hidden states [S, H]. `invariant`: True if the bytes of
        a row must not depend on S on a GPU.
        """
        assert self._head_VH is not None, f"{self._span}: loaded without the output head"
        return (row_product if invariant else linear)(last_SH, self._head_VH)


def load_omni_span(
    reader: WeightReader,
    config: OmniConfig,
    stage: DividedStage,
    span: LayerSpan,
    experts: Experts,
    num_positions: int,
    *,
    with_head: bool = False,
    embedding_VH: Tensor | None = None,
) -> OmniSpan:
    """Load a span of a stage's decoder layers; only the span's weights are read.

    `with_head`: load the final norm and the output head even if the span ends before them.
    `embedding_VH`: the Thinker's embedding, if it is loaded already; used as output head if the two
    are tied.

    Raises: ConfigError for layers that the model does not have, and as `StageDecoder.of`.
    """
    stored = StageDecoder.of(stage, reader, config)
    span = span.of_model(stored.config.num_hidden_layers, "spans")
    has_head = span.has_output or with_head
    decoder = load_decoder(
        reader, stored.layers, stored.config, experts, num_positions, span, with_norm=has_head
    )
    is_loaded = stored.tied and embedding_VH is not None
    head_VH = None if not has_head else embedding_VH if is_loaded else reader.get(stored.head)
    return OmniSpan(decoder, span, head_VH, stored.tap)
