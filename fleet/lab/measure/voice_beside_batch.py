"""Live voice beside a batch: first sound of spoken answers, without and with a batch of chat lines
that the fleet answers in the background.

Rounds without and with a batch alternate, so that the machine's drift is in both. A batch that ends
is followed by the next one at once, so that the voice sessions are never without one. Takes the
stages from the graph.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import uvloop
from rich.console import Group
from rich.text import Text

from fleet.lab.measure.deployment import TargetFleet, started_fleet
from fleet.lab.measure.measurement import BenchOptions, Context, Measurement, argument, whole_number
from fleet.lab.measure.running_batches import RunningBatches, batch_lines
from fleet.lab.measure.voice import SILENCE_MS, read_question
from fleet.lab.measure.voice_client import SessionResult, SessionTurn
from fleet.lab.measure.voice_sessions import (
    OPENING_S,
    NewClient,
    await_open,
    own_overrides,
    recorded_question,
    socket_clients,
)
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, Summary, at_least, at_most, summarise
from fleet.lab.report.tables import summary_table

ROUNDS = 2
SESSIONS = 2
MOST_RATIO = 1.1


class SpokenTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Voice sessions of all rounds without a batch, or of all rounds beside a batch."""

    sessions: tuple[SessionResult, ...] = ()

    @property
    def turns(self) -> list[SessionTurn]:
        return [turn for session in self.sessions for turn in session.turns]

    @property
    def voiced_ms(self) -> Summary | None:
        """Time to the first voiced sample of each answer, without the end-of-turn silence."""
        return summarise([turn.voice_to_voice_ms - SILENCE_MS for turn in self.turns])

    @property
    def first_audio_ms(self) -> Summary | None:
        return summarise([turn.first_audio_ms - SILENCE_MS for turn in self.turns])

    @property
    def part_names(self) -> list[str]:
        return list(dict.fromkeys(part.name for turn in self.turns for part in turn.parts))

    def part_ms(self, name: str) -> Summary | None:
        return summarise(
            [part.ms for turn in self.turns for part in turn.parts if part.name == name]
        )

    def rows(self, kind: str) -> Iterator[tuple[str, Summary | None]]:
        """Yield the rows of a table. `kind`: label of the rounds, such as `alone`."""
        yield f"first voiced sample, {kind}", self.voiced_ms
        yield f"  first audio, voiced or not, {kind}", self.first_audio_ms
        for name in self.part_names:
            yield f"  {name}, {kind}", self.part_ms(name)


class VoiceBesideBatch(Result, frozen=True, kw_only=True):
    """Spoken turns without a batch (`alone`) and beside a batch (`beside`). `num_answered`: number
    of batch lines answered during the `beside_s` seconds in which sessions ran beside a batch.
    """

    model: str
    engine: str
    wanted_turns: int
    num_lines: int
    num_answered: int
    beside_s: float
    alone: SpokenTurns
    beside: SpokenTurns
    others_cores: float

    def tables(self) -> Iterator[Group | Text]:
        rows = [*self.alone.rows("alone"), *self.beside.rows("beside a batch")]
        title = (
            f"{len(self.alone.turns)} spoken turns alone and {len(self.beside.turns)} beside "
            f"batches of {self.num_lines} lines, {self.model}, {self.engine} engine"
        )
        yield summary_table(title, f"ms after {SILENCE_MS} ms of silence", rows)
        lines_per_s = self.num_answered / self.beside_s
        yield Text(f"{self.num_answered} lines answered beside voice, {lines_per_s:.1f} per second")
        for fault in self.faults:
            yield Text(f"ended early: {fault}")

    @property
    def faults(self) -> list[str]:
        sessions = (*self.alone.sessions, *self.beside.sessions)
        return [session.fault for session in sessions if session.fault]

    def targets(self) -> list[Ratio]:
        """Compare with targets: the time to the first sound beside a batch relative to the time
        without, every question answered, and at least one batch line answered meanwhile.
        """
        num_turns = len(self.alone.turns) + len(self.beside.turns)
        ratios = [
            at_most("questions not answered", self.wanted_turns - num_turns, 0, "questions"),
            at_least("lines answered beside voice", self.num_answered, 1, "lines"),
        ]
        alone, beside = self.alone.voiced_ms, self.beside.voiced_ms
        if alone is None or beside is None:
            return ratios
        pairs = ("p50", beside.p50 / alone.p50), ("p95", beside.p95 / alone.p95)
        return [
            *(at_most(f"first sound, batch / alone, {name}", x, MOST_RATIO) for name, x in pairs),
            *ratios,
        ]


