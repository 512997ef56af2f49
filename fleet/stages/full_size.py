"""Types for measuring a device with a model of published size and random weights, all stages in one
process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.engine.torch.fastest import FastestRow
from fleet.models.random_weights import RandomWeightReader
from fleet.stages.base import BuiltStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRates:
    """Best throughput that others have published for the model. `source`: publication.
    `audio_s_per_s`: seconds of audio per second, by number of concurrent answers.
    """

    source: str
    audio_s_per_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Results that the full-size model should reach on an H200.

    `step_ms`: duration of a decode step, by stage and number of requests. `prefill_ms`: time to the
    first token of a prompt, by its number of positions. `first_audio_ms`: time to first audio.
    `audio_s_per_s`: seconds of audio per second, by number of concurrent answers.
    `invariant_share`: speed of a step in invariant numerics relative to the step that a worker runs
    otherwise, by stage and number of requests.
    """

    step_ms: Mapping[tuple[StageName, int], float]
    prefill_ms: Mapping[int, float]
    first_audio_ms: float
    audio_s_per_s: Mapping[int, float]
    invariant_share: Mapping[tuple[StageName, int], float]


class MakeRequest(Protocol):
    """Function that makes test requests: the same `number` always gives the same prompt, different
    numbers give different prompts.
    """

    def __call__(
        self, number: int, *, num_prompt_rows: int, num_tokens: int, num_frames: int
    ) -> RequestSpec:
        """Return request `number`. `num_prompt_rows`: length of the prompt in positions;
        `num_tokens`, `num_frames`: exact length of the answer as text and as speech.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStages:
    """Stages of a model with random weights, built for a measurement.

    `built`: stages as a worker runs them on a GPU. `eager`: stages that use CUDA graphs, built
    again on the same weights without graphs. `invariant`: stages built again on the same weights
    for invariant numerics. `weights`: weight reader of each stage.
    """

    built: Mapping[StageName, BuiltStage]
    eager: Mapping[StageName, BuiltStage]
    invariant: Mapping[StageName, BuiltStage]
    weights: Mapping[StageName, RandomWeightReader]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeModel:
    """A full-size model with random weights.

    `rounded`: function that builds the stages with experts anew, with the experts' weights in 8
    bits. `request`: maker of test requests. `measured`: function that returns which implementations
    were measured at start, and the choices.
    """

    name: str
    stages: MeasuredStages
    rounded: Callable[[], MeasuredStages]
    request: MakeRequest
    sample_rate_hz: int
    published: PublishedRates
    expected: Expected
    measured: Callable[[], Sequence[FastestRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeOptions:
    """Options of a graph's `full_size` function. `small`: build the same architecture with small
    sizes. `on_built`: called after each stage is built.
    """

    device: str
    dtype: str
    small: bool
    max_batch: int
    kv_pages: int
    prefill_chunk_tokens: int
    on_built: Callable[[], None] = lambda: None


FullSizeBuilder = Callable[[FullSizeOptions], FullSizeModel]
