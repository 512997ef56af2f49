"""The Talker as a program of the batch loop: takes the prompt, then produces one frame of codes per
step, with the code predictor run inside the step.

Source: transformers 5.23, modeling_qwen3_omni_moe.py: `generate()`, `_get_talker_assistant_parts`,
the Talker's `prepare_inputs_for_generation`. Legend: N positions, H hidden size, S requests that
sample, T the Thinker's hidden size, Q codebooks, V vocabulary.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fleet.core.errors import BadInput, EngineError
from fleet.core.ids import DECODE
from fleet.engine.base import Arrays, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.experts import Experts
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.linear import linear
from fleet.engine.torch.noise import noise_key
from fleet.engine.torch.prefix import Prefix, content_keys, joined_keys
from fleet.engine.torch.program import Forwarded, GraphTask, StepOutputs
from fleet.engine.torch.rows import Rows
from fleet.engine.torch.sampling import RowSampling, TokenCounts, draw
from fleet.engine.torch.sampling_rows import draw_rows
from fleet.engine.torch.step_inputs import DrawInputs, StepInputs, StepShape
from fleet.engine.torch.tiles import in_tiles, padded
from fleet.engine.unread import UnreadPieces
from fleet.models.checkpoint import WeightReader
from fleet.models.qwen3_omni.code_predictor import CodePredictor, FrameDraw
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.decoder_step import FusedDecoder
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING
from fleet.models.qwen3_omni.roles import HEADER_LEN
from fleet.models.qwen3_omni.span import ALL_LAYERS, load_omni_span
from fleet.spans.protocol.layers import LayerSpan

CODES = "codes"
"""Name of the output array with a frame's codes: int32 [1, Q]."""
VOICE = "voice"
"""Request parameter with the speaker's name."""
SALT = zlib.crc32(b"talker")
NUM_NEVER_DRAWN = 1024
"""Number of control codes at the end of the vocabulary, of which only the end code can be sampled.
"""
NUM_OPENING_ROWS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeMlp:
    """Projection from the Thinker's hidden size to the Talker's."""

    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor

    def __call__(self, rows_NT: Tensor) -> Tensor:
        return linear(F.silu(linear(rows_NT, self.weight1, self.bias1)), self.weight2, self.bias2)


