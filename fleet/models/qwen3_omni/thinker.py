"""The Thinker as a program of the batch loop: takes prompt ids and audio; produces answer ids, and
the hidden states that enter the accept layer, which the Talker reads.

Legend: N positions, H hidden size, S requests that sample, C clips, M mel bins, F frames.
"""

import zlib
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput
from fleet.core.ids import PREFILL
from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.answer import (
    AnsweringTask,
    TokenAnswer,
    history_of,
    record_answers,
)
from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.experts import Experts
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix, content_keys, joined_keys
from fleet.engine.torch.program import Forwarded, StepOutputs
from fleet.engine.torch.rows import Rows, joined, side_by_side
from fleet.engine.torch.sampling_rows import draw_rows
from fleet.engine.torch.step_inputs import DrawInputs, StepInputs, StepShape
from fleet.models.answering import AnsweringProgram
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.audio_tower import AudioTower
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.decoder_step import FusedDecoder
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING
from fleet.models.qwen3_omni.prefix_keys import keys_of_clips, prompt_keys
from fleet.models.qwen3_omni.span import ALL_LAYERS, load_omni_span
from fleet.spans.protocol.layers import LayerSpan

WITH_ROWS = "with_rows"
"""Request parameter, present if the hidden states that enter the accept layer are wanted for the
Talker.
"""
SALT = zlib.crc32(b"thinker")


