"""The Thinker's stage: the request's prompt in; answer tokens to the client, prompt and tokens to
the Talker.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from fleet.constraints.rules import Constraints
from fleet.core.errors import ConfigError
from fleet.core.ids import PREFILL, EdgeName
from fleet.core.request import Constraint, RequestSpec
from fleet.engine.base import (
    NUM_POSITIONS,
    TOKEN,
    Engine,
    EngineInput,
    EngineOutput,
    EngineRequest,
    TokenRule,
)
from fleet.engine.torch.prefix import content_key
from fleet.engine.vllm.engine import VllmEngine
from fleet.engine.vllm.start import installed_version, start
from fleet.graphs.qwen3_omni import QWEN3_OMNI, THINKER
from fleet.models.qwen3_omni.audio_tower import mel_features
from fleet.models.qwen3_omni.config import read_config
from fleet.models.qwen3_omni.thinker import SALT, WITH_ROWS, Thinker
from fleet.processing.end_ids import read_end_ids
from fleet.spans.protocol.chain import RouteSlot
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.answer_tokens import AnswerTokens
from fleet.stages.base import NO_OUTPUT, BuiltSpan, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.draft_heads import new_head_config
from fleet.stages.lm_setup import answering_stage, prepare_stage, vllm_options
from fleet.stages.options import BuildOptions
from fleet.stages.prompt_audio import cut_clips
from fleet.stages.qwen3_omni.spans import anchor_reader, load_stage_span, num_layers
from fleet.stages.sampling import sampling_of
from fleet.stages.spoken_tokens import SpokenTokens
from fleet.stages.stop_strings import StopDetector, tokenizer_of

TEXT, THOUGHT = EdgeName("text"), EdgeName("thought")
Features = Callable[[Sequence[NDArray[np.float32]]], dict[str, NDArray[np.float32]]]
CompileRule = Callable[[Constraint | None, int], Callable[[], TokenRule] | None]


def build(options: BuildOptions) -> BuiltStage:
    """Build the `thinker` stage. Raises: ConfigError if the checkpoint or an option is unusable."""
    engine, names, route = (
        (*_vllm_engine(options), None) if options.engine == "vllm" else _torch_engine(options)
    )
    tokenizer = tokenizer_of(options.checkpoint)
    features = feature_extractor(options.checkpoint)
    text = read_config(options.checkpoint).thinker_config.text_config
    constraints = Constraints(tokenizer, text.vocab_size, read_end_ids(options.checkpoint))

    def adapter(spec: RequestSpec, blob: bytes | None) -> ThinkerAdapter:
        stop = sampling_of(spec, QWEN3_OMNI, THINKER).stop
        detector = StopDetector(stop, tokenizer, spec.continued_ids)
        speech = SpokenTokens(spec.tools, tokenizer) if spec.tools is not None else None
        return ThinkerAdapter(spec, blob, features, detector, constraints.compile, speech)

    return answering_stage(
        options,
        engine,
        adapter,
        lambda shape: new_head_config(options, text, shape, text.max_position_embeddings),
        num_layers=lambda: text.num_hidden_layers,
        weight_names=names,
        route=route,
    )


def build_span(options: BuildOptions, span: LayerSpan) -> BuiltSpan:
    """Load a span of the Thinker's layers for a span worker. Raises: ConfigError."""
    return load_stage_span(options, "thinker", span)


def count_layers(checkpoint: Path) -> int:
    """Return the number of the Thinker's decoder layers in a checkpoint. Raises: ConfigError."""
    return num_layers(checkpoint, "thinker")


def _torch_engine(options: BuildOptions) -> tuple[Engine, tuple[str, ...], RouteSlot | None]:
    config, end_ids, anchor = (
        read_config(options.checkpoint),
        read_end_ids(options.checkpoint),
        options.anchor,
    )
    setup = prepare_stage(options, config.thinker_config.text_config.max_position_embeddings)
    experts, num_positions, tiled = setup.where.experts, setup.num_positions, setup.where.tiled
    if anchor is None:
        reader = setup.reader(lambda name: name.startswith("thinker.") and ".visual." not in name)
        thinker = Thinker(reader, config, end_ids, experts, num_positions, one_by_one=tiled)
        return setup.graph_loop(thinker), tuple(reader.names), None
    with_head = anchor.returned != "logits"
    reader = anchor_reader(setup, config, "thinker", anchor.span, with_head=with_head)
    thinker = Thinker(
        reader,
        config,
        end_ids,
        experts,
        num_positions,
        one_by_one=tiled,
        span=anchor.span,
        with_head=with_head,
    )
    engine, route = setup.anchor_loop(thinker, thinker.num_layers)
    return engine, tuple(reader.names), route