class TalkerTask(GraphTask):
    """State of one request in the Talker.

    Invariants: a position is appended only when its text has arrived (the next answer token; after
    the last token `tts_eos` once, then `tts_pad`), so the Talker never runs ahead of the Thinker.
    The last code sampled yields no frame, as in `transformers`.
    """

    def __init__(self, program: "Talker", request: EngineRequest, speaker_id: int) -> None:
        self._program = program
        self.request = request
        self._speaker_id = speaker_id
        self._rows = Rows()
        self._prompt_keys: list[NDArray[np.int64]] = []
        self._header: Tensor | None = None
        self._text: deque[Tensor] = deque()
        # Ids that are not embedded yet: many chunks of a replay are embedded together.
        self._text_ids: list[np.ndarray] = []
        self._unread = UnreadPieces()
        self._text_ended = False
        self._spoke_end = False
        self._begun = False
        self._frame_row: Tensor | None = None
        self._drawn = False
        self.counts = TokenCounts()
        self.num_frames = 0
        # Frames that an earlier owner drew, not yet replayed: [1, Q] each.
        self._history = deque(
            np.split(codes, len(codes)) if len(codes := history_of(request)) else ()
        )

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def wants_draw(self) -> bool:
        return self._begun and not self._drawn

    @property
    def num_unread(self) -> int:
        """Number of pieces of the answer (see `feed`) of which at least one token is not yet part
        of an appended position.
        """
        return self._unread.count(len(self._text) + sum(map(len, self._text_ids)))

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Take a piece of the Thinker's output, and return outputs that are replayed.

        Shapes: a piece of the prompt has `ids` [N], and hidden states `rows` [m, T] that replace
        the embeddings at `row_index` [m]. A piece of the answer has `ids` [n], and the first piece
        `header` [3] too.
        """
        arrays = piece.arrays
        if "header" in arrays:
            self._header = self._program.embed_text(arrays["header"])
        if self._header is not None:
            self._unread.add(len(arrays.get("ids", ())))
        if len(arrays.get("ids", ())):
            if self._header is None:
                self._rows.extend(self._program.embed_prompt(arrays))
                if self.request.session:
                    self._prompt_keys.append(prompt_keys(arrays))
            else:
                self._program.check_ids(arrays["ids"])
                self._text_ids.append(arrays["ids"])
        self._text_ended |= piece.final
        return self._advance()

    def _advance(self) -> Sequence[EngineOutput]:
        """Append the next position if its text has arrived; return frames replayed from the log, or
        the end of the request.
        """
        if not self._begun and self._header is not None and (text := self._fed_text()) is not None:
            self._rows.extend(self._program.opening_rows(self._header, text, self._speaker_id))
            self._begun = True
        nothing_to_say = self._text_ended and not self._begun
        if nothing_to_say or (self._begun and self.max_frames == 0):
            return (EngineOutput(request_id=self.request.request_id, walk=DECODE, final=True),)
        replayed: list[EngineOutput] = []
        while self._begun:
            if self._frame_row is None and self._history:
                codes = self._history.popleft()
                replayed.append(self._take_frame(codes, self._program.embed_frame(codes)))
                if replayed[-1].final:
                    break
            if self._frame_row is None or (text := self._next_text()) is None:
                break
            self._rows.extend(self._frame_row + text)
            self._frame_row, self._drawn = None, False
        return replayed

    def _fed_text(self) -> Tensor | None:
        """Remove and return the embedding of the next answer token that was fed; None if there is
        none.
        """
        if not self._text and self._text_ids:
            self._text.extend(self._program.embed_text(np.concatenate(self._text_ids)).split(1))
            self._text_ids = []
        return self._text.popleft() if self._text else None

    def _next_text(self) -> Tensor | None:
        fed = self._fed_text()
        if fed is not None:
            return fed
        if not self._text_ended:
            return None
        text = self._program.pad_text if self._spoke_end else self._program.end_text
        self._spoke_end = True
        return text

    @property
    def max_frames(self) -> int:
        return max(0, self.request.sampling.max_tokens - 1)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._rows.cut(start, stop)

    def prefix(self) -> Prefix:
        """Return the prefix cache keys of the prompt only: generated speech is not part of later
        prompts.
        """
        return Prefix(keys=joined_keys(self._prompt_keys))

    @property
    def num_drawn(self) -> int:
        return self.num_frames

    def next_draw(self) -> RowSampling:
        sampling = self.request.sampling
        banned = (
            frozenset[int]()
            if sampling.may_end(self.num_frames)
            else frozenset([self._program.codec_end])
        )
        key = noise_key(sampling.seed, SALT, 0, self.num_frames)
        return RowSampling(sampling=sampling, noise_key=key, counts=self.counts, banned=banned)

    def ended_at(self, first_code: int) -> Sequence[EngineOutput]:
        """Return the final output of a request whose first code is no frame: the end code, or -1
        for non-finite logits, which is an error.
        """
        if first_code >= 0:
            return (EngineOutput(request_id=self.request.request_id, walk=DECODE, final=True),)
        error = EngineError(
            "the model's output is not a number; the prompt's audio may hold invalid samples"
        )
        return (EngineOutput(request_id=self.request.request_id, walk=DECODE, error=error),)

    def record_frame(self, codes: NDArray[np.int32], row_1H: Tensor) -> Sequence[EngineOutput]:
        """Record a sampled frame, append the next position if its text has arrived, and return the
        frame's output. `codes`: [1, Q]; `row_1H`: sum of the frame's code embeddings, to which the
        next text's embedding is added to form the next position.
        """
        output = self._take_frame(codes, row_1H)
        if not output.final:
            self._advance()
        return (output,)

    def _take_frame(self, codes: NDArray[np.int32], row_1H: Tensor) -> EngineOutput:
        self.counts.add(int(codes[0, 0]))
        self.num_frames += 1
        self._drawn, self._frame_row = True, row_1H
        final = self.num_frames >= self.max_frames
        return EngineOutput(
            request_id=self.request.request_id, walk=DECODE, arrays={CODES: codes}, final=final
        )


def prompt_keys(arrays: Arrays) -> NDArray[np.int64]:
    """Return the prefix cache keys [N] of a piece of the prompt: token ids, or content hashes of
    the hidden states that replace their embeddings.
    """
    keys = np.asarray(arrays["ids"], np.int64)
    if len(arrays.get("rows", ())):
        keys = keys.copy()
        keys[arrays["row_index"]] = content_keys(arrays["rows"])
    return keys


def history_of(request: EngineRequest) -> NDArray[np.int32]:
    """Return the frames that an earlier owner of the task sampled: [n, Q]."""
    return np.asarray(request.history.get(CODES, np.zeros((0, 1))), np.int32)


class Talker:
    """Program of the Talker. Includes the Thinker's embedding table, since the answer's text
    arrives as token ids.

    `span`: layers in this process, by default all. An anchor has a span, and its steps run through
    `layers` and the span workers. An anchor always has the output head, since the code predictor
    needs the final hidden states.
    """

    taps_elsewhere = False
    tapped_width = 0

    def __init__(
        self,
        reader: WeightReader,
        config: OmniConfig,
        experts: Experts,
        num_positions: int,
        *,
        tiled: bool,
        span: LayerSpan | None = None,
    ) -> None:
        talker = config.talker_config
        self._tiled = tiled
        self.layers = load_omni_span(
            reader, config, "talker", span or ALL_LAYERS, experts, num_positions, with_head=True
        )
        self._decoder, self.kv_shape = self.layers.decoder, self.layers.kv_shape
        self._steps = FusedDecoder(self._decoder)
        self.num_layers = talker.text_config.num_hidden_layers
        self._codec_table = reader.get("talker.model.codec_embedding.weight")
        self._thinker_table = reader.get(reader.first_prefix(THINKER_EMBEDDING))
        self._from_text = _resize(reader, "talker.text_projection.")
        self._from_rows = _resize(reader, "talker.hidden_projection.")
        self._predictor = CodePredictor(
            reader, talker.code_predictor_config, talker.num_code_groups, experts
        )
        self._speakers = {
            str(name).lower(): int(number) for name, number in talker.speaker_id.items()
        }
        self.codec_end: int = talker.codec_eos_token_id
        self._lead_ids: list[int] = [
            talker.codec_nothink_id,
            talker.codec_think_bos_id,
            talker.codec_think_eos_id,
        ]
        self._tail_ids: list[int] = [talker.codec_pad_id, talker.codec_bos_id]
        head = self.layers.head_VH
        assert head is not None
        self._suppressed_V = torch.zeros(len(head), device=head.device)
        self._suppressed_V[-NUM_NEVER_DRAWN:] = -torch.inf
        self._suppressed_V[self.codec_end] = 0.0
        self._never_V = self._suppressed_V < 0
        self._ends_V = torch.arange(len(head), device=head.device) == self.codec_end
        self.step_shape = StepShape(
            hidden_size=head.shape[1],
            num_codes=talker.num_code_groups,
            num_ids=len(head),
            salt=SALT,
        )
        specials = np.array(
            [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]
        )
        with torch.inference_mode():
            texts = self.embed_text(specials)
        self._bos_text = texts[:1]
        self.end_text = texts[1:2]
        self.pad_text = texts[2:]

    def invariant(self) -> Self:
        """Return the same program for invariant numerics, on the same weights."""
        program = copy(self)
        program._tiled = True
        return program

    def open(self, request: EngineRequest) -> TalkerTask:
        voice = request.params.get(VOICE, "").lower()
        if voice not in self._speakers:
            known = ", ".join(sorted(self._speakers))
            raise BadInput(
                f"audio.voice: no voice {voice!r}; use one of {known}", param="audio.voice"
            )
        return TalkerTask(self, request, self._speakers[voice])

    def check_ids(self, ids: np.ndarray) -> None:
        """Check that token ids are in the Thinker's vocabulary. Raises: BadInput."""
        if int(ids.min()) < 0 or int(ids.max()) >= len(self._thinker_table):
            raise BadInput(
                f"prompt_ids: an id outside 0..{len(self._thinker_table) - 1}", param="messages"
            )

    def embed_text(self, ids: np.ndarray) -> Tensor:
        """Embed token ids of the Thinker and project them to the Talker's hidden size: [n] -> [n,
        H]. Raises: BadInput for an unknown id.
        """
        self.check_ids(ids)
        index = torch.from_numpy(np.ascontiguousarray(ids)).long().to(self._thinker_table.device)
        return self._project(self._from_text, F.embedding(index, self._thinker_table))

    def embed_prompt(self, arrays: Arrays) -> Tensor:
        rows_NH = self.embed_text(arrays["ids"])
        if len(arrays.get("rows", ())):
            rows = torch.from_numpy(np.ascontiguousarray(arrays["rows"])).to(rows_NH)
            index = (
                torch.from_numpy(np.ascontiguousarray(arrays["row_index"]))
                .long()
                .to(rows_NH.device)
            )
            rows_NH[index] = self._project(self._from_rows, rows)
        return rows_NH

    def _project(self, projection: ResizeMlp, rows_NT: Tensor) -> Tensor:
        return in_tiles(projection, rows_NT) if self._tiled else projection(rows_NT)

    def opening_rows(self, header_3H: Tensor, first_1H: Tensor, speaker_id: int) -> Tensor:
        """Return the embeddings of the last prefill, the nine positions with which speech begins.
        `header_3H`: assistant header; `first_1H`: first answer token; `speaker_id`: codec id of the
        voice.
        """
        text_9H = torch.cat([header_3H, self.pad_text.expand(4, -1), self._bos_text, first_1H])
        ids = torch.tensor([*self._lead_ids, speaker_id, *self._tail_ids], device=text_9H.device)
        text_9H[HEADER_LEN:] += F.embedding(ids, self._codec_table)
        return text_9H

    def embed_frame(self, codes: NDArray[np.int32]) -> Tensor:
        """Return the sum of a frame's code embeddings: [1, Q] -> [1, H]."""
        codes_1Q = torch.from_numpy(codes).long().to(self._codec_table.device)
        return self._predictor.embed(
            F.embedding(codes_1Q[:, 0], self._codec_table), codes_1Q[:, 1:]
        )

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[TalkerTask]) -> Forwarded:
        assert len(self._decoder.layers) == self.num_layers, (
            "the passes of an anchor run through `layers`"
        )
        return Forwarded(last_NH=self._steps.forward(rows_NH, layout)[0])

    def draw(
        self, tasks: Sequence[TalkerTask], last_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        logits_SV = self.layers.head(last_SH)[: len(tasks)]
        draws = [task.next_draw() for task in tasks]
        first_S = draw(logits_SV, draws, suppressed_V=self._suppressed_V, one_by_one=self._tiled)
        first = first_S.tolist()
        speaking = [at for at, code in enumerate(first) if self._is_frame(code)]
        frames = (
            self._frames([tasks[at] for at in speaking], last_SH, first_S, speaking)
            if speaking
            else []
        )
        framed = dict(zip(speaking, frames, strict=True))
        return [
            framed[at] if at in framed else task.ended_at(first[at])
            for at, task in enumerate(tasks)
        ]

    def draw_from(
        self, tasks: Sequence[TalkerTask], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        raise AssertionError("a Talker draws from final rows, which its code predictor needs")

    def _is_frame(self, first_code: int) -> bool:
        return first_code >= 0 and first_code != self.codec_end

    def decode(self, inputs: StepInputs, layout: StepLayout) -> StepOutputs:
        last_BH, _ = self._steps.forward(inputs.rows_BH, layout)
        return self.sample_step(last_BH, inputs.draws, is_fused=layout.is_fused)

    def trial(self, rows_BH: Tensor, layout: StepLayout) -> Sequence[Tensor]:
        hidden_BH = self._steps.trial(rows_BH, layout)
        return hidden_BH, *self._predictor.trial(rows_BH, is_fused=layout.is_fused)

    def sample_step(
        self, last_BH: Tensor, draws: DrawInputs, *, is_fused: bool = False
    ) -> StepOutputs:
        logits_BV = self.layers.head(last_BH, invariant=is_fused and self._tiled)
        first_B = draw_rows(logits_BV, draws, never_V=self._never_V, ends_V=self._ends_V)
        first_BH = F.embedding(first_B.clamp(min=0), self._codec_table)
        predict = self._predictor.fused.predict if is_fused else self._predictor.predict_step
        residual_BR, sum_BH = predict(last_BH, first_BH, draws)
        return StepOutputs(
            codes_BQ=torch.cat([first_B[:, None], residual_BR], 1).int(), rows_BH=sum_BH
        )

    def record(
        self, tasks: Sequence[TalkerTask], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        outputs: list[Sequence[EngineOutput]] = []
        for at, task in enumerate(tasks):
            first = int(codes_SQ[at, 0])
            frame, row_1H = codes_SQ[at : at + 1], rows_SH[at : at + 1]
            outputs.append(
                task.record_frame(frame, row_1H) if self._is_frame(first) else task.ended_at(first)
            )
        return outputs

    def _frames(
        self, tasks: Sequence[TalkerTask], last_SH: Tensor, first_S: Tensor, speaking: list[int]
    ) -> list[Sequence[EngineOutput]]:
        if len(speaking) != len(first_S):
            index = torch.tensor(speaking, device=last_SH.device)
            last_SH, first_S = last_SH[index], first_S[index]
        draws = [
            FrameDraw(sampling=task.request.sampling, salt=SALT, frame=task.num_frames)
            for task in tasks
        ]
        first_SH = F.embedding(first_S, self._codec_table)
        if self._tiled:
            last_SH, first_SH = padded(last_SH), padded(first_SH)
        residual_SR, sum_SH = self._predictor.predict(
            last_SH, first_SH, self._predictor.noise(draws, len(last_SH))
        )
        residual_SR = residual_SR[: len(tasks)]
        codes_SQ = torch.cat([first_S[:, None], residual_SR], 1).int().cpu().numpy()
        return [
            task.record_frame(codes_SQ[at : at + 1], sum_SH[at : at + 1])
            for at, task in enumerate(tasks)
        ]


def _resize(reader: WeightReader, prefix: str) -> ResizeMlp:
    return ResizeMlp(
        weight1=reader.get(prefix + "linear_fc1.weight"),
        bias1=reader.get(prefix + "linear_fc1.bias"),
        weight2=reader.get(prefix + "linear_fc2.weight"),
        bias2=reader.get(prefix + "linear_fc2.bias"),
    )
