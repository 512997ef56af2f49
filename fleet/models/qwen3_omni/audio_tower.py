"""The Thinker's audio encoder (the module of `transformers`, with only its own weights loaded), and
the computation of its input features.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor
from transformers.initialization import no_init_weights
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.load import AUDIO_TOWER


class AudioTower:
    """Audio encoder of the Thinker. Encodes the clips of one request per call, so that the result
    depends on no other request.
    """

    def __init__(self, reader: WeightReader, config: OmniConfig) -> None:
        prefix = reader.first_prefix(AUDIO_TOWER)
        audio = config.thinker_config.audio_config
        build = Qwen3OmniMoeAudioEncoder._from_config  # pyright: ignore[reportPrivateUsage]
        with no_init_weights():
            tower = cast(nn.Module, build(audio))
        weights = {name.removeprefix(prefix): reader.get(name) for name in reader.under(prefix)}
        tower.load_state_dict(weights, assign=True)
        like = next(iter(weights.values()))
        self._tower = tower.to(like.device).eval()
        self._dtype = like.dtype

    def encode(self, features_CMF: Tensor, mask_CF: Tensor) -> Tensor:
        """Encode the clips of one request to embeddings of audio positions.

        Shapes: `features_CMF` has C clips x M mel bins x F frames, `mask_CF` is 1 for real frames
        and 0 for padding -> [positions of all clips, H].
        """
        lengths = mask_CF.sum(1).long()
        real = features_CMF.permute(0, 2, 1)[mask_CF.bool()].permute(1, 0)
        return self._tower(real.to(self._dtype), feature_lens=lengths).last_hidden_state


def mel_features(
    extractor: WhisperFeatureExtractor, clips: Sequence[NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """Compute the encoder's input for the clips of a request: mel `features`, padded to the longest
    clip, and `feature_mask`, which is 0 for padding.
    """
    features = extractor(
        list(clips),
        sampling_rate=extractor.sampling_rate,
        padding=True,  # pyright: ignore[reportArgumentType]
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    return {
        "features": np.asarray(features["input_features"], np.float32),
        "feature_mask": np.asarray(features["attention_mask"], np.float32),
    }
