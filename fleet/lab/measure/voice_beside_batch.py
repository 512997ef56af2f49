"""Live voice beside a batch: first sound of spoken answers, without and with a batch of chat lines
that the fleet answers in the background.

Rounds without and with a batch alternate, so that the machine's drift is in both. A batch that ends
is followed by the next one at once, so that the voice sessions are never without one. Takes the
stages from the graph.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import uvloop
from rich.console import Group
from rich.text import Text

from fleet.lab.client.chat import ChatCall, ChatMessage
from fleet.lab.client.client import ApiClient, BatchState
from fleet.lab.measure.deployment import TargetFleet, started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import BenchOptions, Context, Measurement, argument, whole_number
from fleet.lab.measure.prompts import PROMPTS
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
POLL_S, SETTLE_S = 0.5, 120.0
MOST_RATIO = 1.1
URL = "/v1/chat/completions"


class SpokenTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Voice sessions of all rounds of one kind."""

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
        """Yield the rows of a table. `kind`: name of the rounds."""
        yield f"first voiced sample, {kind}", self.voiced_ms
        yield f"  first audio, voiced or not, {kind}", self.first_audio_ms
        for name in self.part_names:
            yield f"  {name}, {kind}", self.part_ms(name)


class VoiceBesideBatch(Result, frozen=True, kw_only=True):
    """Spoken turns without a batch and beside one. `num_answered`: lines of batches answered while
    the sessions of the rounds with a batch were open, in `beside_s`.
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
        """Compare the first sounds of both kinds of rounds; every question must be answered, and
        the batch must go on beside them.
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


def batch_lines(model: str, num_lines: int, max_tokens: int) -> bytes:
    """Return an input file of chat lines, no two of which begin alike."""
    lines = (
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": URL,
            "body": ChatCall(
                model=model,
                messages=(
                    ChatMessage(role="user", content=f"{number}: {PROMPTS[number % len(PROMPTS)]}"),
                ),
                max_tokens=max_tokens,
            ),
        }
        for number in range(num_lines)
    )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class RunningBatches:
    """Batches of the same lines, one after the other."""

    def __init__(self, api: ApiClient, lines: bytes) -> None:
        self._api = api
        self._lines = lines
        self._ids: list[str] = []
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run batches during the block, which begins with the first answer; then cancel the last
        one, and wait for its end. Raises: ApiError, BenchError.
        """
        self._stop.clear()
        self._start()
        self._wait(lambda batch: batch.request_counts.completed > 0, "answered a line of a batch")
        with ThreadPoolExecutor(max_workers=1) as pool:
            following = pool.submit(self._follow)
            try:
                yield
            finally:
                self._stop.set()
            following.result()
        if not self._latest().has_ended:
            self._api.cancel_batch(self._ids[-1])
            self._wait(lambda batch: batch.has_ended, "ended a cancelled batch")

    def num_answered(self) -> int:
        """Return the number of answered lines of all batches."""
        return sum(self._api.batch(each).request_counts.completed for each in self._ids)

    def _start(self) -> None:
        self._ids.append(self._api.start_batch(self._lines, URL).id)

    def _latest(self) -> BatchState:
        """Return the latest batch. Raises: BenchError if lines of it have failed."""
        batch = self._api.batch(self._ids[-1])
        if batch.status != "cancelled" and (
            batch.request_counts.failed or batch.status in ("failed", "expired")
        ):
            raise BenchError(
                f"the batch {batch.id} is {batch.status}, and {batch.request_counts.failed} of its "
                "lines have an error; its error file tells why"
            )
        return batch

    def _follow(self) -> None:
        """Start the next batch when one ends, until the block is over."""
        while not self._stop.wait(POLL_S):
            if self._latest().has_ended:
                self._start()

    def _wait(self, is_reached: Callable[[BatchState], bool], what: str) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while not is_reached(self._latest()):
            if time.monotonic() > deadline_s:
                raise BenchError(
                    f"the fleet has not {what} within {SETTLE_S:g} s; does `fleet jobs` run?"
                )
            time.sleep(POLL_S)


class _Run:
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
    """Run voice sessions at one time and return their results. Raises: BenchError if one of them
    cannot be opened.
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
    """Measure voice sessions of a fleet of this run, without and with a batch. Raises: BenchError,
    ApiError.
    """
    options = context.options
    options.sessions = options.sessions or SESSIONS
    overrides = (*options.overrides, *own_overrides(context))
    with started_fleet(context, "starting a fleet", *overrides) as target:
        advance = context.steps("rounds of voice, alone and beside a batch", 2 * ROUNDS)
        return _Run(target, options).measure(advance)


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
