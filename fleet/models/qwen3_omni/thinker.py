"""The Thinker as a program of the batch loop: prompt ids and audio in, accept-layer rows and answer ids out.

Legend: N rows, H hidden size, S rows drawn from, C clips, M mel bins, F frames.
"""

import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, ConfigError
from fleet.core.ids import Walk
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.answer import Answer, draw_answers, history_of
from fleet.engine.torch.experts import Experts
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.program import Forwarded
from fleet.engine.torch.rows import Rows
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.audio_tower import AudioTower
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING, THINKER_TEXT, load_decoder

PREFILL = Walk("prefill")
WITH_ROWS = "with_rows"
"""Request parameter: present where accept-layer rows are wanted."""
SALT = zlib.crc32(b"thinker")


class ThinkerTask:
    """One request. `multimodal_N` marks the prompt's positions whose accept-layer rows go on."""

    def __init__(self, program: "Thinker", request: EngineRequest) -> None:
        self._program, self._request = program, request
        self._rows = Rows()
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._multimodal_N: NDArray[np.bool_] = np.empty(0, np.bool_)
        self.answer: Answer | None = None

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def wants_draw(self) -> bool:
        return self.answer is not None and not self.answer.ended

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """The whole prompt in one piece: `ids` [N], and with audio `features` [C, M, F] and `feature_mask` [C, F]."""
        self._ids = np.asarray(piece.arrays["ids"], np.int32)
        self._rows.extend(self._program.embed_prompt(self._ids, piece))
        history = history_of(self._request)
        if len(history):
            self._rows.extend(self._program.embed_tokens(history))
        self._multimodal_N = np.isin(self._ids, self._program.multimodal_ids)
        self.answer = Answer(self._request, self._ids.tolist(), self._program.end_ids, SALT)
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def computed(self, start: int, stop: int, tapped_NH: Tensor | None) -> Sequence[EngineOutput]:
        """Accept-layer rows of the prompt's positions among them; and, after the prompt's last, what was drawn before."""
        again = self.answer.take_again() if self.answer is not None and stop >= len(self._ids) else ()
        return [*self._prefilled(start, min(stop, len(self._ids)), tapped_NH), *again]

    def _prefilled(self, start: int, stop: int, tapped_NH: Tensor | None) -> Sequence[EngineOutput]:
        if start >= stop or WITH_ROWS not in self._request.params:
            return ()
        assert tapped_NH is not None
        arrays: dict[str, np.ndarray] = {"ids": self._ids[start:stop]}
        wanted = np.flatnonzero(self._multimodal_N[start:stop])
        if len(wanted):
            arrays["row_positions"] = (wanted + start).astype(np.int32)
            arrays["rows"] = tapped_NH[torch.from_numpy(wanted).to(tapped_NH.device)].float().cpu().numpy()
        return (EngineOutput(request_id=self._request.request_id, walk=PREFILL, arrays=arrays),)

    def grow(self, row_1H: Tensor) -> None:
        self._rows.extend(row_1H)


class Thinker:
    """Text and audio prompts; image and video are not read."""

    def __init__(
        self, reader: WeightReader, config: OmniConfig, end_ids: frozenset[int], experts: Experts, num_positions: int,
        *, one_by_one: bool,
    ) -> None:  # fmt: skip
        thinker = config.thinker_config
        self._accept_layer: int = config.talker_config.accept_hidden_layer
        if self._accept_layer >= thinker.text_config.num_hidden_layers:
            raise ConfigError(f"checkpoint: accept_hidden_layer {self._accept_layer} is no layer", param="checkpoint")
        self._decoder = load_decoder(
            reader, reader.first_prefix(THINKER_TEXT), thinker.text_config, experts, num_positions
        )
        self._table = reader.get(reader.first_prefix(THINKER_EMBEDDING))
        tied = bool(thinker.text_config.tie_word_embeddings) and not reader.has("thinker.lm_head.weight")
        self._head = self._table if tied else reader.get("thinker.lm_head.weight")
        self._tower = AudioTower(reader, config)
        self._audio_id: int = thinker.audio_token_id
        self.multimodal_ids = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
        self.end_ids = end_ids
        self._one_by_one = one_by_one

    @property
    def kv_shape(self) -> KVShape:
        shape = self._decoder.shape
        return KVShape(num_layers=len(self._decoder.layers), num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)

    def open(self, request: EngineRequest) -> ThinkerTask:
        return ThinkerTask(self, request)

    def embed_prompt(self, ids: NDArray[np.int32], piece: EngineInput) -> Tensor:
        """Raises: BadInput where ids are unknown, or audio positions and audio do not agree."""
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= len(self._table):
            raise BadInput(f"prompt_ids: empty, or an id outside 0..{len(self._table) - 1}", param="messages")
        rows_NH = F.embedding(torch.from_numpy(ids).long().to(self._table.device), self._table)
        at_audio = np.flatnonzero(ids == self._audio_id)
        audio_rows = self._encode(piece) if "features" in piece.arrays else rows_NH[:0]
        if len(audio_rows) != len(at_audio):
            raise BadInput(
                f"audio: the prompt has {len(at_audio)} audio positions, its clips make {len(audio_rows)}",
                param="messages",
            )
        if len(at_audio):
            rows_NH[torch.from_numpy(at_audio).to(rows_NH.device)] = audio_rows.to(rows_NH.dtype)
        return rows_NH

    def embed_tokens(self, ids: NDArray[np.int32]) -> Tensor:
        """Rows of an answer's tokens: [n] -> [n, H]."""
        return F.embedding(torch.from_numpy(ids).long().to(self._table.device), self._table)

    def _encode(self, piece: EngineInput) -> Tensor:
        device = self._table.device
        features = torch.from_numpy(np.ascontiguousarray(piece.arrays["features"])).to(device)
        mask = torch.from_numpy(np.ascontiguousarray(piece.arrays["feature_mask"])).to(device)
        return self._tower.encode(features, mask)

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[ThinkerTask]) -> Forwarded:
        last_NH, tapped_NH = self._decoder.forward(rows_NH, layout, tap=self._accept_layer)
        return Forwarded(last_NH=last_NH, tapped_NH=tapped_NH)

    def draw(self, tasks: Sequence[ThinkerTask], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        logits_SV = F.linear(last_SH, self._head)
        return draw_answers(tasks, logits_SV, partial(F.embedding, weight=self._table), one_by_one=self._one_by_one)
