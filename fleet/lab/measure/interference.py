"""Interference benchmark: how much long prompts delay running answers, with prefill and decode in
one worker and split.

Both fleets have equally many workers and the same load: answers stream all the time, at first
alone, then while long prompts arrive at a fixed rate, whether or not earlier ones are complete.
Only text is requested, so that only the stage that prefills the prompt is measured. Takes the
stages from the graph.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import msgspec
from rich.console import Group

from fleet.lab.client.chat import StreamRecording
from fleet.lab.measure.answer_timing import AnswerTiming, time_answer
from fleet.lab.measure.deployment import TargetFleet, resolve_config, started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.measure.split import (
    joining_overrides,
    num_workers,
    splitting_overrides,
    with_checkpoint,
)
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import FLEET, MS, OTHER, P95_ALPHA, PLAYED, Result
from fleet.lab.report.stats import Summary, summarise
from fleet.lab.report.tables import cells_and_high, figure, table_of, titled

TOGETHER, SPLIT = "together", "split"
MEDIA = ("text",)
STEADY_TOKENS = 256
LONG_TOKENS = 2
"""Answer length of a long prompt: short, since only the prefill interferes."""
UNDISTURBED_S = 5.0
PROBE_CHARACTERS = 2000
INTERVAL_FACTOR = 2.0
"""Interval between long prompts, divided by the duration of one long prompt without other load.
With 2, long prompts keep a worker half busy and never queue.
"""
NUM_ALONE = 3
COLORS = {TOGETHER: OTHER, SPLIT: FLEET}
UNDISTURBED_ALPHA = 0.35
LEAST_GAP_MS = 0.5


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Time between two successive text chunks of an answer, and the arrival of the second since the
    load began.
    """

    at_s: float
    gap_s: float


class LongPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A long prompt. `sent_s`: time of sending, since the load began. `first_text_s`: time from
    sending to the first text of the answer. `num_tokens`: length of the prompt.
    """

    sent_s: float
    first_text_s: float
    num_tokens: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one of the two fleets. `workers`: number of workers by role. `undisturbed`,
    `disturbed`: gaps before and while long prompts arrived. `others_cores`: mean number of CPU
    cores used by other processes.
    """

    name: str
    workers: dict[str, int]
    undisturbed: tuple[Gap, ...]
    disturbed: tuple[Gap, ...]
    long_prompts: tuple[LongPrompt, ...]
    others_cores: float

    @property
    def undisturbed_s(self) -> Summary | None:
        return summarise([gap.gap_s for gap in self.undisturbed])

    @property
    def disturbed_s(self) -> Summary | None:
        return summarise([gap.gap_s for gap in self.disturbed])

    @property
    def long_s(self) -> Summary | None:
        return summarise([prompt.first_text_s for prompt in self.long_prompts])

    def draw(self, axes: Axes, top_s: float) -> None:
        """Draw the gaps over time. `top_s`: upper end of the vertical axis."""
        color = COLORS[self.name]
        for gaps, alpha in ((self.undisturbed, UNDISTURBED_ALPHA), (self.disturbed, 1.0)):
            axes.plot(
                [gap.at_s for gap in gaps],
                [gap.gap_s * MS for gap in gaps],
                ".",
                color=color,
                markersize=2,
                alpha=alpha,
            )
        for prompt in self.long_prompts:
            axes.axvline(prompt.sent_s, color=PLAYED, linewidth=0.6, alpha=P95_ALPHA)
        axes.set(
            xlabel="s (lines: long prompts arrive)",
            ylabel="ms",
            title=f"gaps of running answers: {self.name}",
        )
        axes.set_ylim(0, top_s * MS * 1.05)


