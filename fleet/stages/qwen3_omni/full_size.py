"""Qwen3-Omni at its published size with random weights: the stages' own programs and loops, without
a checkpoint.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.config import FleetConfig, StageConfig
from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Engine
from fleet.engine.torch.codec import CodecEngine, WindowPolicy
from fleet.engine.torch.fastest import Fastest
from fleet.engine.torch.program import GraphProgram
from fleet.graphs.base import FP8
from fleet.graphs.qwen3_omni import CODE2WAV, QWEN3_OMNI, TALKER, THINKER
from fleet.models.qwen3_omni.code2wav import PREFIX, Code2Wav
from fleet.models.qwen3_omni.code2wav_operations import operations_for
from fleet.models.qwen3_omni.config import OmniConfig
from fleet.models.qwen3_omni.full_size import NAME, parsed, published_config, weight_shapes
from fleet.models.qwen3_omni.roles import RoleIds
from fleet.models.qwen3_omni.talker import VOICE, Talker
from fleet.models.qwen3_omni.thinker import Thinker
from fleet.models.qwen3_omni.tiny_config import model_config
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer
from fleet.models.qwen3_omni.tiny_weights import fill_full_size
from fleet.models.random_weights import RandomWeightReader
from fleet.stages.base import AdapterFactory, BuiltStage
from fleet.stages.full_size import (
    Expected,
    FullSizeModel,
    FullSizeOptions,
    MeasuredStages,
    PublishedRates,
)
from fleet.stages.lm_setup import prepare_stage
from fleet.stages.options import BuildOptions
from fleet.stages.qwen3_omni.code2wav import Code2WavTask
from fleet.stages.qwen3_omni.talker import CODES, TalkerAdapter
from fleet.stages.qwen3_omni.thinker import ThinkerAdapter
from fleet.stages.stop_strings import StopDetector

SAMPLE_RATE_HZ = 24_000
TURN_ROWS = 8
"""Positions of a prompt around its text: three begin the user's turn, two end it, and three begin
the assistant's.
"""
PUBLISHED = PublishedRates(
    source="M*, chart in the README of mstar-project/mstar (read off), 2 x H200",
    audio_s_per_s={1: 12.0, 4: 36.0, 8: 55.0, 16: 88.0, 32: 114.0},
)
EXPECTED = Expected(
    step_ms={
        (THINKER, 1): 3.5,
        (THINKER, 32): 16.0,
        (TALKER, 1): 3.0,
        (TALKER, 32): 5.0,
        (CODE2WAV, 1): 2.0,
    },
    prefill_ms={64: 20.0},
    first_audio_ms=60.0,
    audio_s_per_s={1: 20.0, 32: 150.0},
    invariant_share={(THINKER, 32): 0.9, (TALKER, 32): 0.9},
)
MEASURING_S = 120.0
"""Time for the choice between implementations, which compiles their kernels. A worker has less, and
takes the default for what is not measured by then.
"""


def build(options: FullSizeOptions) -> FullSizeModel:
    """Build all stages on one device. Raises: ConfigError if the device or an option cannot be
    used.
    """
    return _Builder(options).model()


class _Builder:
    def __init__(self, options: FullSizeOptions) -> None:
        raw = model_config(build_tokenizer().get_vocab()) if options.small else published_config()
        self._config, self._code2wav_config = parsed(raw)
        self._shapes = weight_shapes(raw)
        self._options = options
        section = StageConfig(
            max_batch=options.max_batch,
            kv_pages=options.kv_pages,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
        )
        # The Talker's options serve all stages: none of them verifies drafts here.
        self._setup = prepare_stage(
            BuildOptions(
                config=FleetConfig(stages={TALKER: section}),
                stage=TALKER,
                checkpoint=Path(),
                device=options.device,
                dtype=options.dtype,
            ),
            measuring_s=MEASURING_S,
        )
        self._weights: dict[StageName, RandomWeightReader] = {}
        self._eager: dict[StageName, BuiltStage] = {}
        self._invariant: dict[StageName, BuiltStage] = {}

    def model(self) -> FullSizeModel:
        built = {THINKER: self._thinker(), TALKER: self._talker(), CODE2WAV: self._code2wav()}
        rounded = replace(self._options, dtype=FP8, on_built=lambda: None)
        return FullSizeModel(
            name=NAME,
            stages=self._stages(built),
            rounded=lambda: _Builder(rounded).with_experts(),
            request=partial(_request, self._config),
            sample_rate_hz=SAMPLE_RATE_HZ,
            published=PUBLISHED,
            expected=EXPECTED,
            measured=self._setup.fastest.table if self._setup.fastest else list,
        )

    def with_experts(self) -> MeasuredStages:
        """Build the stages with experts only."""
        return self._stages({THINKER: self._thinker(), TALKER: self._talker()})

    def _stages(self, built: Mapping[StageName, BuiltStage]) -> MeasuredStages:
        return MeasuredStages(
            built=built, eager=self._eager, invariant=self._invariant, weights=self._weights
        )

    def _reader(self, stage: StageName) -> RandomWeightReader:
        where = self._setup.where
        self._weights[stage] = RandomWeightReader(
            self._shapes,
            fill_full_size,
            device=where.device,
            dtype=where.dtype,
            fp8_experts=where.fp8_experts,
        )
        return self._weights[stage]

    def _built(self, stage: StageName, engine: Engine, adapter: AdapterFactory) -> BuiltStage:
        self._options.on_built()
        return BuiltStage(engine=engine, adapter=adapter)

    def _in_each_way(
        self,
        stage: StageName,
        program: GraphProgram[Any],
        invariant: GraphProgram[Any],
        adapter: AdapterFactory,
    ) -> BuiltStage:
        """Return the stage as a worker runs it; keep it without graphs, and in invariant numerics
        unless its experts are rounded. `invariant`: the program for invariant numerics.
        """
        setup, where = self._setup, self._setup.where
        self._eager[stage] = BuiltStage(engine=setup.loop(program), adapter=adapter)
        if not where.fp8_experts:
            fixed = replace(setup, where=replace(where, tiled=True))
            engine = fixed.graph_loop(invariant, on_cpu=True)
            self._invariant[stage] = BuiltStage(engine=engine, adapter=adapter)
        return self._built(stage, setup.graph_loop(program, on_cpu=True), adapter)

    def _thinker(self) -> BuiltStage:
        setup, end_ids = self._setup, frozenset([self._config.im_end_token_id])
        program = Thinker(
            self._reader(THINKER),
            self._config,
            end_ids,
            setup.where.experts,
            setup.num_positions,
            one_by_one=setup.where.tiled,
        )

        def adapter(spec: RequestSpec, blob: bytes | None) -> ThinkerAdapter:
            return ThinkerAdapter(
                spec,
                blob,
                _no_features,
                StopDetector((), build_tokenizer),
                lambda *_: None,
            )

        return self._in_each_way(THINKER, program, program.invariant(), adapter)

    def _talker(self) -> BuiltStage:
        setup, config = self._setup, self._config
        program = Talker(
            self._reader(TALKER),
            config,
            setup.where.experts,
            setup.num_positions,
            tiled=setup.where.tiled,
        )
        roles = RoleIds(
            start=config.im_start_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
        )
        return self._in_each_way(
            TALKER, program, program.invariant(), lambda spec, _blob: TalkerAdapter(spec, roles)
        )

    def _code2wav(self) -> BuiltStage:
        reader, policy = (
            self._reader(CODE2WAV),
            WindowPolicy(ramp=QWEN3_OMNI.edge(CODES).policy.ramp),
        )
        device, max_batch = self._setup.where.device, self._setup.options.own.max_batch
        decoder = Code2Wav(
            self._code2wav_config,
            lambda name: reader.get(PREFIX + name),
            operations_for(device, self._setup.fastest or Fastest(device)),
        )
        decoder.capture(policy.ramp, max_batch)
        engine = CodecEngine(decoder, policy, max_batch=max_batch)
        return self._built(CODE2WAV, engine, lambda spec, _blob: Code2WavTask(spec, CODE2WAV))


def _no_features(clips: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    raise BadInput(
        f"messages: {len(clips)} clips, but the prompts of this measurement are text",
        param="messages",
    )


def _request(
    config: OmniConfig, number: int, *, num_prompt_rows: int, num_tokens: int, num_frames: int
) -> RequestSpec:
    source = random.Random(number)
    # Below the added tokens, whose ids are the highest, every id is text.
    text = [
        source.randrange(config.im_start_token_id - 1) for _ in range(num_prompt_rows - TURN_ROWS)
    ]
    line_break = text[0]
    user = (
        config.im_start_token_id,
        config.user_token_id,
        line_break,
        *text,
        config.im_end_token_id,
        line_break,
    )
    return RequestSpec(
        id=RequestId(f"{NAME}-{number}"),
        graph=QWEN3_OMNI.name,
        prompt_ids=(*user, config.im_start_token_id, config.assistant_token_id, line_break),
        outputs=tuple(QWEN3_OMNI.media),
        # The last code drawn yields no frame.
        sampling={
            THINKER: _sampling(THINKER, num_tokens),
            TALKER: _sampling(TALKER, num_frames + 1),
        },
        params={VOICE: min(config.talker_config.speaker_id)},
    )


def _sampling(stage: StageName, max_tokens: int) -> Sampling:
    default = msgspec.convert(QWEN3_OMNI.stage(stage).default_sampling, Sampling)
    return msgspec.structs.replace(default, max_tokens=max_tokens, ignore_eos=True)
