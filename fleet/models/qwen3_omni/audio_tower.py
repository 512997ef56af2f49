"""Audio encoder of the Thinker: the module of `transformers`, with only its own weights loaded."""

from typing import cast

from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.load import AUDIO_TOWER


class AudioTower:
    """Encodes one request's clips together, so the result depends on nothing else in the batch."""

    def __init__(self, reader: WeightReader, config: OmniConfig) -> None:
        prefix = reader.first_prefix(AUDIO_TOWER)
        with no_init_weights():
            tower = cast(nn.Module, Qwen3OmniMoeAudioEncoder._from_config(config.thinker_config.audio_config))  # pyright: ignore[reportPrivateUsage]
        weights = {name.removeprefix(prefix): reader.get(name) for name in reader.under(prefix)}
        tower.load_state_dict(weights, assign=True)
        like = next(iter(weights.values()))
        self._tower = tower.to(like.device).eval()
        self._dtype = like.dtype

    def encode(self, features_CMF: Tensor, mask_CF: Tensor) -> Tensor:
        """Encode clips. Shapes: C clips x M mel bins x F frames, mask 1 for real frames -> [positions of all clips, H]."""
        lengths = mask_CF.sum(1).long()
        real = features_CMF.permute(0, 2, 1)[mask_CF.bool()].permute(1, 0)
        return self._tower(real.to(self._dtype), feature_lens=lengths).last_hidden_state
