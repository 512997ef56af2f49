"""The `trainer` stage of Qwen3-Omni: trains a draft head for the Thinker."""

from functools import partial

import torch
import torch.nn.functional as F

from fleet.drafts.trainer.samples import TargetParts
from fleet.engine.torch.kv_pool import KVShape
from fleet.models.checkpoint import CheckpointReader
from fleet.models.qwen3_omni.config import read_config
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING
from fleet.models.qwen3_omni.span import StageDecoder
from fleet.processing.end_ids import read_end_ids
from fleet.stages.base import BuiltStage
from fleet.stages.draft_heads import new_head_config
from fleet.stages.lm_setup import prepare_stage
from fleet.stages.options import BuildOptions
from fleet.stages.training import build_trainer


def build(options: BuildOptions) -> BuiltStage:
    """Build the stage; of the Thinker only embedding, final norm and output head are loaded.
    Raises: ConfigError.
    """
    config = read_config(options.checkpoint)
    device = prepare_stage(options).where.device
    reader = CheckpointReader(options.checkpoint, device=device, dtype=torch.float32)
    stored = StageDecoder.of("thinker", reader, config)
    embedding_VH, norm_H = (
        reader.get(reader.first_prefix(THINKER_EMBEDDING)),
        reader.get(stored.norm),
    )
    head_VH = embedding_VH if stored.tied else reader.get(stored.head)
    text = config.thinker_config.text_config
    shape = KVShape(num_layers=1, num_kv_heads=text.num_key_value_heads, head_dim=text.head_dim)
    head = new_head_config(options, text, shape, text.max_position_embeddings)
    target = TargetParts(
        embed=partial(F.embedding, weight=embedding_VH), head=partial(F.linear, weight=head_VH)
    )
    return build_trainer(
        options, head, target, read_end_ids(options.checkpoint), head_VH=head_VH, norm_H=norm_H
    )
