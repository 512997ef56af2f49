"""`fleet bench --gpu`: the torch engine on this machine's device, with a model of the published
size and random weights.

Needs no fleet, no checkpoint and no network. Knows no model.
"""

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from fleet.core.ids import StageName
from fleet.lab.measure.measurement import BenchOptions, Measurement
from fleet.lab.report.result import MS, Result
from fleet.lab.report.stats import Ratio, median
from fleet.lab.report.tables import NONE, figure, table_of, titled

GIB, MIB, GIGA = 2**30, 2**20, 1e9
ROUNDED_TITLE = "decode steps with experts in 8 bits"


class StageSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Step latencies of one stage at one batch size, with every request decoding. A latency lasts
    from the call to the end of the device's work.

    `served_s`: latencies as a worker runs the steps. `eager_s`: latencies without a CUDA graph,
    empty where a worker uses none. `invariant_s`: latencies in invariant numerics, empty where they
    were not measured. `weight_bytes`: weights that a step reads, counted as often as it reads them.
    `kv_bytes`: KV pages of all requests, 0 for a stage without pages.
    """

    stage: StageName
    batch: int
    served_s: tuple[float, ...]
    eager_s: tuple[float, ...]
    invariant_s: tuple[float, ...] = ()
    weight_bytes: int
    kv_bytes: int

    @property
    def served_ms(self) -> float:
        return median(self.served_s) * MS

    @property
    def eager_ms(self) -> float | None:
        return median(self.eager_s) * MS if self.eager_s else None

    @property
    def graph_gain(self) -> float | None:
        return self.eager_ms / self.served_ms if self.eager_ms else None

    @property
    def invariant_ms(self) -> float | None:
        return median(self.invariant_s) * MS if self.invariant_s else None

    @property
    def invariant_share(self) -> float | None:
        """Speed of a step in invariant numerics, relative to the step as a worker runs it."""
        return self.served_ms / self.invariant_ms if self.invariant_ms else None

    def share_of_limit(self, copy_bytes_per_s: float) -> float | None:
        """Return the share of the device's limit that a step reaches: the time in which a copy
        moves as many bytes as the step reads, divided by the step latency; None for a stage whose
        bytes are not counted.
        """
        num_bytes = self.weight_bytes + self.kv_bytes
        return num_bytes / copy_bytes_per_s * MS / self.served_ms if num_bytes else None


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of the first step of one request: the whole prompt, and the sampling of its first
    token.
    """

    rows: int
    step_s: tuple[float, ...]

    @property
    def step_ms(self) -> float:
        return median(self.step_s) * MS


class MeasuredChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A measured implementation. `key`: what it computes; `outcome`: milliseconds, or why it is not
    used.
    """

    key: str
    candidate: str
    outcome: float | str
    is_chosen: bool


class SpeechRun(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that were started together, with all stages in one process. `first_audio_s`: time
    from the start to the first audio of each answer.
    """

    concurrency: int
    first_audio_s: tuple[float, ...]
    seconds: float
    audio_s: float

    @property
    def audio_s_per_s(self) -> float:
        return self.audio_s / self.seconds


