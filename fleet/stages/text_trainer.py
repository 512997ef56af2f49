"""The `trainer` stage of the `text` graph: trains a draft head for any causal language model."""

import torch
from torch import Tensor

from fleet.drafts.trainer.samples import TargetParts
from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.span_load import load_span
from fleet.processing.context_length import read_num_positions
from fleet.processing.end_ids import read_end_ids
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltStage
from fleet.stages.draft_heads import new_head_config
from fleet.stages.options import BuildOptions
from fleet.stages.training import build_trainer


def build(options: BuildOptions) -> BuiltStage:
    """Build the stage; of the target only the embedding, the last layer and the output head are
    loaded. Raises: ConfigError.
    """
    folder, device = options.checkpoint, torch.device(options.device)
    config = read_config(folder)
    last = LayerSpan(int(config.num_hidden_layers) - 1, has_output=True)
    target = load_span(folder, last, torch.float32, with_embedding=True, device=device)
    head = new_head_config(options, config, target.kv_shape, read_num_positions(folder))
    parts = TargetParts(embed=target.embed, head=target.head)
    return build_trainer(
        options,
        head,
        parts,
        read_end_ids(folder),
        head_VH=_matrix_of(parts, head.hidden_size, device),
    )


@torch.no_grad()
def _matrix_of(target: TargetParts, hidden: int, device: torch.device) -> Tensor:
    """Return the output head's matrix [V, H] by applying the head to unit vectors, since the head's
    module differs between architectures.
    """
    return target.head(torch.eye(hidden, device=device)).T.contiguous()
