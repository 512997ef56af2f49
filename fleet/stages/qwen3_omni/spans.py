"""Common parts of the Thinker's and the Talker's builders for stages whose layers are divided."""

from collections.abc import Mapping
from pathlib import Path

from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import DividedStage, OmniConfig, decoder_config, read_config
from fleet.models.qwen3_omni.load import AUDIO_TOWER, THINKER_EMBEDDING
from fleet.models.qwen3_omni.span import StageDecoder, load_omni_span
from fleet.models.qwen3_omni.span_sizes import TALKER_PARTS
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltSpan
from fleet.stages.lm_setup import StageSetup, prepare_stage
from fleet.stages.options import BuildOptions

BESIDE: Mapping[DividedStage, tuple[str, ...]] = {
    "thinker": (*AUDIO_TOWER, *THINKER_EMBEDDING),
    "talker": (*TALKER_PARTS, *THINKER_EMBEDDING),
}
"""Name prefixes of the weights that an anchor has in addition to decoder layers, final norm and
output head.
"""


def load_stage_span(options: BuildOptions, stage: DividedStage, span: LayerSpan) -> BuiltSpan:
    """Load a span of a stage's layers for a span worker. Raises: ConfigError."""
    config = read_config(options.checkpoint)
    setup = prepare_stage(options, decoder_config(config, stage).max_position_embeddings)
    reader = span_reader(setup, config, stage, span)
    layers = load_omni_span(reader, config, stage, span, setup.where.experts, setup.num_positions)
    return BuiltSpan(
        layers=layers, num_bytes=sum(weight.nbytes for weight in layers.weights().values())
    )


def num_layers(checkpoint: Path, stage: DividedStage) -> int:
    """Return the number of decoder layers of the stage in a checkpoint. Raises: ConfigError."""
    return decoder_config(read_config(checkpoint), stage).num_hidden_layers


def anchor_reader(
    setup: StageSetup, config: OmniConfig, stage: DividedStage, span: LayerSpan, *, with_head: bool
) -> WeightReader:
    """Return a reader of the checkpoint for an anchor: its span of layers, and the parts that only
    the anchor has. `with_head`: include the output head even if the span does not end with it.
    """
    return _reader(setup, config, stage, span, BESIDE[stage], with_head=with_head)


def span_reader(
    setup: StageSetup, config: OmniConfig, stage: DividedStage, span: LayerSpan
) -> WeightReader:
    """Return a reader of the checkpoint for a span worker."""
    return _reader(setup, config, stage, span, (), with_head=False)


def _reader(
    setup: StageSetup,
    config: OmniConfig,
    stage: DividedStage,
    span: LayerSpan,
    beside: tuple[str, ...],
    *,
    with_head: bool,
) -> WeightReader:
    """Return a reader that reports loading progress by the weights that this process needs, and
    opens only their files. `beside`: name prefixes of further weights.
    """
    reader = setup.reader(lambda _: False)
    stored = StageDecoder.of(stage, reader, config)
    own = stored.weights_of(
        reader, span.of_model(stored.config.num_hidden_layers, "spans"), with_head=with_head
    )
    own += [name for prefix in beside for name in reader.under(prefix)]
    reader.report_to(setup.options.progress, list(dict.fromkeys(own)))
    return reader