class PublishedRate(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int
    audio_s_per_s: float


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in use. `peak_bytes`: peak memory reserved on the device, including CUDA graphs, if
    `is_device`; else peak resident memory of the process.
    """

    weight_bytes: dict[StageName, int]
    peak_bytes: int
    is_device: bool


class GpuResult(Result, frozen=True, kw_only=True):
    """Results of the device benchmark. `dtype`: weight type. `singles`: answers computed one at a
    time. `together`: answers computed at the same time. `rounded`: steps of the stages with
    experts, whose weights are in 8 bits. `ratios`: results with their targets, () at the small
    size.

    Units: `copy_bytes_per_s` counts bytes read and bytes written.
    """

    model: str
    small: bool
    device: str
    dtype: str
    build_s: float
    warm_up_s: float
    copy_bytes_per_s: float
    steps: tuple[StageSteps, ...]
    prefills: tuple[Prefill, ...]
    singles: tuple[SpeechRun, ...]
    together: SpeechRun
    published: tuple[PublishedRate, ...]
    published_source: str
    memory: MemoryUse
    ratios: tuple[Ratio, ...] = ()
    choices: tuple[MeasuredChoice, ...] = ()
    rounded: tuple[StageSteps, ...] = ()

    @property
    def first_audio_ms(self) -> float:
        """Median time to first audio over the answers computed one at a time."""
        return median([run.first_audio_s[0] for run in self.singles]) * MS

    def steps_of(self, stage: StageName) -> dict[int, StageSteps]:
        """Return a stage's steps by batch size, in ascending order."""
        return {
            each.batch: each
            for each in sorted(self.steps, key=lambda each: each.batch)
            if each.stage == stage
        }

    def tables(self) -> list[RenderableType]:
        size = "a small size of " if self.small else ""
        head = (
            f"{size}{self.model}, random weights, {self.dtype}, on {self.device}; built in "
            f"{self.build_s:.0f} s, "
        )
        return [
            Text(
                f"{head}warm after {self.warm_up_s:.0f} s; copies "
                f"{self.copy_bytes_per_s / GIGA:.0f} GB/s (read + written)"
            ),
            self._steps_table(
                "decode steps: as served and without a graph (medians), beside a copy of the bytes "
                "they read, which is the limit",
                self.steps,
            ),
            self._invariant_table(),
            *([self._steps_table(ROUNDED_TITLE, self.rounded)] if self.rounded else []),
            self._prefill_table(),
            self._speech_table(),
            self._memory_table(),
            *([self._choices_table()] if self.choices else []),
        ]

    def targets(self) -> Sequence[Ratio]:
        return self.ratios

    def _steps_table(self, title: str, steps: Sequence[StageSteps]) -> Group:
        columns = ("requests", "ms", "eager ms", "gain", "MB read", "copy ms", "of the limit")
        table = table_of("stage", *columns)
        for each in steps:
            num_bytes = each.weight_bytes + each.kv_bytes
            copied_ms = num_bytes / self.copy_bytes_per_s * MS if num_bytes else None
            share = each.share_of_limit(self.copy_bytes_per_s)
            table.add_row(
                each.stage,
                str(each.batch),
                figure(each.served_ms),
                figure(each.eager_ms),
                figure(each.graph_gain),
                figure(num_bytes / MIB if num_bytes else None),
                figure(copied_ms),
                NONE if share is None else f"{share:.0%}",
            )
        return titled(title, table)

    def _invariant_table(self) -> Group:
        table = table_of("stage", "requests", "ms", "speed")
        for each in self.steps:
            if each.invariant_s:
                table.add_row(
                    each.stage,
                    str(each.batch),
                    figure(each.invariant_ms),
                    figure(each.invariant_share),
                )
        return titled(
            "decode steps in invariant numerics (medians), and their speed relative to steps as "
            "served",
            table,
        )

    def _prefill_table(self) -> Group:
        table = table_of("rows of the prompt", *(str(each.rows) for each in self.prefills))
        table.add_row(
            "ms to the first token",
            *(figure(each.step_ms) for each in self.prefills),
        )
        return titled("prefill of one request (medians)", table)

    def _speech_table(self) -> Group:
        table = table_of("answers together", "first audio, ms", "audio s per s", "best published")
        published = {each.concurrency: each.audio_s_per_s for each in self.published}
        for run in (self.singles[-1], self.together):
            audio_ms = (
                self.first_audio_ms if run.concurrency == 1 else median(run.first_audio_s) * MS
            )
            best = NONE if self.small else figure(published.get(run.concurrency))
            table.add_row(
                str(run.concurrency),
                figure(audio_ms),
                figure(self.audio_rate(run.concurrency)),
                best,
            )
        return titled(
            f"speech, all stages in one process (best published: {self.published_source})", table
        )

    def audio_rate(self, concurrency: int) -> float:
        """Return the median seconds of audio per second, of 1 answer or of all together."""
        runs = self.singles if concurrency == 1 else (self.together,)
        return median([run.audio_s_per_s for run in runs])

    def _choices_table(self) -> Group:
        table = table_of("computation", "implementation", "ms, or why not", "chosen")
        for each in self.choices:
            outcome = each.outcome if isinstance(each.outcome, str) else figure(each.outcome)
            table.add_row(each.key, each.candidate, outcome, "yes" if each.is_chosen else "")
        return titled("implementations measured on this device at start", table)

    def _memory_table(self) -> Group:
        table = table_of("GiB", *self.memory.weight_bytes, "all weights", "peak")
        weights = self.memory.weight_bytes.values()
        values = (*weights, sum(weights), self.memory.peak_bytes)
        table.add_row(
            "device" if self.memory.is_device else "process",
            *(figure(value / GIB) for value in values),
        )
        return titled("memory", table)


def _conflict(options: BenchOptions) -> str:
    own = options.config or options.overrides or options.png
    if MEASUREMENT in options.chosen and (own or len(options.chosen) > 1):
        return (
            "--gpu measures a device without a fleet and without a picture: give it alone, or "
            "with --small, --json, --check"
        )
    return ""


MEASUREMENT = Measurement(
    place=145,
    key="gpu",
    run="fleet.lab.measure.gpu_run:measure_device",
    option="--gpu",
    help="measure the torch engine on this machine's GPU, without a fleet",
    has_small=True,
    conflict=_conflict,
    about={
        "--gpu": "the torch engine on this machine's GPU, without a fleet: the published size of "
        "the model with random weights, all stages in one process. Steps of each stage as a graph "
        "and without it at 1, 8 and 32 requests, beside the time that copying the bytes they read "
        "takes, and in invariant numerics; prompts; first audio; audio per second; memory; which "
        "implementations were measured and chosen; steps with experts in 8 bits. With --small the "
        "same on the CPU at a small size"
    },
)
