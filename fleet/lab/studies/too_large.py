"""Study of a model that is too large for one process: does it answer when it is divided between
processes whose memory is limited, and at which speed?

Measured with a random model of 2.8 GB: memory and tokens per second of one process without a limit;
then, with a limit of 0.65 of its peak for each process, tokens per second or the failure of one
process, and tokens per second and memory of the processes that `plan_spans` divides the model
between. The limit is RLIMIT_DATA, which needs no rights: it counts private writable memory, to
which belong the files of weights as `transformers` maps them, in whole, whether or not they are
resident.

Targets: the plan of one process exceeds the limit by 1 MiB or more; under the limit one process
fails, or has at most half the speed of the spans; the resident weights of each process are within
2 % of the plan.

On 29 November 2026, on two cores that others used too (one run): with a limit of 2,018 MiB, which
the plan of one process exceeds by 1,143 MiB, one process could not load its weights; an anchor and
a span worker answered, and their resident weights were within 0.01 % of the plan.
"""

import tempfile
from pathlib import Path

import msgspec
from rich.console import Group

from fleet.config import FleetConfig
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.spans import (
    SpanModelSize,
    arranged,
    divisible_config,
    usable_cores,
    write_random,
)
from fleet.lab.measure.spans_process import SpanGroup, span_group
from fleet.lab.measure.spans_protocol import Answer, ProcessMemory, ReadMemory
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, at_most
from fleet.lab.report.tables import figure, table_of, titled
from fleet.spans.protocol.plan import ModelSizes, SpanPlan, plan_spans

LIMIT_SHARE = 0.65
SLOW_TARGET, PLAN_TARGET = 0.5, 0.02
MIB = 2**20
BUFFER_BYTES = 432 * MIB
"""Private writable memory of a process apart from its layers: libraries, threads and activations
(measured).
"""
LEAST_LIMIT_BYTES = 2 * BUFFER_BYTES
"""Least memory limit. With `--small`, a process is mostly libraries, and could not start with
`LIMIT_SHARE` of its peak.
"""
KV_PAGES = 96
LIMITS = ("limits.max_prompt_tokens=1024", "limits.max_answer_tokens=256")
LARGE = SpanModelSize(hidden=2048, layers=12, kv_heads=4, vocabulary=4096)
"""Model of 696 million parameters: 2.8 GB in float32, so that libraries are a small part of a
process's memory.
"""
SMALL = SpanModelSize(hidden=64, layers=4, kv_heads=1, vocabulary=1000)
WORK = Answer(num_requests=1, num_prompt=16, num_tokens=33)


class LimitedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the divided model, which runs under the memory limit. `planned_bytes`: planned
    weight size.
    """

    span: str
    planned_bytes: int
    memory: ProcessMemory

    @property
    def deviation(self) -> float:
        """Return the relative difference between resident and planned weight bytes."""
        return abs(self.memory.weight_files - self.planned_bytes) / self.planned_bytes


class TooLargeResult(Result, frozen=True, kw_only=True):
    """Memory and speed of the model in one process, and divided among processes with a memory
    limit.

    `whole`: memory of one process without a limit. `lacking_bytes`: bytes by which the plan of one
    process exceeds the limit. Units: speeds in tokens/s, of a single answer. `limited_speed`: speed
    of one process under the limit, 0 if it fails with the error `failure`.

    Memory columns of the table: planned weights, resident weights, other resident memory, peak of
    resident memory, and memory that counts for the limit.
    """

    model: str
    limit_bytes: int
    whole: ProcessMemory
    whole_speed: float
    lacking_bytes: int
    limited_speed: float
    failure: str
    processes: tuple[LimitedProcess, ...]
    spans_speed: float
    others_cores: float | None

    def tables(self) -> list[Group]:
        table = table_of("MiB", "planned", "resident", "other", "peak", "limited")
        rows = [("one process, no limit", None, self.whole)]
        rows += [
            (f"layers {each.span}", each.planned_bytes, each.memory) for each in self.processes
        ]
        for name, planned, memory in rows:
            values = (planned, memory.weight_files, memory.anonymous, memory.peak, memory.data)
            table.add_row(
                name, *(figure(None if value is None else value / MIB) for value in values)
            )
        speeds = table_of("", "tokens/s")
        speeds.add_row("one process, no limit", figure(self.whole_speed))
        speeds.add_row("one process, limited", figure(self.limited_speed or None))
        speeds.add_row("spans, limited", figure(self.spans_speed))
        failed = (
            f"one process with the limit fails: {self.failure}"
            if self.failure
            else "one process answers with the limit"
        )
        lacking = f"the plan of one process exceeds it by {self.lacking_bytes / MIB:.0f} MiB"
        limit = f"limit of {self.limit_bytes / MIB:.0f} MiB a process (RLIMIT_DATA); {lacking}"
        return [
            titled(f"{self.model}; {limit}", table),
            titled(f"speed of 1 request; {failed}", speeds),
        ]

    def targets(self) -> list[Ratio]:
        name, lacking_mib = "too large", self.lacking_bytes / MIB
        speed = self.limited_speed / self.spans_speed
        most = max(each.deviation for each in self.processes)
        return [
            at_least(f"{name}: plan of one process beyond the limit", lacking_mib, 1, "MiB"),
            at_most(f"{name}: one process / spans, both limited", speed, SLOW_TARGET),
            at_most(f"{name}: resident weights, off the plan by", most, PLAN_TARGET),
        ]


def measure_too_large(context: Context) -> TooLargeResult:
    """Measure one process without a limit; then one process, and a divided model, with a limit
    derived from the first one's peak. Raises: BenchError.
    """
    cores, step = usable_cores(), context.steps("a model too large for one process", 4)
    size = SMALL if context.options.small else LARGE
    with tempfile.TemporaryDirectory(prefix="fleet-bench-spans-") as name:
        folder, background_load = Path(name), BackgroundLoad()
        num_parameters = write_random(folder / "model", size)
        step()
        base = divisible_config(context, *LIMITS)
        alone_config = arranged(base, folder / "model", kv_pages=KV_PAGES)
        with span_group("whole", alone_config, 0, cores) as group:
            whole_speed = _speed(group)
            whole = _memory(group)[0]
        step()
        limit = max(int(LIMIT_SHARE * whole.peak), LEAST_LIMIT_BYTES)
        sizes = _sizes(folder / "model")
        alone, plan = (
            plan_spans(sizes, limit, workers, anchor_is_last=False) for workers in ([], [limit])
        )
        limited_speed, failure = _limited_speed(alone_config, cores, limit)
        step()
        spans = [str(each.span) for each in plan.spans]
        config = arranged(base, folder / "model", *spans, kv_pages=KV_PAGES)
        with span_group("spans", config, len(spans) - 1, cores, data_limit_bytes=limit) as group:
            spans_speed = _speed(group)
            memories = _memory(group)
        step()
        return TooLargeResult(
            model=f"{num_parameters / 1e6:.0f} million random parameters",
            limit_bytes=limit,
            whole=whole,
            whole_speed=whole_speed,
            lacking_bytes=alone.lacking_bytes,
            limited_speed=limited_speed,
            failure=failure,
            processes=_processes(plan, sizes, memories),
            spans_speed=spans_speed,
            others_cores=background_load.cores(),
        )


def _speed(group: SpanGroup) -> float:
    """Return the decode speed of an answer in tokens per second, measured after a warm-up
    answer.
    """
    group.anchor.run(WORK)
    reply = group.anchor.run(WORK)
    return reply.num_decoded / (reply.seconds - reply.prefill_s)


def _memory(group: SpanGroup) -> list[ProcessMemory]:
    memories = [process.run(ReadMemory()).memory for process in (group.anchor, *group.workers)]
    return [memory for memory in memories if memory is not None]


def _limited_speed(config: FleetConfig, cores: list[int], limit: int) -> tuple[float, str]:
    """Return the speed of one process under the limit, or 0 and the error message if it fails."""
    try:
        with span_group("limited", config, 0, cores, data_limit_bytes=limit) as group:
            return _speed(group), ""
    except BenchError as error:
        return 0.0, error.message


def _sizes(checkpoint: Path) -> ModelSizes:
    # Imported here: it needs torch.
    import torch

    from fleet.models.causal_lm.span_load import model_sizes

    return model_sizes(
        checkpoint, torch.float32, num_positions=16 * KV_PAGES, buffer_bytes=BUFFER_BYTES
    )


def _processes(
    plan: SpanPlan, sizes: ModelSizes, memories: list[ProcessMemory]
) -> tuple[LimitedProcess, ...]:
    found: list[LimitedProcess] = []
    for each, memory in zip(plan.spans, memories, strict=True):
        num_layers = each.span.final - each.span.first + 1
        planned = each.num_bytes - sizes.buffer_bytes - num_layers * sizes.kv_bytes
        found.append(LimitedProcess(span=str(each.span), planned_bytes=planned, memory=memory))
    return tuple(found)


MEASUREMENT = Measurement(
    place=90,
    key="too_large",
    run=measure_too_large,
    option="--too-large",
    help="measure spans of a model that is too large for one process",
    has_small=True,
    about={
        "--too-large": "a random model of 2.8 GB in one process without a limit of memory; then, "
        "with a limit of 0.65 of its peak for each process (RLIMIT_DATA), in one process, and "
        "divided as planned between two: tokens per second, and memory"
    },
)
