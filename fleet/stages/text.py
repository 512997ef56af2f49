"""The stage of a causal language model: a prompt in, answer tokens out. The only one of the graph
`text`; other graphs build theirs with an adapter of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fleet.constraints.rules import Constraints
from fleet.core.errors import ContextLengthExceeded
from fleet.core.ids import PREFILL, EdgeName, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import NUM_POSITIONS, TOKEN, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.engine.vllm.engine import VllmEngine
from fleet.engine.vllm.start import start
from fleet.graphs import Graph
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
from fleet.stages.precision import with_precision
from fleet.stages.sampling import sampling_of
from fleet.stages.stop_strings import StopDetector, tokenizer_of

ANSWER = EdgeName("text")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """What an adapter knows of a language model's stage. `tokenizer`: loads the checkpoint's
    tokenizer; `positions`: context length of the model, None for unlimited; `constraints`: rules
    for its answers.
    """

    graph: Graph
    stage: StageName
    tokenizer: Callable[[], Tokenizer]
    positions: int | None
    constraints: Constraints

    def sampling_of(self, spec: RequestSpec) -> Sampling:
        return sampling_of(spec, self.graph, self.stage)


def build(options: BuildOptions) -> BuiltStage:
    """Build the language model's stage of the graph `text`. Raises: ConfigError if the checkpoint
    or an option is unusable.
    """
    return build_language_model(options, TextAdapter)


def build_language_model(
    options: BuildOptions, adapter: Callable[[RequestSpec, LanguageModel], TaskAdapter]
) -> BuiltStage:
    """Build the language model's stage of any graph. `adapter`: function that creates the adapter
    of a request. Raises: as `build`.
    """
    options, weight_bits = with_precision(options)
    engine, names, route = (
        (*_vllm_engine(options), None)
        if options.engine == "vllm"
        else _torch_engine(options, weight_bits=weight_bits)
    )
    positions = read_num_positions(options.checkpoint)
    tokenizer = tokenizer_of(options.checkpoint)
    model = LanguageModel(
        graph=options.config.graph_declaration(),
        stage=options.stage,
        tokenizer=tokenizer,
        positions=positions,
        constraints=Constraints(
            tokenizer,
            int(read_config(options.checkpoint).vocab_size),
            read_end_ids(options.checkpoint),
        ),
    )
    return answering_stage(
        options,
        engine,
        lambda spec, _blob: adapter(spec, model),
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


def _torch_engine(
    options: BuildOptions, *, weight_bits: int
) -> tuple[Engine, tuple[str, ...], RouteSlot | None]:
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
        model = CausalLM(
            folder,
            end_ids,
            device=where.device,
            dtype=where.dtype,
            tiled=where.tiled,
            weight_bits=weight_bits,
        )
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
    """Adapter of a request's task: feeds the prompt and sends answer tokens to the client. An
    answer ends with reason length at the context length of the model. `spoken`: edge to a stage
    that speaks the answer, which carries the answer's tokens too; None without such a stage.
    """

    def __init__(
        self, spec: RequestSpec, model: LanguageModel, *, spoken: EdgeName | None = None
    ) -> None:
        self._spec, self._model = spec, model
        self._sampling = model.sampling_of(spec)
        self._tokens = AnswerTokens(
            client=ANSWER,
            spoken=spoken,
            stop_detector=StopDetector(self._sampling.stop, model.tokenizer, spec.continued_ids),
            given=spec.given,
            min_tokens=self._sampling.min_tokens,
        )

    def prompt_ids(self) -> Sequence[int]:
        """Return the token ids of the whole prompt."""
        return self._spec.prompt_ids

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request and prompt. Raises: ContextLengthExceeded if the prompt leaves
        no position for the answer; BadInput if a rule for the answer cannot be used.
        """
        ids, positions = np.array(self.prompt_ids(), dtype=np.int32), self._model.positions
        num_prompt = len(ids)
        if positions is not None and num_prompt >= positions:
            raise ContextLengthExceeded.of(
                "messages", positions - 1, f"the prompt has {num_prompt} tokens"
            )
        sampling = limit_answer_length(self._sampling, num_prompt, positions)
        params = {NUM_POSITIONS: str(num_prompt + sampling.max_tokens)}
        history = self._tokens.history(logged)
        request = EngineRequest(
            request_id=self._spec.id,
            sampling=sampling,
            params=params,
            history=history,
            open_rule=self._model.constraints.compile(sampling.constraint, sampling.max_tokens),
        )
        return request, [EngineInput(walk=PREFILL, arrays={"ids": ids}, final=True)]

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        return (
            ()
            if output.error is not None or not output.arrays
            else self._tokens.items(output, output.arrays[TOKEN])
        )

    def is_stopped(self) -> bool:
        return self._tokens.stopped