class _BatchRounds:
    """All rounds on one fleet."""

    def __init__(self, target: TargetFleet, options: BenchOptions) -> None:
        self._api = target.api
        self._engine = target.config.engine
        self._options = options
        self._model = self._api.model()
        questions = [read_question(path) for path in options.wavs] or [recorded_question()]
        self._new_client = socket_clients(self._api, self._model, questions, options)
        lines = batch_lines(self._model, options.lines, options.max_tokens)
        self._batches = RunningBatches(self._api, lines)
        self._num_answered = 0
        self._beside_s = 0.0

    def measure(self, advance: Callable[[], None]) -> VoiceBesideBatch:
        """Run one turn of each session as warm-up, then all rounds."""
        uvloop.run(talk(self._new_client, self._options.sessions, 1))
        background_load = BackgroundLoad()
        alone, beside = list[SessionResult](), list[SessionResult]()
        for _ in range(ROUNDS):
            alone += self._talk()
            advance()
            with self._batches.running():
                beside += self._talk_beside()
            advance()
        return VoiceBesideBatch(
            model=self._model,
            engine=self._engine,
            wanted_turns=2 * ROUNDS * self._options.sessions * self._options.requests,
            num_lines=self._options.lines,
            num_answered=self._num_answered,
            beside_s=round(self._beside_s, 1),
            alone=SpokenTurns(sessions=tuple(alone)),
            beside=SpokenTurns(sessions=tuple(beside)),
            others_cores=background_load.cores(),
        )

    def _talk(self) -> Sequence[SessionResult]:
        options = self._options
        return uvloop.run(talk(self._new_client, options.sessions, options.requests))

    def _talk_beside(self) -> Sequence[SessionResult]:
        num_before, began_s = self._batches.num_answered(), time.monotonic()
        sessions = self._talk()
        self._beside_s += time.monotonic() - began_s
        self._num_answered += self._batches.num_answered() - num_before
        return sessions


async def talk(new_client: NewClient, num_sessions: int, num_turns: int) -> Sequence[SessionResult]:
    """Run voice sessions concurrently and return their results; an error within a session is part
    of its result. Raises: BenchError if a session cannot be opened.
    """
    clients = [new_client(number) for number in range(num_sessions)]
    begin = asyncio.Event()
    runs: list[asyncio.Task[SessionResult]] = []
    try:
        for client in clients:
            runs.append(asyncio.create_task(client.run(num_turns, begin)))
            await asyncio.sleep(OPENING_S)
        await await_open(clients, runs)
        begin.set()
        return await asyncio.gather(*runs)
    finally:
        for run in runs:
            run.cancel()


def measure_voice_beside_batch(context: Context) -> VoiceBesideBatch:
    """Start a fleet, and measure its voice sessions without and with a batch. Sets a default for
    `sessions` in the options. Raises: BenchError, ApiError.
    """
    options = context.options
    options.sessions = options.sessions or SESSIONS
    overrides = (*options.overrides, *own_overrides(context))
    with started_fleet(context, "starting a fleet", *overrides) as target:
        advance = context.steps("rounds of voice, alone and beside a batch", 2 * ROUNDS)
        return _BatchRounds(target, options).measure(advance)


def _conflict(options: BenchOptions) -> str:
    if not options.voice_beside_batch:
        return ""
    if options.webrtc or options.telephone or options.barge_in:
        return "--voice-beside-batch has sessions over WebSockets: leave out the other form"
    return ""


MEASUREMENT = Measurement(
    place=141,
    key="voice_beside_batch",
    run=measure_voice_beside_batch,
    option="--voice-beside-batch",
    help="measure voice sessions alone, and beside a batch of chat lines",
    conflict=_conflict,
    about={
        "--voice-beside-batch": "first sound of --sessions voice sessions (2) of --requests turns, "
        "in a fleet of its own: alone, then beside a batch of --lines chat lines of --max-tokens, "
        "which the fleet answers in the background; rounds alternate"
    },
    arguments=(
        argument(
            "--lines",
            type=whole_number(),
            default=1000,
            metavar="N",
            help="lines of a batch (1000)",
        ),
    ),
)