class Interference(Result, frozen=True, kw_only=True):
    """Results of both fleets. `num_streams`: number of answers streamed at a time. `num_tokens`:
    length of the longest long prompt. `interval_s`: time from one long prompt to the next.
    """

    num_streams: int
    num_tokens: int
    interval_s: float
    together: Side
    split: Side

    @property
    def ratio(self) -> float | None:
        """95th percentile of the gaps while long prompts arrive: split fleet relative to joined
        fleet.
        """
        split, together = self.split.disturbed_s, self.together.disturbed_s
        return split.p95 / together.p95 if split and together else None

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.together, self.split

    def tables(self) -> list[Group]:
        table = table_of("ms", "p50", "p95", "max")
        for name, summaries in (
            ("gaps, undisturbed", [side.undisturbed_s for side in self._sides]),
            ("gaps while long prompts arrive", [side.disturbed_s for side in self._sides]),
            ("first text of a long prompt", [side.long_s for side in self._sides]),
        ):
            for side, summary in zip(self._sides, summaries, strict=True):
                table.add_row(f"{name}, {side.name}", *cells_and_high(summary, MS))
            table.add_section()
        table.add_row("p95 of gaps while they arrive, split / together", "", figure(self.ratio), "")
        counts = {
            side.name: ", ".join(f"{count} {role}" for role, count in side.workers.items())
            for side in self._sides
        }
        workers = "; ".join(f"{name}: {count}" for name, count in counts.items())
        load = (
            f"{self.num_streams} running answers, prompts of {self.num_tokens} tokens every "
            f"{self.interval_s * MS:.0f} ms"
        )
        return [titled(f"{load}\n{workers}", table)]

    def panels(self) -> list[Panel]:
        top_s = max(gap.gap_s for side in self._sides for gap in side.disturbed)
        return [*(partial(side.draw, top_s=top_s) for side in self._sides), self._draw_shares]

    def background_loads(self) -> list[float]:
        return [side.others_cores for side in self._sides]

    def _draw_shares(self, axes: Axes) -> None:
        """Plot the share of gaps that are longer than each length, since the tail is what a
        listener notices.
        """
        for side in self._sides:
            for gaps, style, when in (
                (side.undisturbed, ":", "undisturbed"),
                (side.disturbed, "-", "long prompts"),
            ):
                lengths = sorted(gap.gap_s * MS for gap in gaps)
                shares = [1 - place / len(lengths) for place in range(len(lengths))]
                axes.step(
                    lengths, shares, style, color=COLORS[side.name], label=f"{side.name}, {when}"
                )
        axes.axhline(0.05, color=PLAYED, linewidth=0.6, linestyle="--")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="ms",
            ylabel="share of longer gaps",
            title="gaps of running answers",
        )
        axes.set_xlim(left=LEAST_GAP_MS)
        axes.legend(fontsize=7)
        axes.grid(alpha=0.25)


