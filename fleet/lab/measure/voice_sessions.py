"""Benchmark of many concurrent voice sessions in real time, including one more session than the
gateway admits.

On the fake engine the fleet itself is measured: its stages produce audio at twice the pace of
speech, and compute nothing. The sessions run in this process, whose CPU time is reported
separately. Takes the stages from the graph.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from importlib import resources
from importlib.util import find_spec

import msgspec
import uvloop
from rich.console import Group
from rich.text import Text

from fleet.lab.client.client import ApiClient
from fleet.lab.measure.deployment import TargetFleet, target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import (
    BenchOptions,
    Context,
    Measurement,
    argument,
    whole_number,
)
from fleet.lab.measure.processes import CpuTimes, read_cpu
from fleet.lab.measure.voice import SILENCE_MS, TIMEOUT_S, SpokenQuestion, read_question
from fleet.lab.measure.voice_client import (
    EncodedSpeech,
    SessionResult,
    SessionTurn,
    VoiceClient,
)
from fleet.lab.measure.voice_format import PCM, TELEPHONE
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, at_most, percentile, summarise
from fleet.lab.report.tables import NONE, figure, table_of, titled

STEP_MS = 40
"""Step time of the fake engine. A step makes one frame of 80 ms, so audio has twice the pace of
speech.
"""
ANSWER_TOKENS, ANSWER_FRAMES = 16, 50
"""Length limits of an answer: four seconds of speech."""
CONSOLE_EACH = 4
"""Every `CONSOLE_EACH`-th session uses the console's socket; the others use the API's."""
GATEWAY = "web"
"""Name of the gateway's process."""
OPENING_S = 0.03
"""Time between the openings of successive sessions."""
RECORDING = ("fleet.lab.pocket", "docs/spoken.wav")


class QueuedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the session beyond the gateway's limit.

    `position`: place in the queue, None if none was reported. `early`: whether the session was
    admitted before another session had left. `admitted_ms`: time from the end of the first session
    that left to the admission, None if the session was not admitted.
    """

    position: int | None
    early: bool
    admitted_ms: float | None
    answered: bool

    def line(self) -> str:
        place = (
            "got no queue position"
            if self.position is None
            else f"got queue position {self.position}"
        )
        when = (
            "was admitted too early"
            if self.early
            else f"was admitted {figure(self.admitted_ms)} ms after another had left"
        )
        return (
            f"the session beyond the limit {place}, {when}, and was "
            f"{'answered' if self.answered else 'not answered'}"
        )


class VoiceSessionsResult(Result, frozen=True, kw_only=True):
    """Results of all voice sessions. `cores`: mean CPU cores used by each process of the fleet
    during `seconds` with all sessions active; empty for a fleet started elsewhere. `client_cores`:
    cores used by this process. `telephone`: whether the sessions speak and hear G.711 at 8 kHz.
    `webrtc`: whether they are calls over WebRTC. `queued`: the session beyond the limit, if there
    was one.
    """

    model: str
    engine: str
    telephone: bool
    webrtc: bool
    wanted_turns: int
    silence_ms: int
    sessions: tuple[SessionResult, ...]
    queued: QueuedSession | None
    seconds: float
    cores: dict[str, float]
    client_cores: float
    others_cores: float | None

    @property
    def turns(self) -> list[SessionTurn]:
        return [turn for session in self.sessions for turn in session.turns]

    @property
    def underruns(self) -> int:
        return sum(turn.underruns for turn in self.turns)

    @property
    def faults(self) -> list[str]:
        return [session.fault for session in self.sessions if session.fault]

    @property
    def late_ms(self) -> list[float]:
        return [late for turn in self.turns for late in turn.late_ms]

    @property
    def mic_late_ms(self) -> list[float]:
        return [late for session in self.sessions for late in session.mic_late_ms]

    @property
    def fleet_ms(self) -> list[float]:
        """Voice-to-voice latency of each turn without the end-of-turn silence."""
        return [turn.voice_to_voice_ms - self.silence_ms for turn in self.turns]

    @property
    def first_audio_ms(self) -> list[float]:
        """Time to the first audio of each answer, without the end-of-turn silence."""
        return [turn.first_audio_ms - self.silence_ms for turn in self.turns]

    @property
    def parts_ms(self) -> dict[str, list[float]]:
        parts: dict[str, list[float]] = {}
        for part in (part for turn in self.turns for part in turn.parts):
            parts.setdefault(part.name, []).append(part.ms)
        return parts

    @property
    def title(self) -> str:
        count = len(self.sessions)
        if self.webrtc:
            return f"{count} concurrent calls over WebRTC"
        kind = "telephone calls (G.711)" if self.telephone else "voice sessions"
        console = sum(session.console for session in self.sessions)
        return f"{count} concurrent {kind}, {console} of them on the console's socket"

    def tables(self) -> Iterator[Group | Text]:
        table = table_of("ms", "p50", "p95", "p99", "max")
        for name, samples in (
            (f"voice to voice, without {self.silence_ms} ms of silence", self.fleet_ms),
            ("  the same to the first audio, voiced or not", self.first_audio_ms),
            *((f"  {name}", samples) for name, samples in self.parts_ms.items()),
            ("audio after it was due (negative: before)", self.late_ms),
            ("microphones of this client late", self.mic_late_ms),
        ):
            if summary := summarise(samples):
                table.add_row(
                    name,
                    *map(figure, (summary.p50, summary.p95, percentile(samples, 99), summary.high)),
                )
        table.add_section()
        table.add_row("underruns", figure(self.underruns))
        for fault in dict.fromkeys(self.faults):
            table.add_row(f"ended early: {fault[:60]}", figure(self.faults.count(fault)))
        yield titled(f"{self.title}; {len(self.turns)} answers of the {self.engine} engine", table)
        if self.queued is not None:
            yield Text(self.queued.line())
        cores = table_of("CPU while all sessions were active", "cores")
        for name, used in sorted(self.cores.items(), key=lambda row: -row[1]):
            cores.add_row(name, f"{used:.2f}")
        cores.add_section()
        if (web := self.cores.get(GATEWAY)) is not None:
            cores.add_row(f"{GATEWAY}, for each session", f"{web / len(self.sessions):.4f}")
        cores.add_row("this client", f"{self.client_cores:.2f}")
        cores.add_row(
            "background load", f"{self.others_cores:.2f}" if self.others_cores is not None else NONE
        )
        yield titled(f"{self.seconds:.1f} s", cores)

    def targets(self) -> list[Ratio]:
        """Compare with targets: no underruns of playback, every question answered, and the session
        beyond the limit queued.
        """
        count, queued = len(self.sessions), self.queued
        unanswered = count * self.wanted_turns - len(self.turns)
        ratios = [
            at_most(f"underruns of {count} voice sessions", self.underruns, 0, "underruns"),
            at_most("questions not answered", unanswered, 0, "questions"),
        ]
        if queued is not None:
            admitted = (
                queued.position == 1
                and not queued.early
                and queued.admitted_ms is not None
                and queued.answered
            )
            ratios.append(at_least("extra session queued, then admitted", float(admitted), 1))
        return ratios


def own_overrides(context: Context) -> list[str]:
    """Return the overrides of a fleet started for this benchmark, which admits as many sessions as
    run. With `--engine fake` the fleet computes nothing, and has slots for every session's answers
    and transcriptions.

    Raises: ConfigError.
    """
    sessions = context.options.sessions
    limit = [f"voice.{name}={sessions}" for name in ("max_sessions", "max_calls")]
    if not context.options.engine:
        return limit
    result = ["engine=fake", "device=cpu", "transfer.kind=redis"]
    result.append(f"limits.max_requests={4 * sessions}")
    for stage in context.resolve().graph_declaration().stages:
        result.append(f"stages.{stage.name}.max_batch={4 * sessions}")
        if stage.default_sampling:
            rows = ANSWER_TOKENS if stage.main else ANSWER_FRAMES
            result += [
                f"stages.{stage.name}.extra.step_ms={STEP_MS}",
                f"stages.{stage.name}.sampling.max_tokens={rows}",
            ]
    return [*result, *limit]


def recorded_question() -> SpokenQuestion:
    """Return a spoken sentence that ships with Fleet, since a fleet on the fake engine cannot speak
    one.
    """
    package, name = RECORDING
    with resources.as_file(resources.files(package) / name) as path:
        return read_question(path)


def measure_voice_sessions(context: Context) -> VoiceSessionsResult:
    """Run `--sessions` sessions. If the fleet is started here, its limit is this number, and one
    more session is opened beyond the limit; with `--webrtc` there is no additional session.

    Raises: BenchError if a session cannot be opened, or a call needs a package that is missing.
    """
    options = context.options
    if options.webrtc and find_spec("aiortc") is None:
        raise BenchError(
            "--webrtc needs a package that is not installed here: pip install "
            "'fleet-serving[webrtc]'",
            param="--webrtc",
        )
    options.up = options.up or options.engine is not None
    questions = [read_question(path) for path in options.wavs] or [recorded_question()]
    own = own_overrides(context) if options.up else []
    with target_fleet(context, *own) as target:
        step = context.steps("voice sessions", options.sessions)
        return uvloop.run(_SessionRun(target, questions, options).measure(step))


NewClient = Callable[[int], VoiceClient]
"""Function that creates the client of a session by its number."""


def socket_clients(
    api: ApiClient, model: str, questions: Sequence[SpokenQuestion], options: BenchOptions
) -> NewClient:
    """Return the function that creates the clients of sessions over WebSockets."""
    form = TELEPHONE if options.telephone else PCM
    speech = {
        False: EncodedSpeech.of(questions, console=False, form=form),
        True: EncodedSpeech.of(questions, console=True),
    }

    def client(number: int) -> VoiceClient:
        console = not options.telephone and number % CONSOLE_EACH == CONSOLE_EACH - 1
        url = api.console_url() if console else api.realtime_url(model)
        return VoiceClient(url, api.headers, speech[console], model, console=console, seed=number)

    return client


def _callers(
    api: ApiClient, model: str, questions: Sequence[SpokenQuestion], _options: BenchOptions
) -> NewClient:
    from fleet.lab.measure.voice_call import WebRtcClient, opus_speech

    speech = opus_speech(questions)
    return lambda number: WebRtcClient(api, speech, model, seed=number)


async def await_open(
    clients: Sequence[VoiceClient], runs: Sequence[asyncio.Task[SessionResult]]
) -> None:
    """Wait until every session is open. `runs`: the task of each client. Raises: BenchError."""
    opened = asyncio.gather(*(client.opened.wait() for client in clients))
    first_end = asyncio.create_task(asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED))
    try:
        await asyncio.wait(
            [first_end, opened], return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S
        )
        if not opened.done():
            faults = [run.result().fault for run in runs if run.done()]
            raise BenchError(
                "not every session was opened: "
                f"{faults[0] if faults else f'waited {TIMEOUT_S:g} s'}"
            )
    finally:
        opened.cancel()
        first_end.cancel()


class _SessionRun:
    """All voice sessions of one run, on one event loop."""

    def __init__(
        self, target: TargetFleet, questions: Sequence[SpokenQuestion], options: BenchOptions
    ) -> None:
        self._target, self._options = target, options
        self._model = target.api.model()
        self._begin = asyncio.Event()
        clients = _callers if options.webrtc else socket_clients
        client = clients(target.api, self._model, questions, options)
        self._clients = [client(number) for number in range(options.sessions)]
        # A call that finds the gateway full is refused; it cannot wait in line.
        self._extra = client(0) if options.up and not options.webrtc else None

    async def measure(self, step: Callable[[], None]) -> VoiceSessionsResult:
        runs: list[asyncio.Task[SessionResult]] = []
        async with AsyncExitStack() as stack:
            stack.callback(lambda: [run.cancel() for run in runs])
            for client in self._clients:
                runs.append(asyncio.create_task(client.run(self._options.requests, self._begin)))
                runs[-1].add_done_callback(lambda _run: step())
                await asyncio.sleep(OPENING_S)
            await await_open(self._clients, runs)
            extra = asyncio.create_task(self._try_one_more(self._extra)) if self._extra else None
            background_load, before = BackgroundLoad(), read_cpu(self._target.pid)
            self._begin.set()
            await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            after, others = read_cpu(self._target.pid), background_load.cores()
            sessions = await asyncio.gather(*runs)
            queued = await extra if extra is not None else None
        return self._result(sessions, queued, before, after, others)

    async def _try_one_more(self, extra: VoiceClient) -> QueuedSession:
        """Open a session beyond the limit, which should be admitted once another session has left,
        and let it ask one question. Return what happened.
        """
        run = asyncio.create_task(extra.run(1, self._begin))
        leaving = [asyncio.create_task(client.left.wait()) for client in self._clients]
        await asyncio.wait({*leaving}, return_when=asyncio.FIRST_COMPLETED)
        early = extra.opened.is_set() and extra.opened_s < min(
            client.left_s for client in self._clients if client.left_s
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await extra.opened.wait()
        except TimeoutError:
            run.cancel()
            return QueuedSession(
                position=extra.position, early=early, admitted_ms=None, answered=False
            )
        first_left_s = min(
            (client.left_s for client in self._clients if client.left_s), default=extra.opened_s
        )
        result = await run
        admitted_ms = round((extra.opened_s - first_left_s) * 1e3, 1)
        return QueuedSession(
            position=extra.position,
            early=early,
            admitted_ms=admitted_ms,
            answered=len(result.turns) == 1,
        )

    def _result(
        self,
        sessions: Sequence[SessionResult],
        queued: QueuedSession | None,
        before: CpuTimes,
        after: CpuTimes,
        others: float,
    ) -> VoiceSessionsResult:
        seconds = after.at_s - before.at_s
        cores = {
            name: (after.cpu_s[name] - used) / seconds
            for name, used in before.cpu_s.items()
            if name in after.cpu_s
        }
        return VoiceSessionsResult(
            model=self._model,
            engine=self._target.config.engine,
            telephone=self._options.telephone,
            webrtc=self._options.webrtc,
            wanted_turns=self._options.requests,
            silence_ms=SILENCE_MS,
            sessions=tuple(sessions),
            queued=queued,
            seconds=seconds,
            cores={name: round(used, 3) for name, used in cores.items()},
            client_cores=round((after.own_s - before.own_s) / seconds, 3),
            others_cores=others if self._target.pid is not None else None,
        )


def _conflict(options: BenchOptions) -> str:
    if options.engine and (options.url or not options.sessions):
        return "--engine fake starts a fleet for --sessions N: give that, and no --url"
    for name in ("telephone", "webrtc"):
        if getattr(options, name) and (options.sessions or 1) == 1:
            return f"--{name} is a form of --sessions N: give that, with at least two"
    if options.telephone and options.webrtc:
        return "--webrtc has Opus in both directions: leave out --telephone"
    if options.sessions and options.barge_in:
        return "--barge-in measures one session: give --sessions in a run of its own"
    return ""


MEASUREMENT = Measurement(
    place=140,
    key="voice_sessions",
    run=measure_voice_sessions,
    is_requested=lambda options: (options.sessions or 1) > 1 and not options.voice_beside_batch,
    conflict=_conflict,
    of_gateway=True,
    about={},
    arguments=(
        argument(
            "--sessions",
            type=whole_number(),
            metavar="N",
            help="concurrent --voice sessions of --requests turns (1)",
        ),
        argument(
            "--engine",
            choices=["fake"],
            help="for --sessions: start a fleet that computes nothing",
        ),
        argument(
            "--telephone",
            action="store_true",
            help="for --sessions: all speak and hear G.711 (mu-law) at 8 kHz, as telephones do",
        ),
        argument(
            "--webrtc",
            action="store_true",
            help="for --sessions: all are calls over WebRTC, heard behind a buffer of 200 ms",
        ),
    ),
)
