"""A model at its published size with random weights, as the measurement of a device runs it: all
stages in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.models.random_weights import RandomWeightReader
from fleet.stages.base import BuiltStage


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRates:
    """The best figures that others have published for the model: seconds of audio per second, by
    concurrent answers.
    """

    source: str
    audio_s_per_s: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expectations of the full size on a GPU, where a stage has them.

    `graph_gain`: how many times faster a step of one request is as a graph; `batch_cost`: the
    duration of a step of the largest batch, relative to a step of one request; `bytes_time`: the
    duration of a step, relative to a copy of the bytes that it reads.
    """

    graph_gain: Mapping[StageName, float]
    batch_cost: Mapping[StageName, float]
    bytes_time: Mapping[StageName, float]
    first_audio_ms: float


class MakeRequest(Protocol):
    """Makes a request by its number: other numbers have other prompts, and one number always the
    same.
    """

    def __call__(
        self, number: int, *, num_prompt_rows: int, num_tokens: int, num_frames: int
    ) -> RequestSpec:
        """`num_tokens`, `num_frames`: the length of the answer as text and as speech, which nothing
        ends earlier.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeModel:
    """`built`: the stages as a worker runs them on a GPU. `eager`: the stages whose steps are
    captured graphs, built on the same weights without graphs. `weights`: the reader of each stage.
    """

    name: str
    built: Mapping[StageName, BuiltStage]
    eager: Mapping[StageName, BuiltStage]
    weights: Mapping[StageName, RandomWeightReader]
    request: MakeRequest
    sample_rate_hz: int
    published: PublishedRates
    expected: Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeOptions:
    """`small`: the same architecture with small sizes. `on_built` is called after each stage."""

    device: str
    dtype: str
    small: bool
    max_batch: int
    kv_pages: int
    prefill_chunk_tokens: int
    on_built: Callable[[], None] = lambda: None


FullSizeBuilder = Callable[[FullSizeOptions], FullSizeModel]