def _vllm_engine(options: BuildOptions) -> tuple[Engine, tuple[str, ...]]:
    installed_version()
    from fleet.models.qwen3_omni.vllm_plugin import TAPPED_THINKER, register
    from fleet.models.qwen3_omni.vllm_thinker import ThinkerPrompts

    register()  # vLLM itself finds it only where the package is installed
    thinker = read_config(options.checkpoint).thinker_config
    media_ids = [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]

    def row_positions(request: EngineRequest, ids: np.ndarray) -> Sequence[int] | None:
        return (
            np.flatnonzero(np.isin(ids, media_ids)).tolist()
            if WITH_ROWS in request.params
            else None
        )

    started = start(vllm_options(options, None, TAPPED_THINKER))
    engine = VllmEngine(
        started,
        read_end_ids(options.checkpoint),
        ThinkerPrompts(thinker.audio_token_id, chunk_frames=2 * thinker.audio_config.n_window),
        row_positions,
        piece_len=options.prefill_chunk_tokens,
        hands_off=options.half == "prefill",
        salt=SALT,
    )
    return engine, ()


class ThinkerAdapter(TaskAdapter):
    """Adapter of a request's Thinker task. Edges that the request does not use get no items.

    `blob`: samples of the prompt's audio, float32 mono. `features`: function that computes mel
    features of clips. `compile_rule`: function that compiles the rule for an answer. `speech`:
    filter of the answer tokens that the Talker gets; None if the answer may not call functions.
    """

    def __init__(
        self,
        spec: RequestSpec,
        blob: bytes | None,
        features: Features,
        stop_detector: StopDetector,
        compile_rule: CompileRule,
        speech: SpokenTokens | None = None,
    ) -> None:
        running = {edge.name for edge in QWEN3_OMNI.edges_of(spec)}
        self._spec = spec
        self._blob = blob
        self._features = features
        self._compile_rule = compile_rule
        self._speaks = THOUGHT in running
        spoken = THOUGHT if self._speaks else None
        min_tokens = sampling_of(spec, QWEN3_OMNI, THINKER).min_tokens
        self._tokens = AnswerTokens(
            client=TEXT,
            spoken=spoken,
            stop_detector=stop_detector,
            given=spec.given,
            min_tokens=min_tokens,
            speech=speech,
        )
        self._gives_text = TEXT in running

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request, and the prompt with the features of its audio. Raises:
        BadInput if the blob has fewer samples than the request's clips.
        """
        spec = self._spec
        sampling = sampling_of(spec, QWEN3_OMNI, THINKER)
        params = {NUM_POSITIONS: str(len(spec.prompt_ids) + sampling.max_tokens)}
        if self._speaks:
            params[WITH_ROWS] = "yes"
        arrays: dict[str, np.ndarray] = {"ids": np.array(spec.prompt_ids, dtype=np.int32)}
        if spec.audio:
            clips = cut_clips(spec, self._blob)
            arrays |= self._features(clips)
            if spec.session:
                arrays["clips"] = np.array(
                    [content_key(clip.tobytes()) for clip in clips], np.int64
                )
        history = self._tokens.history(logged)
        request = EngineRequest(
            request_id=spec.id,
            sampling=sampling,
            params=params,
            history=history,
            open_rule=self._compile_rule(sampling.constraint, sampling.max_tokens),
        )
        return request, [EngineInput(walk=PREFILL, arrays=arrays, final=True)]

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None or not output.arrays:
            return ()
        if output.walk == PREFILL:
            return (
                [EdgeItem(edge=THOUGHT, walk=PREFILL, arrays=output.arrays)] if self._speaks else ()
            )
        items = self._tokens.items(output, output.arrays[TOKEN])
        return [item for item in items if item.edge != TEXT or self._gives_text]

    def is_stopped(self) -> bool:
        return self._tokens.stopped


def feature_extractor(folder: Path) -> Features:
    """Return a function that computes mel features like `Qwen3OmniMoeProcessor`: clips padded to
    the longest, none cut.

    Raises: ConfigError if the folder has no preprocessor configuration.
    """
    try:
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
    except OSError as error:
        raise ConfigError(
            f"checkpoint {folder}: no preprocessor_config.json", param="checkpoint"
        ) from error

    return partial(mel_features, extractor)
