"""Study of a divided model over slow links: decode steps of three processes, each in a network
namespace of its own.

The links have a delay and carry all hidden states, since processes in different namespaces have no
common network. For comparison, the study measures the same steps without the delay, and messages of
the same sizes over plain TCP on the same links.

On 27 November 2026, on two cores that others used too, with 113 million random parameters and links
of 10 ms (medians of one run): a step whose logits return (125 KiB) took 74 ms, of which 32 ms
computation, 1.02 times plain TCP (42 ms) beyond it; with a hidden state that returns (4 KiB) 63 ms,
29 ms and 1.05 times 33 ms.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Group

from fleet.lab.measure.calls import ProcessCall, ProcessSettings
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.spans import (
    FULL,
    SMALL,
    SpanModelSize,
    arranged,
    divisible_config,
    shortened,
    write_random,
)
from fleet.lab.measure.spans_process import ProcessPlace, SpanGroup, span_group
from fleet.lab.measure.spans_protocol import Answer, SpanReply
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import MS, Result
from fleet.lab.report.stats import Ratio, at_most, differing, median
from fleet.lab.report.tables import figure, table_of, titled
from fleet.lab.studies.namespaces import LinkedNamespaces, find_obstacle, linked_namespaces
from fleet.lab.studies.tcp_ring import RingPlace

NAMES = ("anchor", "first", "second")
DELAY_S = 0.01
ANCHOR_SPAN = "0:0"
DIVISIONS = {"logits return": ("1:1", "2:output"), "row returns": ("1:1", "2:2")}
PORT = 9000
RING = "fleet.lab.studies.tcp_ring:run_rounds"
NUM_WARM_UP = 8
"""Number of uncounted rounds of messages at the start, after each of which TCP sends larger
bursts.
"""


NETWORK_TARGET = 1.2
KIB = 1024


class LinkedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Decode steps of one request through all processes, and messages of the same sizes over plain
    TCP on the same links.

    `step_s`: durations over the links; `undelayed_s`: durations without the delay. `hop_s`: the
    part of each step during which no process computed. `tcp_s`: durations of the rounds of
    messages. `sizes`: bytes of a step on each link, in the order of the processes.
    """

    name: str
    step_s: tuple[float, ...]
    hop_s: tuple[float, ...]
    undelayed_s: tuple[float, ...]
    tcp_s: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def computed_s(self) -> float:
        """Median over the steps of the computation time of all processes together."""
        return median([step - hop for step, hop in zip(self.step_s, self.hop_s, strict=True)])

    @property
    def share(self) -> float:
        """Step time minus computation time, relative to plain TCP; all are medians."""
        return (median(self.step_s) - self.computed_s) / median(self.tcp_s)


class LinksResult(Result, frozen=True, kw_only=True):
    """Decode steps over slow links, for each division of the model.

    `delay_ms`: delay of a link, one way. `num_equal` of `num_answers` answers equal the answers
    computed without the delay.
    """

    model: str
    delay_ms: float
    steps: tuple[LinkedSteps, ...]
    num_equal: int
    num_answers: int
    others_cores: float | None

    def tables(self) -> list[Group]:
        table = table_of("ms, p50", "step", "computed", "plain TCP", "ratio", "no delay", "KiB")
        for each in self.steps:
            medians = [median(each.step_s), each.computed_s, median(each.tcp_s)]
            sizes = " + ".join(figure(size / KIB) for size in each.sizes)
            cells = [*(figure(value * MS) for value in medians), figure(each.share)]
            table.add_row(each.name, *cells, figure(median(each.undelayed_s) * MS), sizes)
        same = f"{self.num_equal} of {self.num_answers} answers are those without the delay"
        return [
            titled(f"{self.model}; decode of 1 over links of {self.delay_ms:g} ms; {same}", table)
        ]

    def targets(self) -> list[Ratio]:
        times = [
            at_most(f"{each.name}: step minus computed / plain TCP", each.share, NETWORK_TARGET)
            for each in self.steps
        ]
        return [*times, differing(self.num_equal, self.num_answers)]

    def background_loads(self) -> list[float | None]:
        return [self.others_cores]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksPlan:
    """Size of the random model of three layers, and amounts of work."""

    size: SpanModelSize
    num_tokens: int
    num_rounds: int


FULL_PLAN = LinksPlan(size=replace(FULL.size, layers=3), num_tokens=65, num_rounds=3)
"""Hidden states of 4 KiB and logits of 125 KiB per step; a larger batch would multiply both."""
SMALL_PLAN = LinksPlan(size=replace(SMALL.size, layers=3), num_tokens=9, num_rounds=1)


