"""Hand-off benchmark: the time of a hand-off from a prefill worker to a decode worker, part by
part. Takes the stages from the graph.

Uses real processes and one request at a time, so that nothing queues. The timestamps come from the
requests' traces, as reported by the workers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from rich.console import Group

from fleet.core.hand_off import HandOff
from fleet.core.ids import StageName
from fleet.lab.client.client import ApiClient
from fleet.lab.measure.deployment import started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.measure.page_reads import PageReads
from fleet.lab.measure.prompts import PROMPTS
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.measure.split import split_stages, splitting_overrides, with_checkpoint
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.plot import Axes, Panel
from fleet.lab.report.result import PLAYED, Result
from fleet.lab.report.stats import Ratio, Summary, at_least, at_most, summarise
from fleet.lab.report.tables import cells_and_high, figure, table_of, titled

PARTS = (
    ("blocks copied or shared, task released", "prefilled_us", "handed_us"),
    ("claimed by the new owner", "handed_us", "claimed_us"),
    ("logs read", "claimed_us", "opened_us"),
    ("blocks pulled", "opened_us", "pulled_us"),
    ("input fed, blocks confirmed, adopted", "pulled_us", "confirmed_us"),
    ("first step begins", "confirmed_us", "resumed_us"),
)
"""Parts of a hand-off: (label, first timestamp, second timestamp)."""
MAX_TOKENS, FRAMES = 8, 8
"""Length limits of the answers: short, since only their beginning is measured."""
WARM_UP = 3
PAUSE_S = 0.02
"""Pause after an answer, in which processes release its resources."""
TARGET_P50_MS, PAGES_TARGET = 5.0, 0.5


class StageHandOffs(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-offs of one stage. `first`: hand-off of the first request, whose workers had not yet
    connected to each other.
    """

    stage: StageName
    hand_offs: tuple[HandOff, ...]
    first: HandOff | None

    @property
    def whole_ms(self) -> Summary | None:
        """Time from the end of the source's last step to the beginning of the new owner's first
        step.
        """
        return summarise([_ms(one, "prefilled_us", "resumed_us") for one in self.hand_offs])

    @property
    def first_ms(self) -> float | None:
        return _ms(self.first, "prefilled_us", "resumed_us") if self.first else None

    @property
    def parts_ms(self) -> dict[str, Summary | None]:
        return {
            name: summarise([_ms(one, begin, end) for one in self.hand_offs])
            for name, begin, end in PARTS
        }

    @property
    def num_recomputed(self) -> int:
        """Number of hand-offs whose KV blocks did not arrive in time and were recomputed."""
        return sum(one.confirmed_us is None for one in self.hand_offs)

    def table(self) -> Group:
        table = table_of("ms", "p50", "p95", "max")
        for name, part in self.parts_ms.items():
            table.add_row(name, *cells_and_high(part))
        table.add_section()
        table.add_row("last step to first step", *cells_and_high(self.whole_ms))
        table.add_row("first hand-off of the fleet", figure(self.first_ms), "", "")
        recomputed = f", {self.num_recomputed} recomputed" if self.num_recomputed else ""
        return titled(
            f"{len(self.hand_offs)} hand-offs of {self.stage} from prefill to decode{recomputed}",
            table,
        )

    def draw(self, axes: Axes) -> None:
        """Draw each hand-off as one bar, its parts from left to right; the shortest at the
        bottom.
        """
        for place, hand_off in enumerate(
            sorted(self.hand_offs, key=lambda one: (one.resumed_us or 0) - one.prefilled_us)
        ):
            for part, (_, begin, end) in enumerate(PARTS):
                left_ms, length_ms = _ms(hand_off, "prefilled_us", begin), _ms(hand_off, begin, end)
                if left_ms is not None and length_ms is not None:
                    axes.barh(place, length_ms, left=left_ms, height=1.0, color=f"C{part}")
        for part, (name, _, _) in enumerate(PARTS):
            axes.barh(0, 0, color=f"C{part}", label=name)
        axes.axvline(TARGET_P50_MS, color=PLAYED, linestyle="--", label="target for p50")
        axes.set(
            xlabel="ms since the source's last step",
            title=f"{len(self.hand_offs)} hand-offs of {self.stage}",
        )
        axes.set_yticks([])
        axes.legend(fontsize=7, loc="lower right")


