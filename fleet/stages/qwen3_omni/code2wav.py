"""The `code2wav` stage: converts chunks of codec frames to PCM16. Setting `extra.left_context` = N
selects the approximate, stateless decoder with N frames of left context.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fleet.core.ids import DECODE, EdgeName, StageName, Walk
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import Arrays, Engine, EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.codec import CodecEngine, WindowPolicy
from fleet.engine.torch.fastest import Fastest
from fleet.models.qwen3_omni.code2wav import load_code2wav
from fleet.models.qwen3_omni.code2wav_left_context import LeftContextCode2Wav
from fleet.stages.base import NO_OUTPUT, BuiltStage, EdgeItem, LoggedOutput, TaskAdapter
from fleet.stages.options import BuildOptions

AUDIO = EdgeName("audio")
_PCM_PEAK = 32767


def build(options: BuildOptions) -> BuiltStage:
    """Build the stage. Raises: ConfigError if the checkpoint has no codec decoder, or an option is
    invalid.
    """
    torch.set_num_threads(options.own.threads)
    # TensorFloat-32 would cost three decimal digits of the wave.
    torch.backends.cudnn.allow_tf32 = False
    decoder, names = load_code2wav(
        options.checkpoint,
        device=options.device,
        dtype=options.dtype,
        progress=options.progress,
        fastest=_fastest(options),
    )
    policy = WindowPolicy(
        ramp=options.window_ramp, invariant=options.config.numerics == "invariant"
    )
    engine: Engine = CodecEngine(decoder, policy, max_batch=options.own.max_batch)
    left_context = options.own.extra.get("left_context")
    if left_context is None:
        decoder.capture(policy.ramp, options.own.max_batch)
    else:
        if not isinstance(left_context, int):
            raise options.refusal(
                "extra.left_context",
                f"{left_context!r} is not a number of frames; give a whole number such as 25",
            )
        engine = CodecEngine(
            LeftContextCode2Wav(decoder, left_context), policy, max_batch=options.own.max_batch
        )

    return BuiltStage(
        engine=engine,
        adapter=lambda spec, _blob: Code2WavTask(spec, options.stage),
        weight_names=names,
    )


def _fastest(options: BuildOptions) -> Fastest | None:
    """Return the chooser of implementations on a GPU, which keeps its results in the deployment's
    data folder; None where all processes must use the same.
    """
    if options.device_kind == "cpu" or options.config.numerics == "invariant":
        return None
    return Fastest(torch.device(options.device), options.config.measured_folder)


class Code2WavTask(TaskAdapter):
    """Adapter of a request's codec task: each decoded window becomes one item of audio."""

    def __init__(self, spec: RequestSpec, stage: StageName) -> None:
        self._request = EngineRequest(
            request_id=spec.id, sampling=spec.sampling.get(stage, Sampling()), params=spec.params
        )

    def open(self, logged: LoggedOutput = NO_OUTPUT) -> tuple[EngineRequest, Sequence[EngineInput]]:
        """Return the engine request. Audio that is already logged becomes the engine's history and
        is not decoded again.
        """
        pcm = logged.get((AUDIO, DECODE), {}).get("pcm")
        history = {} if pcm is None else {"wave": pcm.astype(np.float32) / _PCM_PEAK}
        return replace(self._request, history=history), ()

    def consume(
        self, edge: EdgeName, walk: Walk, arrays: Arrays, *, final: bool
    ) -> Sequence[EngineInput]:
        return (EngineInput(walk=walk, arrays=arrays, final=final),)

    def produce(self, output: EngineOutput) -> Sequence[EdgeItem]:
        if output.error is not None:
            return ()
        if "wave" not in output.arrays:
            return (EdgeItem(edge=AUDIO, walk=output.walk, final=output.final),)
        pcm = to_pcm16(output.arrays["wave"])
        return (EdgeItem(edge=AUDIO, walk=output.walk, arrays={"pcm": pcm}, final=output.final),)


def to_pcm16(wave: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(wave, -1.0, 1.0) * _PCM_PEAK).astype(np.int16)