def measure_links(context: Context) -> LinksResult:
    """Measure a random model that is written for the run. Raises: BenchError if no namespaces can
    be made; ConfigError.
    """
    if obstacle := find_obstacle():
        raise BenchError(f"--links needs network namespaces: {obstacle}", param="--links")
    plan = SMALL_PLAN if context.options.small else FULL_PLAN
    step = context.steps("rounds over slow links", len(DIVISIONS) * plan.num_rounds)
    with (
        tempfile.TemporaryDirectory(prefix="fleet-bench-links-") as folder,
        linked_namespaces(*NAMES) as links,
    ):
        model, base, background_load = Path(folder), divisible_config(context), BackgroundLoad()
        num_parameters = write_random(model, plan.size)
        runs: list[LinkedRun] = []
        for name, workers in DIVISIONS.items():
            config = arranged(base, model, ANCHOR_SPAN, *workers)
            places = [ProcessPlace(links.command(each), links.address(each)) for each in NAMES]
            links.set_delay(DELAY_S)
            with span_group(name, config, len(workers), [], places=places) as group:
                runs.append(LinkedRun(name, links, group, plan))
                runs[-1].measure(step)
        return LinksResult(
            model=f"{num_parameters / 1e6:.0f} million random parameters",
            delay_ms=1e3 * DELAY_S,
            steps=tuple(run.result() for run in runs),
            num_equal=sum(run.num_equal for run in runs),
            num_answers=len(runs) * plan.num_rounds,
            others_cores=background_load.cores(),
        )


@dataclass(slots=True)
class LinkedRun:
    """Measurement of one division of the model, in rounds. `sizes`: bytes of a step on each
    link.
    """

    name: str
    links: LinkedNamespaces
    group: SpanGroup
    plan: LinksPlan
    sizes: tuple[int, ...] = ()
    num_equal: int = 0
    delayed: list[SpanReply] = field(default_factory=list[SpanReply])
    undelayed: list[SpanReply] = field(default_factory=list[SpanReply])
    tcp_s: list[float] = field(default_factory=list[float])

    def measure(self, step: Callable[[], None]) -> None:
        for _ in range(self.plan.num_rounds):
            self.measure_round()
            step()
        self.measure_undelayed()

    def measure_round(self) -> None:
        """Measure decode steps, then TCP messages of the same sizes."""
        self.group.anchor.run(shortened(self._work))
        before = self._num_bytes()
        self.delayed.append(self.group.anchor.run(self._work))
        num_passes = len(self.delayed[-1].passes)
        self.sizes = tuple(
            (now - earlier) // num_passes
            for now, earlier in zip(self._num_bytes(), before, strict=True)
        )
        self.tcp_s += self._time_messages()

    def measure_undelayed(self) -> None:
        """Measure decode steps without the delay. Runs last, since TCP remembers how fast a link
        was.
        """
        self.links.set_delay(0.0)
        self.group.anchor.run(shortened(self._work))
        self.undelayed.append(self.group.anchor.run(self._work))
        self.num_equal = sum(reply.answers == self.undelayed[-1].answers for reply in self.delayed)

    @property
    def _work(self) -> Answer:
        # A prompt of one token: each pass is then one row.
        return Answer(num_requests=1, num_prompt=1, num_tokens=self.plan.num_tokens)

    def _num_bytes(self) -> list[int]:
        """Return the number of bytes carried so far on the link from each process to the next."""
        pairs = zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)
        return [sum(flow.num_bytes for flow in self.links.flows(*pair)) for pair in pairs]

    def _time_messages(self) -> list[float]:
        """Pass messages with the sizes of a decode step around the ring of processes; return the
        time of each round. Raises: BenchError.
        """
        with ExitStack() as stack:
            calls: list[ProcessCall] = []
            for number, name in enumerate(NAMES):
                following = NAMES[(number + 1) % len(NAMES)]
                place = RingPlace(
                    own=(self.links.address(name), PORT),
                    following=(self.links.address(following), PORT),
                    num_received=self.sizes[number - 1],
                    num_sent=self.sizes[number],
                    num_rounds=NUM_WARM_UP + self.plan.num_tokens,
                    begins=number == 0,
                )
                settings = ProcessSettings(command=self.links.command(name))
                process = ProcessCall(RING, place, settings=settings)
                calls.append(stack.enter_context(process))
            return calls[0].receive(list[float])[NUM_WARM_UP:]

    def result(self) -> LinkedSteps:
        def steps_of(replies: list[SpanReply]) -> tuple[float, ...]:
            return tuple(
                after - sent
                for reply in replies
                for sent, after in zip(reply.sent_s, reply.sent_s[1:], strict=False)
            )

        return LinkedSteps(
            name=self.name,
            step_s=steps_of(self.delayed),
            undelayed_s=steps_of(self.undelayed),
            tcp_s=tuple(self.tcp_s),
            hop_s=tuple(hop for reply in self.delayed for hop in reply.hop_s[:-1]),
            sizes=self.sizes,
        )


MEASUREMENT = Measurement(
    place=100,
    key="links",
    run=measure_links,
    option="--links",
    help="measure decode steps of spans over slow links, as root",
    has_small=True,
    about={
        "--links": "decode steps of a model divided between three processes, in network namespaces "
        "whose links have a delay of 10 ms, and are made for the run (Linux, as root): the time "
        "beyond the computation, beside messages of the same sizes over plain TCP on these links"
    },
)
