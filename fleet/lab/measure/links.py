"""Measurement of a divided model over slow links: decode steps of three processes, each in a
network namespace of its own.

The links have a delay and carry all rows, since processes of different namespaces have no common
network, and the rows of a pass travel over TCP. Beside it: the same steps without the delay, and
messages of the same sizes over plain TCP on the same links.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.links_result import LinkedSteps, LinksResult
from fleet.lab.measure.namespaces import LinkedNamespaces, find_obstacle, linked_namespaces
from fleet.lab.measure.options import BenchOptions
from fleet.lab.measure.serving import Steps
from fleet.lab.measure.spans import (
    FULL,
    SMALL,
    SpanModelSize,
    divisible_config,
    shortened,
    write_config,
    write_random,
)
from fleet.lab.measure.spans_process import ProcessPlace, SpanGroup, span_group
from fleet.lab.measure.spans_protocol import Answer, SpanReply
from fleet.lab.measure.tcp_ring import RingPlace
from fleet.lab.report.background_load import BackgroundLoad
from fleet.process.parent_death import signalled_with_parent

NAMES = ("anchor", "first", "second")
DELAY_S = 0.01
ANCHOR_SPAN = "0:0"
DIVISIONS = {"logits return": ("1:1", "2:output"), "row returns": ("1:1", "2:2")}
PORT = 9000
RING_MODULE = "fleet.lab.measure.tcp_ring"
NUM_WARM_UP = 8
"""Rounds of messages that do not count: TCP sends larger bursts after each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksPlan:
    """The random model of three layers, and amounts of work."""

    size: SpanModelSize
    num_tokens: int
    num_rounds: int


FULL_PLAN = LinksPlan(size=replace(FULL.size, layers=3), num_tokens=65, num_rounds=3)
"""Rows of 4 KiB and logits of 125 KiB, which 32 steps at a time would multiply."""
SMALL_PLAN = LinksPlan(size=replace(SMALL.size, layers=3), num_tokens=9, num_rounds=1)


def measure_links(options: BenchOptions, steps: Steps) -> LinksResult:
    """Measure a random model that is written for the run. Raises: BenchError where no namespaces
    can be made, ConfigError.
    """
    if obstacle := find_obstacle():
        raise BenchError(f"--links needs network namespaces: {obstacle}", param="--links")
    plan = SMALL_PLAN if options.small else FULL_PLAN
    step = steps("rounds over slow links", len(DIVISIONS) * plan.num_rounds)
    with (
        tempfile.TemporaryDirectory(prefix="fleet-bench-links-") as temporary,
        linked_namespaces(*NAMES) as links,
    ):
        folder, base, background_load = Path(temporary), divisible_config(options), BackgroundLoad()
        num_parameters = write_random(folder / "model", plan.size)
        runs: list[LinkedRun] = []
        for name, workers in DIVISIONS.items():
            file = write_config(
                folder / f"{name.replace(' ', '-')}.yaml",
                base,
                folder / "model",
                (ANCHOR_SPAN, workers),
            )
            places = [ProcessPlace(links.command(each), links.address(each)) for each in NAMES]
            links.set_delay(DELAY_S)
            with span_group(file.stem, file, len(workers), [], places=places) as group:
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
    """The rounds of one division. `sizes`: bytes of a step on each link."""

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
        """Measure steps, then messages of their sizes."""
        self.group.anchor.ask(shortened(self._work))
        before = self._num_bytes()
        self.delayed.append(self.group.anchor.ask(self._work))
        num_passes = len(self.delayed[-1].passes)
        self.sizes = tuple(
            (now - earlier) // num_passes
            for now, earlier in zip(self._num_bytes(), before, strict=True)
        )
        self.tcp_s += self._time_messages()

    def measure_undelayed(self) -> None:
        """Measure steps without the delay: last, since TCP remembers how fast a link was."""
        self.links.set_delay(0.0)
        self.group.anchor.ask(shortened(self._work))
        self.undelayed.append(self.group.anchor.ask(self._work))
        self.num_equal = sum(reply.answers == self.undelayed[-1].answers for reply in self.delayed)

    @property
    def _work(self) -> Answer:
        # A prompt of one token: each pass is then one row.
        return Answer(num_requests=1, num_prompt=1, num_tokens=self.plan.num_tokens)

    def _num_bytes(self) -> list[int]:
        """Return the bytes that have crossed the link from each process to the next."""
        pairs = zip(NAMES, (*NAMES[1:], NAMES[0]), strict=True)
        return [sum(flow.num_bytes for flow in self.links.flows(*pair)) for pair in pairs]

    def _time_messages(self) -> list[float]:
        """Pass messages of the sizes of a step around, and return the time of each round. Raises:
        BenchError.
        """
        processes: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
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
                command = [
                    *self.links.command(name),
                    sys.executable,
                    "-m",
                    RING_MODULE,
                    msgspec.json.encode(place).decode(),
                ]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    preexec_fn=signalled_with_parent(signal.SIGKILL),
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                processes.append(process)
            output, _ = processes[0].communicate()
            if processes[0].returncode:
                raise BenchError("messages over plain TCP failed; the error is above")
            return msgspec.json.decode(output, type=list[float])[NUM_WARM_UP:]

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
