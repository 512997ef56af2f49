"""The one stage of the `text` graph: a prompt in, answer tokens out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fleet.core.errors import ContextLengthExceeded
from fleet.core.ids import EdgeName, Walk
from fleet.core.request import RequestSpec
from fleet.engine.base import NUM_POSITIONS, TOKEN, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.engine.vllm.engine import VllmEngine
from fleet.engine.vllm.start import start
from fleet.graphs.text import LM, TEXT
from fleet.models.causal_lm.load import read_config
from fleet.models.causal_lm.program import SALT, CausalAnchor, CausalLM
from fleet.models.causal_lm.span_load import load_span
from fleet.models.causal_lm.span_trial import try_division
from fleet.processing.context_length import limit_answer_length, read_num_positions
from fleet.processing.end_ids import read_end_ids
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.answer_tokens import AnswerTokens
from fleet.stages.base import NO_OUTPUT, BuiltSpan, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.draft_heads import new_head_config
from fleet.stages.lm_setup import answering_stage, prepare_stage, vllm_options
from fleet.stages.options import BuildOptions
from fleet.stages.sampling import sampling_of
from fleet.stages.stop_strings import StopDetector, tokenizer_of

ANSWER, PREFILL = EdgeName("text"), Walk("prefill")


def build(options: BuildOptions) -> BuiltStage:
    """Build the language model's stage. Raises: ConfigError if the checkpoint or an option is
    unusable.
    """
    engine, names, route = (
        (*_vllm_engine(options), None) if options.engine == "vllm" else _torch_engine(options)
    )
    tokenizer, positions = tokenizer_of(options.checkpoint), read_num_positions(options.checkpoint)

    def adapter(spec: RequestSpec, blob: bytes | None) -> TextAdapter:
        stop = sampling_of(spec, TEXT, LM).stop
        return TextAdapter(spec, StopDetector(stop, tokenizer), positions)

    return answering_stage(
        options,
        engine,
        adapter,
        lambda shape: new_head_config(options, read_config(options.checkpoint), shape, positions),
        num_layers=lambda: count_layers(options.checkpoint),
        weight_names=names,
        route=route,
    )


def build_span(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
    """Load a span of the model's layers for a span worker. Raises: ConfigError."""
    where = prepare_stage(options).where
    layers = load_span(
        options.checkpoint, span, where.dtype, with_embedding=False, device=where.device
    )
    return BuiltSpan(
        layers=layers, num_bytes=sum(weight.nbytes for weight in layers.weights().values())
    )


def count_layers(checkpoint: Path) -> int:
    """Return the number of the model's decoder layers in a checkpoint. Raises: ConfigError."""
    return int(read_config(checkpoint).num_hidden_layers)


def _torch_engine(options: BuildOptions) -> tuple[Engine, tuple[str, ...], RouteSlot | None]:
    setup = prepare_stage(options)
    folder, end_ids, where, anchor = (
        options.checkpoint,
        read_end_ids(options.checkpoint),
        setup.where,
        options.anchor,
    )
    if anchor is None:
        weights = setup.reader(lambda _: False)  # `transformers` reads them
        weights.check()
        model = CausalLM(folder, end_ids, device=where.device, dtype=where.dtype, tiled=where.tiled)
        return setup.loop(model), tuple(weights.under("")), None
    try_division(folder, tiled=where.tiled)
    program = CausalAnchor(
        folder,
        end_ids,
        anchor.span,
        device=where.device,
        dtype=where.dtype,
        tiled=where.tiled,
        with_head=anchor.returned != "logits",
    )
    engine, route = setup.anchor_loop(program, program.num_layers)
    return engine, tuple(program.layers.weights()), route


def _vllm_engine(options: BuildOptions) -> tuple[Engine, tuple[str, ...]]:
    started = start(vllm_options(options, read_num_positions(options.checkpoint)))
    return VllmEngine(
        started, read_end_ids(options.checkpoint), hands_off=options.half == "prefill", salt=SALT
    ), ()


class TextAdapter(TaskAdapter):
    """Adapter of a request's task: feeds the prompt and sends answer tokens to the client.
    `positions`: context length of the model, at which an answer ends with reason length; None:
    unlimited.
    """

    def __init__(
        self, spec: RequestSpec, stop_detector: StopDetector, positions: int | None
    ) -> None:
        self._spec, self._positions = spec, positions
        min_tokens = sampling_of(spec, TEXT, LM).min_tokens
        self._tokens = AnswerTokens(
            client=ANSWER,
            spoken=None,
            stop_detector=stop_detector,
            given=spec.given,
            min_tokens=min_tokens,
        )

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request and prompt. Raises: ContextLengthExceeded if the prompt leaves
        no position for the answer.
        """
        num_prompt = len(self._spec.prompt_ids)
        if self._positions is not None and num_prompt >= self._positions:
            raise ContextLengthExceeded.of(
                "messages", self._positions - 1, f"the prompt has {num_prompt} tokens"
            )
        sampling = limit_answer_length(
            sampling_of(self._spec, TEXT, LM), num_prompt, self._positions
        )
        params = {NUM_POSITIONS: str(num_prompt + sampling.max_tokens)}
        history = self._tokens.history(logged)
        request = EngineRequest(
            request_id=self._spec.id, sampling=sampling, params=params, history=history
        )
        ids = np.array(self._spec.prompt_ids, dtype=np.int32)
        return request, [EngineInput(walk=PREFILL, arrays={"ids": ids}, final=True)]

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        return (
            ()
            if output.error is not None or not output.arrays
            else self._tokens.items(output, output.arrays[TOKEN])
        )

    def is_stopped(self) -> bool:
        return self._tokens.stopped
