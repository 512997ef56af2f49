"""The Talker's stage: the Thinker's prompt and tokens in, frames of codes out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, ChunkOrderError
from fleet.core.ids import DECODE, PREFILL, EdgeName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import (
    NUM_POSITIONS,
    Arrays,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
)
from fleet.graphs.qwen3_omni import QWEN3_OMNI, TALKER
from fleet.models.qwen3_omni.config import OmniConfig, read_config
from fleet.models.qwen3_omni.load import THINKER_EMBEDDING
from fleet.models.qwen3_omni.roles import HEADER_LEN, RoleIds, talker_prompt
from fleet.models.qwen3_omni.talker import NUM_OPENING_ROWS, Talker
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import NO_OUTPUT, BuiltSpan, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.lm_setup import prepare_stage
from fleet.stages.options import BuildOptions
from fleet.stages.qwen3_omni.spans import anchor_reader, load_stage_span, num_layers
from fleet.stages.sampling import sampling_of

CODES = EdgeName("codes")


def build(options: BuildOptions) -> BuiltStage:
    """Build the `talker` stage. Raises: ConfigError if the checkpoint or an option is unusable."""
    config = read_config(options.checkpoint)
    roles = RoleIds(
        start=config.im_start_token_id,
        user=config.user_token_id,
        assistant=config.assistant_token_id,
    )
    engine, names, route = _engine(options, config)
    return BuiltStage(
        engine=engine,
        adapter=lambda spec, _blob: TalkerAdapter(spec, roles),
        num_added_rows=NUM_OPENING_ROWS,
        weight_names=names,
        route=route,
    )


def build_span(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
    """Load a span of the Talker's layers for a span worker. Raises: ConfigError."""
    return load_stage_span(options, "talker", span)


def count_layers(checkpoint: Path) -> int:
    """Return the number of the Talker's decoder layers in a checkpoint. Raises: ConfigError."""
    return num_layers(checkpoint, "talker")


def _engine(
    options: BuildOptions, config: OmniConfig
) -> tuple[Engine, tuple[str, ...], RouteSlot | None]:
    setup, anchor = (
        prepare_stage(options, config.talker_config.text_config.max_position_embeddings),
        options.anchor,
    )
    experts, num_positions, tiled = setup.where.experts, setup.num_positions, setup.where.tiled
    if anchor is None:
        reader = setup.reader(lambda name: name.startswith("talker.") or name in THINKER_EMBEDDING)
        talker = Talker(reader, config, experts, num_positions, tiled=tiled)
        return setup.graph_loop(talker), tuple(reader.names), None
    reader = anchor_reader(setup, config, "talker", anchor.span, with_head=True)
    talker = Talker(reader, config, experts, num_positions, tiled=tiled, span=anchor.span)
    engine, route = setup.anchor_loop(talker, talker.num_layers)
    return engine, tuple(reader.names), route


class TalkerAdapter(TaskAdapter):
    """Adapter of a request's Talker task. Feeds positions of user turns as the Thinker prefills
    them, and the last assistant header together with the first answer token.
    """

    def __init__(self, spec: RequestSpec, roles: RoleIds) -> None:
        self._spec = spec
        self._prompt_ids: NDArray[np.int32] = np.array(spec.prompt_ids, dtype=np.int32)
        self._prompt = talker_prompt(self._prompt_ids, roles)
        self._at = 0
        self._answering = False

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request. Raises: BadInput if the prompt does not end in an assistant
        turn.
        """
        if self._prompt.header_at is None:
            raise BadInput(
                "messages: the prompt has no assistant header, so nothing can be spoken",
                param="messages",
            )
        sampling = sampling_of(self._spec, QWEN3_OMNI, TALKER)
        num_positions = (
            int(self._prompt.in_user_turn.sum()) + NUM_OPENING_ROWS + sampling.max_tokens
        )
        params = {**self._spec.params, NUM_POSITIONS: str(num_positions)}
        history = logged.get((CODES, DECODE), {})
        return EngineRequest(
            request_id=self._spec.id, sampling=sampling, params=params, history=history
        ), ()

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        if walk == PREFILL and len(arrays.get("ids", ())):
            return [EngineInput(walk=PREFILL, arrays=self._select_user_turns(arrays), final=final)]
        fed = dict(arrays)
        if not self._answering and len(arrays.get("ids", ())):
            self._answering = True
            fed |= self._opening(arrays["ids"])
        return [EngineInput(walk=walk, arrays=fed, final=final)]

    def _select_user_turns(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a prompt chunk reduced to the positions of user turns. Raises:
        ChunkOrderError if the chunk's ids or hidden states do not fit the prompt.
        """
        start, self._at = self._at, self._at + len(arrays["ids"])
        selected = self._prompt.in_user_turn[start : self._at]
        if not np.array_equal(arrays["ids"], self._prompt_ids[start : self._at]):
            raise ChunkOrderError(
                f"edge thought: the ids of positions {start} to {self._at - 1} are not those of "
                "the prompt"
            )
        fed: dict[str, np.ndarray] = {"ids": arrays["ids"][selected]}
        if len(arrays.get("row_positions", ())):
            at = arrays["row_positions"] - start
            if len(arrays["rows"]) != len(at) or at.min() < 0 or at.max() >= len(selected):
                raise ChunkOrderError(
                    f"edge thought: {len(arrays['rows'])} rows do not fit positions {start} to "
                    f"{self._at - 1}"
                )
            wanted = selected[at]
            fed["rows"] = arrays["rows"][wanted]
            fed["row_index"] = (np.cumsum(selected) - 1)[at[wanted]].astype(np.int32)
        return fed

    def _opening(self, ids: np.ndarray) -> Arrays:
        """Return the last assistant header, and the ids after it: the tokens with which the prompt
        begins the answer, then the first answer tokens `ids`.
        """
        assert self._prompt.header_at is not None
        text_at = self._prompt.header_at + HEADER_LEN
        header = self._prompt_ids[self._prompt.header_at : text_at]
        return {"header": header, "ids": np.concatenate([self._prompt_ids[text_at:], ids])}

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        return [EdgeItem(edge=CODES, walk=DECODE, arrays=output.arrays, final=output.final)]
