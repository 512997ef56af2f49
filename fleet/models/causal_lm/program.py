"""A causal language model as a program of the batch loop: prompt ids in, answer ids out.

Legend: N rows of a pass, H hidden size, S rows drawn from, V vocabulary.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fleet.core.errors import BadInput, ConfigError
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.answer import Answer, draw_answers, history_of
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix, joined_keys
from fleet.engine.torch.program import Forwarded
from fleet.engine.torch.rows import Rows
from fleet.models.causal_lm.paged import LAYOUT, NAME, GivenHidden, register

SALT = zlib.crc32(b"lm")
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class CausalTask:
    """One request."""

    def __init__(self, program: "CausalLM", request: EngineRequest) -> None:
        self._program, self._request = program, request
        self._rows = Rows()
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.answer: Answer | None = None

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def wants_draw(self) -> bool:
        return self.answer is not None and not self.answer.ended

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """The whole prompt in one piece: `ids` int32 [N]."""
        self._ids = ids = np.asarray(piece.arrays["ids"], np.int64)
        self._rows.extend(self._program.embed(np.concatenate([ids, history_of(self._request)])))
        self.answer = Answer(self._request, ids.tolist(), self._program.end_ids, SALT)
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def computed(self, start: int, stop: int, tapped_NH: Tensor | None) -> Sequence[EngineOutput]:
        return self.answer.take_again() if self.answer is not None else ()

    def prefix(self) -> Prefix:
        drawn = self.answer.ids if self.answer is not None else []
        return Prefix(keys=joined_keys([self._ids, np.array(drawn, np.int64)])[: self.num_rows])

    def took(self, prefix: Prefix, start: int, stop: int) -> None:
        """Nothing that it made is needed again."""

    def grow(self, row_1H: Tensor) -> None:
        self._rows.extend(row_1H)


class CausalLM:
    """Any architecture whose attention goes through `transformers`' attention interface.

    Raises: ConfigError for those that do not, and for experts where numerics are invariant.
    """

    def __init__(
        self, folder: Path, end_ids: frozenset[int], *, device: torch.device, dtype: torch.dtype, tiled: bool
    ) -> None:
        register()
        config = read_config(folder)
        if tiled and (getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)):
            raise ConfigError(
                f"numerics: invariant is not there for {config.model_type}, which has experts", param="numerics"
            )
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
        except (OSError, ValueError, KeyError) as error:
            line = str(error).splitlines()[0]
            raise ConfigError(
                f"checkpoint {folder}: {config.model_type} cannot be served: {line}", param="checkpoint"
            ) from error
        self._model = cast(PreTrainedModel, cast(nn.Module, loaded).to(device).eval())
        self._body = cast(nn.Module, getattr(self._model, self._model.base_model_prefix))
        self._embedding = self._model.get_input_embeddings()
        setattr(self._model, self._model.base_model_prefix, GivenHidden())
        self._device, self._tiled, self.end_ids = device, tiled, end_ids
        self._num_ids = int(config.vocab_size)
        heads = int(config.num_attention_heads)
        self.kv_shape = KVShape(
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )

    def open(self, request: EngineRequest) -> CausalTask:
        return CausalTask(self, request)

    def embed(self, ids: np.ndarray) -> Tensor:
        """Raises: BadInput for ids the model does not have."""
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= self._num_ids:
            raise BadInput(f"prompt_ids: empty, or an id outside 0..{self._num_ids - 1}", param="messages")
        return self._embedding(torch.from_numpy(ids).to(self._device))

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[CausalTask]) -> Forwarded:
        done = self._body(
            inputs_embeds=rows_NH[None], position_ids=layout.positions[None], use_cache=False, **{LAYOUT: layout}
        )
        return Forwarded(last_NH=done.last_hidden_state[0])

    def draw(self, tasks: Sequence[CausalTask], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        logits_SV = self._model(inputs_embeds=last_SH[None], use_cache=False).logits[0]
        return draw_answers(tasks, logits_SV, self._embedding, one_by_one=self._tiled)


def read_config(folder: Path) -> PretrainedConfig:
    """Raises: ConfigError unless it is a causal language model with attention in every layer."""
    try:
        config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder)).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise ConfigError(
            f"checkpoint {folder}: no config.json that can be read: {line}", param="checkpoint"
        ) from error
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= KNOWN_LAYERS:
        unknown = ", ".join(sorted(kinds - KNOWN_LAYERS))
        raise ConfigError(f"checkpoint {folder}: layers of kind {unknown} cannot be served", param="checkpoint")
    return config