class HandOffResult(Result, frozen=True, kw_only=True):
    """Hand-offs of each split stage. `others_cores`: mean number of CPU cores used by other
    processes. `pages`: speed of KV block reads, None if not measured.
    """

    stages: tuple[StageHandOffs, ...]
    others_cores: float
    pages: PageReads | None = None

    def tables(self) -> Iterator[Group]:
        yield from (stage.table() for stage in self.stages)
        if self.pages is not None:
            yield self.pages.table()

    def panels(self) -> list[Panel]:
        return [stage.draw for stage in self.stages]

    def targets(self) -> list[Ratio]:
        """Compare with their targets: each stage's median hand-off time, and the speed of
        block-wise reads relative to a plain read.
        """
        ratios = [
            at_most(f"hand-off p50, {stage.stage}", whole.p50, TARGET_P50_MS, "ms")
            for stage in self.stages
            if (whole := stage.whole_ms) is not None
        ]
        if self.pages is not None:
            ratios.append(at_least("KV blocks / plain read", self.pages.ratio, PAGES_TARGET))
        return ratios


def measure_hand_offs(context: Context) -> HandOffResult:
    """Start a split fleet and send `--hand-offs` requests; each split stage hands each request off
    once. KV block reads are measured first, since the fleet's processes would slow them.

    Raises: ApiError if a request fails, BenchError if its trace lacks a hand-off.
    """
    # Imported here: it needs torch.
    from fleet.lab.measure.kv_pages import measure_pages

    done = context.steps("reads of keys and values")
    pages = measure_pages()
    done()
    plain, count = context.resolve(), context.options.hand_offs
    given = with_checkpoint(plain, context.options.overrides)
    overrides = (*given, *splitting_overrides(plain))
    with started_fleet(context, "starting a split fleet", *overrides) as target:
        api = target.api
        model, bounds = api.model(), stage_bounds(target.config, MAX_TOKENS, FRAMES)
        bodies = [encode_call(model, prompt, target.config, bounds) for prompt in PROMPTS]
        stages = split_stages(target.config)
        step = context.steps("hand-offs, warm-up", WARM_UP)
        warm_up = _hand_offs(api, bodies, WARM_UP, stages, step)
        background_load, step = BackgroundLoad(), context.steps("hand-offs", count)
        measured = _hand_offs(api, bodies, count, stages, step)
        others_cores = background_load.cores()
    found = tuple(
        StageHandOffs(
            stage=stage,
            hand_offs=tuple(of_stage[stage] for of_stage in measured),
            first=warm_up[0][stage],
        )
        for stage in stages
    )
    return HandOffResult(stages=found, others_cores=others_cores, pages=pages)


def _hand_offs(
    api: ApiClient,
    bodies: Sequence[bytes],
    count: int,
    stages: Sequence[StageName],
    advance: Callable[[], None],
) -> list[Mapping[StageName, HandOff]]:
    """Send `count` requests one after another, and return the hand-offs from the trace of each, by
    stage.
    """
    measured: list[Mapping[StageName, HandOff]] = []
    for index in range(count):
        request_id = api.record_chat(bodies[index % len(bodies)]).request_id
        tasks = api.traced_request(request_id).tasks
        of_stage = {task.stage: task.hand_off for task in tasks if task.hand_off is not None}
        missing = [stage for stage in stages if stage not in of_stage]
        if missing:
            raise BenchError(f"the trace of {request_id} has no hand-off of {', '.join(missing)}")
        measured.append(of_stage)
        advance()
        time.sleep(PAUSE_S)
    return measured


def _ms(hand_off: HandOff, begin: str, end: str) -> float | None:
    """Return the time between two timestamps, or None if one is missing."""
    began_us, ended_us = getattr(hand_off, begin), getattr(hand_off, end)
    return None if began_us is None or ended_us is None else (ended_us - began_us) / 1000


MEASUREMENT = Measurement(
    place=40,
    key="hand_offs",
    run=measure_hand_offs,
    option="--hand-off",
    help="measure hand-offs from prefill to decode workers",
    about={
        "--hand-off": "prefill and decode in separate workers: from the last step of one to the "
        "first step of the next, part by part; and KV rows read block by block, compared with one "
        "plain read of as many bytes"
    },
    arguments=(
        argument(
            "--hand-offs",
            type=whole_number(),
            default=60,
            metavar="N",
            help="number of hand-offs of each split stage (60)",
        ),
    ),
)
