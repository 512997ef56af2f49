"""The Thinker on vLLM: its model class, with an additional layer that caches the hidden states
entering the accept layer, and the conversion of prompts to vLLM's form.

Registered with vLLM as a model of its own; nothing of vLLM is replaced. Prompts arrive with mel
features already computed, as for the torch engine, so that both engines have the same positions:
vLLM's own processor pads clips to whole hops, which adds a position to about one clip in eight.
Source: vllm 0.32, model_executor/models/qwen3_omni_moe_thinker.py. Legend: N positions, H hidden
size, C clips, M mel bins, F frames.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.inputs.engine import mm_input
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
    _get_feat_extract_output_lengths,
)
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)
from vllm.sequence import IntermediateTensors

from fleet.core.errors import BadInput
from fleet.engine.base import Arrays
from fleet.engine.vllm.tapped_rows import LAYER

LONGEST = "longest_chunk"
"""Name of a clip's field with the length in frames of the longest chunk among all clips of its
request.
"""


class ProcessedMedia(BaseProcessingInfo):
    """vLLM's limits of media for this model: any number of clips, and a single clip may fill the
    context.
    """

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"audio": seq_len}


class NoDummyInputs(BaseDummyInputsBuilder[ProcessedMedia]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise AssertionError("memory is set in bytes, so nothing is profiled")

    def get_dummy_mm_data(self, *arguments: object, **named: object) -> Any:
        raise AssertionError("memory is set in bytes, so nothing is profiled")


class NoProcessor(BaseMultiModalProcessor[ProcessedMedia]):
    requires_tokenizer = False

    def _get_mm_fields_config(self, *arguments: object) -> Any:
        raise AssertionError("prompts arrive with their media processed")

    def _get_prompt_updates(self, *arguments: object) -> Any:
        raise AssertionError("prompts arrive with their media processed")


@MULTIMODAL_REGISTRY.register_processor(
    NoProcessor, info=ProcessedMedia, dummy_inputs=NoDummyInputs
)
class TappedThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's Thinker, with the hidden states that enter the accept layer cached in pages of their
    own.
    """

    # Names of `transformers` 5.23, beside the names of published checkpoints.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.model.language_model.": "language_model.model.",
            "thinker.model.audio_tower.": "audio_tower.",
            "thinker.model.visual.": "visual.",
        }
        | Qwen3OmniMoeThinkerForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config
        self.set_aux_hidden_state_layers((config.hf_config.talker_config.accept_hidden_layer,))
        self.tap = CacheOnlyAttentionLayer(
            num_heads=1,
            head_size=config.get_hidden_size(),
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, f"{LAYER}.{config.get_total_num_hidden_layers()}"),
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors:
        last_NH, [accepted_NH] = super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )
        self.tap(accepted_NH[:, None])
        return last_NH

    def embed_multimodal(self, **kwargs: Any) -> Sequence[Tensor]:
        """Encode the clips of several requests; the result of a clip depends only on the clips of
        its own request.

        The encoder pads to the longest chunk of a call, and its convolutions let the end of a
        shorter clip see the padding, so clips are grouped by `LONGEST`.
        """
        longest_C: list[int] = kwargs[LONGEST].flatten().tolist()
        lengths_C: list[int] = kwargs["audio_feature_lengths"].flatten().tolist()
        clips = kwargs["input_audio_features"].split(lengths_C, dim=1)
        encoded: dict[int, Tensor] = {}
        for longest in sorted(set(longest_C)):
            members = [clip for clip, own in enumerate(longest_C) if own == longest]
            padding = clips[0].new_zeros(len(clips[0]), longest)
            lengths = torch.tensor(
                [*(lengths_C[clip] for clip in members), longest], device=padding.device
            )
            sizes = _get_feat_extract_output_lengths(lengths)
            features = torch.cat([*(clips[clip] for clip in members), padding], dim=1).to(
                self.audio_tower.dtype
            )
            rows = self.audio_tower(features, feature_lens=lengths, aftercnn_lens=sizes)
            encoded |= zip(members, rows.split(sizes.tolist()), strict=False)
        return [encoded[clip] for clip in range(len(clips))]


class ThinkerPrompts:
    """Converter of prompts to vLLM's form. `audio_id`: token id of every audio position.
    `chunk_frames`: frames that the encoder computes together.
    """

    def __init__(self, audio_id: int, chunk_frames: int) -> None:
        self._audio_id, self._chunk_frames = audio_id, chunk_frames

    def __call__(self, ids: Sequence[int], arrays: Arrays) -> object:
        """Return the vLLM prompt for token `ids` [N], with audio `features` [C, M, F] and
        `feature_mask` [C, F], if any.

        Raises: BadInput if audio positions and clips do not agree.
        """
        clips = [clip for clip in _clips(arrays) if clip.shape[1]]
        lengths = [num_positions(clip.shape[1]) for clip in clips]
        places = self._places(np.asarray(ids, np.int32), lengths)
        if not clips:
            return {"prompt_token_ids": list(ids)}
        num_frames = torch.tensor([clip.shape[1] for clip in clips])
        longest = min(self._chunk_frames, int(num_frames.max()))
        fields = {
            "input_audio_features": torch.from_numpy(np.concatenate(clips, axis=1)),
            "audio_feature_lengths": num_frames,
            LONGEST: torch.full_like(num_frames, longest),
        }
        kinds = {
            "input_audio_features": MultiModalFieldConfig.flat_from_sizes(
                "audio", num_frames, dim=1
            ),
            "audio_feature_lengths": MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
            LONGEST: MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
        }
        items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(fields), kinds)
        hashes = [
            blake2b(clip.tobytes() + longest.to_bytes(4, "little"), digest_size=16).hexdigest()
            for clip in clips
        ]
        return mm_input(
            list(ids),
            mm_kwargs=items,
            mm_hashes={"audio": hashes},
            mm_placeholders={"audio": places},
        )

    def _places(self, ids_N: NDArray[np.int32], lengths: Sequence[int]) -> list[PlaceholderRange]:
        at_audio = np.flatnonzero(ids_N == self._audio_id)
        starts = np.cumsum([0, *lengths])
        if starts[-1] != len(at_audio):
            raise BadInput(
                f"audio: the prompt has {len(at_audio)} audio positions, its clips have "
                f"{starts[-1]}",
                param="messages",
            )
        runs = [
            at_audio[start : start + length]
            for start, length in zip(starts[:-1], lengths, strict=True)
        ]
        if any(run[-1] - run[0] + 1 != len(run) for run in runs):
            raise BadInput(
                "audio: the positions of a clip are not beside each other in the prompt",
                param="messages",
            )
        return [PlaceholderRange(offset=int(run[0]), length=len(run)) for run in runs]


def _clips(arrays: Arrays) -> Iterator[NDArray[np.float32]]:
    """Yield the features of each clip without its padding: [M, frames]."""
    if "features" in arrays:
        for features_MF, mask_F in zip(arrays["features"], arrays["feature_mask"], strict=True):
            yield np.ascontiguousarray(features_MF[:, mask_F.astype(bool)])


def num_positions(num_frames: int) -> int:
    """Return the number of audio positions of a clip, as the encoder computes it."""
    return int(_get_feat_extract_output_lengths(torch.tensor([num_frames])).item())