class ThinkerTask(AnsweringTask):
    """State of one request in the Thinker.

    `multimodal_N`: True for the prompt positions whose accept-layer hidden states are sent to the
    Talker. `tapped`: these hidden states by position, kept for the session's next request, which
    sends the states of cached positions without computing them.
    """

    def __init__(self, program: "Thinker", request: EngineRequest) -> None:
        super().__init__()
        self._program, self._request = program, request
        self._piece: EngineInput | None = None
        self._prompt: Rows | None = None
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._multimodal_N: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._keys: NDArray[np.int64] = np.empty(0, np.int64)
        self._tapped: dict[int, NDArray[np.float32]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._ids) + len(self._rows)

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Take the whole prompt, which arrives as one input.

        Shapes: `ids` [N]; with audio `features` [C, M, F] and `feature_mask` [C, F]; with audio and
        a session `clips` [C], the content hash of each clip.
        """
        ids = np.asarray(piece.arrays["ids"], np.int32)
        self._program.check_ids(ids)
        self._ids, self._piece = ids, piece
        if self._request.session:
            self._keys = self._program.keys_of(
                self._ids, piece, self._prompt_rows().cut(0, len(ids))
            )
        history = history_of(self._request)
        if len(history):
            self._rows.extend(self._program.embed(history))
        self._multimodal_N = np.isin(self._ids, self._program.multimodal_ids)
        self.answer = TokenAnswer(self._request, self._ids.tolist(), self._program.end_ids, SALT)
        return ()

    def rows(self, start: int, stop: int) -> Tensor:
        num_prompt = len(self._ids)
        parts: list[Tensor] = []
        if start < num_prompt:
            parts.append(self._prompt_rows().cut(start, min(stop, num_prompt)))
        if stop > num_prompt:
            parts.append(self._rows.cut(max(start - num_prompt, 0), stop - num_prompt))
        return joined(parts)

    def _prompt_rows(self) -> Rows:
        """Return the embeddings of the prompt, computed on first use: a prompt whose KV cache is
        imported need not be encoded.
        """
        if self._prompt is None:
            assert self._piece is not None, "a prompt that was not fed"
            self._prompt = Rows()
            self._prompt.extend(self._program.embed_prompt(self._ids, self._piece))
            self._piece = None
        return self._prompt

    def on_computed(
        self, start: int, stop: int, tapped_NH: Tensor | None
    ) -> Sequence[EngineOutput]:
        """Return the outputs due after positions `start` to `stop` were computed: accept-layer
        hidden states of the prompt and, after its last position, answer tokens replayed from the
        log.
        """
        replayed = (
            self.answer.take_replayed()
            if self.answer is not None and stop >= len(self._ids)
            else ()
        )
        if self.needs_tapped(start, stop):
            self._store_tapped(stop, tapped_NH)
        return [*self._prefilled(start, min(stop, len(self._ids))), *replayed]

    def needs_tapped(self, start: int, stop: int) -> bool:
        """Return True if any position from `start` to `stop` is an audio position of the prompt
        whose accept-layer hidden state is needed, by the Talker or by the session's next request.
        """
        is_wanted = WITH_ROWS in self._request.params or bool(self._request.session)
        return is_wanted and bool(self._multimodal_N[start:stop].any())

    def _store_tapped(self, stop: int, tapped_NH: Tensor | None) -> None:
        """Keep the accept-layer hidden states of multimodal positions. `tapped_NH`: hidden states
        of the N positions before `stop`.
        """
        if tapped_NH is None:
            return
        first = stop - len(tapped_NH)
        wanted = np.flatnonzero(self._multimodal_N[first:stop])
        if len(wanted):
            rows = tapped_NH[torch.from_numpy(wanted).to(tapped_NH.device)].float().cpu().numpy()
            self._tapped |= zip((wanted + first).tolist(), rows, strict=True)

    def _prefilled(self, start: int, stop: int) -> Sequence[EngineOutput]:
        if start >= stop or WITH_ROWS not in self._request.params:
            return ()
        arrays: dict[str, np.ndarray] = {"ids": self._ids[start:stop]}
        wanted = np.flatnonzero(self._multimodal_N[start:stop]) + start
        if len(wanted):
            arrays["row_positions"] = wanted.astype(np.int32)
            arrays["rows"] = np.stack([self._tapped[position] for position in wanted.tolist()])
        if not self._request.session:
            self._tapped.clear()
        return (EngineOutput(request_id=self._request.request_id, walk=PREFILL, arrays=arrays),)

    def prefix(self) -> Prefix:
        keys = joined_keys([self._keys, self.drawn_ids])[: self.num_rows]
        return Prefix(keys=keys, tapped=self._tapped)

    def on_reused(self, prefix: Prefix, start: int, stop: int) -> None:
        self._tapped |= {
            position: row for position, row in prefix.tapped.items() if start <= position < stop
        }


class Thinker(AnsweringProgram):
    """Program of the Thinker, for text and audio prompts; images and video are not supported.

    `layers`: span of layers in this process, by default all. The steps of an anchor run through
    `layers` and the span workers. `taps_elsewhere`: a span worker has the accept layer.
    """

    def __init__(
        self,
        reader: WeightReader,
        config: OmniConfig,
        end_ids: frozenset[int],
        experts: Experts,
        num_positions: int,
        *,
        one_by_one: bool,
        span: LayerSpan | None = None,
        with_head: bool = False,
    ) -> None:
        """Load the program. `span`: layers of an anchor, by default all. `with_head`: load the
        output head even if the span does not end with it. `one_by_one`: sample each request by
        itself, for invariant numerics.
        """
        thinker = config.thinker_config
        self._accept_layer: int = config.talker_config.accept_hidden_layer
        self._table = reader.get(reader.first_prefix(THINKER_EMBEDDING))
        self.tapped_width = int(self._table.shape[1])
        self.layers = load_omni_span(
            reader,
            config,
            "thinker",
            span or ALL_LAYERS,
            experts,
            num_positions,
            with_head=with_head,
            embedding_VH=self._table,
        )
        self._decoder, self.kv_shape = self.layers.decoder, self.layers.kv_shape
        self._steps = FusedDecoder(self._decoder)
        self.num_layers = thinker.text_config.num_hidden_layers
        self.taps_elsewhere = not self.layers.has_tapped_layer
        head = self._table if self.layers.head_VH is None else self.layers.head_VH
        self._tower = AudioTower(reader, config)
        self._audio_id: int = thinker.audio_token_id
        self.multimodal_ids = [
            thinker.audio_token_id,
            thinker.image_token_id,
            thinker.video_token_id,
        ]
        super().__init__(
            end_ids,
            partial(F.embedding, weight=self._table),
            self.layers.head,
            num_ids=len(self._table),
            device=self._table.device,
            one_by_one=one_by_one,
        )
        self._never_V = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        self._ends_V = self._never_V.clone()
        self._ends_V[sorted(end_ids)] = True
        self.step_shape = StepShape(
            hidden_size=head.shape[1], num_codes=1, num_ids=len(head), salt=SALT
        )
        self._feature_layers: tuple[int, ...] = ()

    def invariant(self) -> Self:
        """Return the same program for invariant numerics, on the same weights."""
        program = copy(self)
        program._one_by_one = True
        return program

    def open(self, request: EngineRequest) -> ThinkerTask:
        return ThinkerTask(self, request)

    def embed_prompt(self, ids: NDArray[np.int32], piece: EngineInput) -> Tensor:
        """Return the embeddings [N, H] of a prompt, with encoded audio at audio positions. Raises:
        BadInput if the number of audio positions and the clips do not agree.
        """
        rows_NH = self.embed(ids)
        at_audio = np.flatnonzero(ids == self._audio_id)
        audio_rows = self._encode(piece) if "features" in piece.arrays else rows_NH[:0]
        if len(audio_rows) != len(at_audio):
            raise BadInput(
                f"audio: the prompt has {len(at_audio)} audio positions, its clips have "
                f"{len(audio_rows)}",
                param="messages",
            )
        if len(at_audio):
            rows_NH[torch.from_numpy(at_audio).to(rows_NH.device)] = audio_rows.to(rows_NH.dtype)
        return rows_NH

    def keys_of(
        self, ids: NDArray[np.int32], piece: EngineInput, rows_NH: Tensor
    ) -> NDArray[np.int64]:
        """Return the prefix cache keys [N] of a prompt's positions.

        A clip's embeddings vary slightly with the clips encoded beside it. With invariant numerics,
        audio positions are therefore identified by their embeddings; otherwise by their clip, so
        that they stay reusable beside a new clip.
        """
        at_audio = np.flatnonzero(ids == self._audio_id)
        if self._one_by_one:
            index = torch.from_numpy(at_audio).to(rows_NH.device)
            return prompt_keys(ids, at_audio, content_keys(rows_NH[index].float().cpu().numpy()))
        return prompt_keys(
            ids, at_audio, keys_of_clips(at_audio, piece.arrays.get("clips", np.empty(0, np.int64)))
        )

    def _encode(self, piece: EngineInput) -> Tensor:
        device = self._table.device
        features = torch.from_numpy(np.ascontiguousarray(piece.arrays["features"])).to(device)
        mask = torch.from_numpy(np.ascontiguousarray(piece.arrays["feature_mask"])).to(device)
        return self._tower.encode(features, mask)

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[ThinkerTask]) -> Forwarded:
        assert len(self._decoder.layers) == self.num_layers, (
            "the passes of an anchor run through `layers`"
        )
        entering: dict[int, Tensor | None] = dict.fromkeys(self._feature_layers)
        last_NH, tapped_NH = self._steps.forward(
            rows_NH, layout, tap=self._accept_layer, entering=entering
        )
        return Forwarded(last_NH=last_NH, tapped_NH=tapped_NH, features_NT=side_by_side(entering))

    def read_features(self, layers: Sequence[int]) -> None:
        self._feature_layers = tuple(layers)

    def decode(self, inputs: StepInputs, layout: StepLayout) -> StepOutputs:
        last_BH, tapped_BH = self._steps.forward(inputs.rows_BH, layout, tap=self._accept_layer)
        sampled = self.sample_step(last_BH, inputs.draws, is_fused=layout.is_fused)
        return StepOutputs(
            codes_BQ=sampled.codes_BQ,
            rows_BH=sampled.rows_BH,
            tapped_BH=tapped_BH,
            logits_BV=sampled.logits_BV,
        )

    def trial(self, rows_BH: Tensor, layout: StepLayout) -> Sequence[Tensor]:
        return (self._steps.trial(rows_BH, layout),)

    def sample_step(
        self, last_BH: Tensor, draws: DrawInputs, *, is_fused: bool = False
    ) -> StepOutputs:
        logits_BV = self.layers.head(last_BH, invariant=is_fused and self._one_by_one)
        tokens_B = draw_rows(logits_BV, draws, never_V=self._never_V, ends_V=self._ends_V)
        return StepOutputs(
            codes_BQ=tokens_B[:, None].int(),
            rows_BH=F.embedding(tokens_B.clamp(min=0), self._table),
            logits_BV=logits_BV,
        )

    def record(
        self, tasks: Sequence[ThinkerTask], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        return record_answers(tasks, codes_SQ[:, 0].tolist(), rows_SH)