class _LongPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Length and interval of the long prompts, calibrated on the first fleet and used for both."""

    characters: int
    interval_s: float


def measure_interference(context: Context) -> Interference:
    """Measure a joined and a split fleet under the same load. Raises: BenchError if their numbers
    of workers differ, ApiError if a request fails.
    """
    options, plain = context.options, context.resolve()
    split = (*with_checkpoint(plain, options.overrides), *splitting_overrides(plain))
    whole = (*split, *joining_overrides(resolve_config(options.config, split)))
    counts = {num_workers(resolve_config(options.config, given)) for given in (whole, split)}
    if len(counts) > 1:
        raise BenchError(
            "the two fleets would not have as many workers; give `replicas` in one place only",
            param="--set",
        )
    prompts: _LongPrompts | None = None
    sides: list[Side] = []
    for name, overrides in ((TOGETHER, whole), (SPLIT, split)):
        label = f"starting a fleet, prefill and decode {name}"
        with started_fleet(context, label, *overrides) as target:
            load = _InterferenceLoad(target, context)
            prompts = prompts or load.calibrate()
            sides.append(load.run(name, prompts))
    assert prompts is not None
    return Interference(
        num_streams=options.concurrency,
        num_tokens=max(prompt.num_tokens for prompt in sides[0].long_prompts),
        interval_s=prompts.interval_s,
        together=sides[0],
        split=sides[1],
    )


class _InterferenceLoad:
    """Load on one fleet: streamed answers and long prompts."""

    def __init__(self, target: TargetFleet, context: Context) -> None:
        self._target, self._options = target, context.options
        self._steps = context.steps
        self._api = target.api
        self._model = self._api.model()
        self._steady = [self._body(prompt, STEADY_TOKENS) for prompt in PROMPTS]
        self._began_s = time.perf_counter()

    def calibrate(self) -> _LongPrompts:
        """Find the text length that gives the wanted number of tokens, and the time that such a
        prompt takes alone.
        """
        wanted, least = (
            self._options.prompt_tokens,
            self._ask(self._body("a", LONG_TOKENS)).num_prompt_tokens,
        )
        probe = self._ask(self._long(0, PROBE_CHARACTERS))
        characters = int(
            max(1, wanted - least) * PROBE_CHARACTERS / (probe.num_prompt_tokens - least)
        )
        took_s = [
            self._ask(self._long(number, characters)).done_s for number in range(NUM_ALONE + 1)
        ][1:]
        return _LongPrompts(
            characters=characters, interval_s=INTERVAL_FACTOR * sorted(took_s)[NUM_ALONE // 2]
        )

    def run(self, name: str, prompts: _LongPrompts) -> Side:
        """Stream answers all the time; send the long prompts from `UNDISTURBED_S` on. Return the
        results under `name`.
        """
        count, stop = self._options.concurrency, threading.Event()
        self._api.record_chat(self._long(0, prompts.characters))
        undisturbed = self._steps(f"{count} answers at a time, {name}")
        background_load = BackgroundLoad()
        self._began_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=count) as pool:
            streams = [pool.submit(self._stream, number, stop) for number in range(count)]
            try:
                _sleep_until(self._began_s + UNDISTURBED_S, streams)
                undisturbed()
                begins_s = time.perf_counter() - self._began_s
                long_prompts = self._send_long_prompts(
                    prompts, streams, self._steps(f"long prompts, {name}", self._options.requests)
                )
                ends_s = time.perf_counter() - self._began_s
            finally:
                stop.set()
            timings = [
                self._timing(recording) for stream in streams for recording in stream.result()
            ]
        gaps = [gap for timing in timings for gap in gaps_of(timing)]
        return Side(
            name=name,
            workers={role.name: role.replicas for role in self._target.config.roles()},
            undisturbed=tuple(gap for gap in gaps if gap.at_s < begins_s),
            disturbed=tuple(gap for gap in gaps if begins_s <= gap.at_s < ends_s),
            long_prompts=long_prompts,
            others_cores=background_load.cores(),
        )

    def _stream(self, number: int, stop: threading.Event) -> list[StreamRecording]:
        """Request one answer after another until `stop` is set; return their recordings."""
        recordings: list[StreamRecording] = []
        while not stop.is_set():
            body = self._steady[
                (number + len(recordings) * self._options.concurrency) % len(self._steady)
            ]
            recordings.append(self._api.record_chat(body))
        return recordings

    def _send_long_prompts(
        self,
        prompts: _LongPrompts,
        streams: Sequence["Future[list[StreamRecording]]"],
        advance: Callable[[], None],
    ) -> tuple[LongPrompt, ...]:
        """Send each long prompt at its scheduled time, whether or not the previous one is answered;
        wait for all answers and return their times.
        """
        began_s, answers = time.perf_counter(), list["Future[StreamRecording]"]()
        with ThreadPoolExecutor(max_workers=self._options.requests) as pool:
            for number in range(self._options.requests):
                _sleep_until(began_s + number * prompts.interval_s, streams)
                answers.append(
                    pool.submit(self._api.record_chat, self._long(number + 1, prompts.characters))
                )
                advance()
            timings = [self._timing(answer.result()) for answer in answers]
        return tuple(
            LongPrompt(
                sent_s=timing.sent_s,
                first_text_s=timing.text[0],
                num_tokens=timing.num_prompt_tokens,
            )
            for timing in timings
            if timing.text
        )

    def _ask(self, body: bytes) -> AnswerTiming:
        return self._timing(self._api.record_chat(body))

    def _timing(self, recording: StreamRecording) -> AnswerTiming:
        return time_answer(0, recording, self._began_s)

    def _long(self, number: int, characters: int) -> bytes:
        """Return the body of a request with a prompt of `characters` characters. No two prompts
        share a prefix, so that no cached prefix is used.
        """
        text = " ".join(PROMPTS)
        return self._body(
            (f"{number}. " + text * (characters // len(text) + 1))[:characters], LONG_TOKENS
        )

    def _body(self, prompt: str, max_tokens: int) -> bytes:
        bounds = stage_bounds(self._target.config, max_tokens, LONG_TOKENS)
        return encode_call(self._model, prompt, self._target.config, bounds, media=MEDIA)


def gaps_of(timing: AnswerTiming) -> list[Gap]:
    """Return the gaps between the text chunks of one answer."""
    pairs = zip(timing.text, timing.text[1:], strict=False)
    return [Gap(timing.sent_s + later_s, later_s - earlier_s) for earlier_s, later_s in pairs]


def _sleep_until(moment_s: float, streams: Sequence["Future[list[StreamRecording]]"]) -> None:
    """Sleep until `moment_s`. Raises: the error of a stream that fails meanwhile."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        ended = next((stream for stream in streams if stream.done()), None)
        if ended is not None:
            ended.result()
        time.sleep(min(left_s, 0.1))


MEASUREMENT = Measurement(
    place=50,
    key="interference",
    run=measure_interference,
    option="--interference",
    help="measure the delay that long prompts cause to running answers",
    about={
        "--interference": "gaps between the chunks of running answers while long prompts arrive: "
        "prefill and decode together, then split, with as many workers. --concurrency answers run "
        "all the time; --requests long prompts arrive"
    },
    arguments=(
        argument(
            "--prompt-tokens",
            type=whole_number(),
            default=4000,
            metavar="N",
            help="length of a long prompt (4000)",
        ),
    ),
)
