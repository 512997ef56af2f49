"""Many voice sessions at once, each speaking and listening in real time, one of them more than the gateway takes.

On the fake engine what is measured is the fleet itself: its stages make sound at twice the pace of speech, and compute nothing.
The sessions live in this process, whose CPU is not the fleet's and is told apart. Knows no stage.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import psutil
import uvloop

from fleet.bench.chat import ChatApi
from fleet.bench.deployment import TargetFleet, resolve_config
from fleet.bench.errors import BenchError
from fleet.bench.voice import PATIENCE_S, SILENCE_MS, SpokenQuestion, read_question
from fleet.bench.voice_client import EncodedSpeech, VoiceClient
from fleet.bench.voice_sessions_result import QueuedSession, SessionResult, VoiceSessionsResult
from fleet.reporting.background_load import BackgroundLoad

STEP_MS = 40
"""A frame of speech is 80 ms: twice as fast as it is heard."""
ANSWER_TOKENS, ANSWER_FRAMES = 16, 50
"""Four seconds of speech."""
CONSOLE_EACH = 4
"""Every so many sessions one is the console's; the others are the API's."""
OPENING_S = 0.03
"""From one session to the next: nobody's callers all come in the same moment."""
SETTLE_S = 1.0
RECORDING = ("fleet.pocket", "docs/spoken.wav")


def fake_overrides(config_file: Path | None, overrides: Sequence[str], sessions: int) -> tuple[str, ...]:
    """The options of a fleet that computes nothing, with slots for every session's answer and what it writes down.

    Raises: ConfigError.
    """
    words = [*overrides, "engine=fake", "device=cpu", "transfer.kind=redis", f"limits.max_requests={4 * sessions}"]
    stages = resolve_config(config_file, tuple(overrides)).graph_declaration().stages
    for stage in stages:
        words.append(f"stages.{stage.name}.max_batch={4 * sessions}")
        if stage.default_sampling:
            rows = ANSWER_TOKENS if stage.main else ANSWER_FRAMES
            words += [f"stages.{stage.name}.extra.step_ms={STEP_MS}", f"stages.{stage.name}.sampling.max_tokens={rows}"]
    return tuple(words)


def limited(sessions: int) -> tuple[str, ...]:
    """The option that leaves no room for one more."""
    return (f"voice.max_sessions={sessions}",)


def recorded_question() -> SpokenQuestion:
    """A spoken sentence that comes with us: a fleet that computes nothing cannot speak one."""
    package, name = RECORDING
    with resources.as_file(resources.files(package) / name) as path:
        return read_question(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`full`: whether the gateway takes so many sessions and not one more, which is then tried."""

    sessions: int
    turns: int
    full: bool


def measure_voice_sessions(
    target: TargetFleet, api: ChatApi, questions: Sequence[SpokenQuestion], plan: Plan, step: Callable[[], None]
) -> VoiceSessionsResult:
    """`step` is told of each session that is over. Raises: BenchError if no session comes about."""
    return uvloop.run(_Hall(target, api, questions, plan).measure(step))


class _Hall:
    """The sessions of one run, on one event loop."""

    def __init__(self, target: TargetFleet, api: ChatApi, questions: Sequence[SpokenQuestion], plan: Plan) -> None:
        self._target, self._plan = target, plan
        self._model = api.model()
        self._begin = asyncio.Event()
        frames = {console: EncodedSpeech.of(questions, console=console) for console in (False, True)}

        def caller(number: int) -> VoiceClient:
            console = number % CONSOLE_EACH == CONSOLE_EACH - 1
            url = api.console_url() if console else api.realtime_url(self._model)
            return VoiceClient(url, api.headers(), frames[console], self._model, console=console, seed=number)

        self._callers = [caller(number) for number in range(plan.sessions)]
        self._extra = caller(0)

    async def measure(self, step: Callable[[], None]) -> VoiceSessionsResult:
        jobs: list[asyncio.Task[SessionResult]] = []
        async with AsyncExitStack() as stack:
            stack.callback(lambda: [job.cancel() for job in jobs])
            for caller in self._callers:
                jobs.append(asyncio.create_task(caller.talk(self._plan.turns, self._begin)))
                jobs[-1].add_done_callback(lambda _job: step())
                await asyncio.sleep(OPENING_S)
            await self._until_open(jobs)
            beyond = asyncio.create_task(self._try_one_more()) if self._plan.full else None
            neighbours, before = BackgroundLoad(), _look(self._target.pid)
            self._begin.set()
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            after, others = _look(self._target.pid), neighbours.cores()
            talks = await asyncio.gather(*jobs)
            told = await beyond if beyond is not None else None
        return self._result(talks, told, before, after, others)

    async def _until_open(self, jobs: Sequence[asyncio.Task[SessionResult]]) -> None:
        opened = asyncio.gather(*(caller.opened.wait() for caller in self._callers))
        over = [asyncio.create_task(_end_of(jobs)), opened]
        try:
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
            if not opened.done():
                faults = [job.result().fault for job in jobs if job.done()]
                raise BenchError(f"not every session was opened: {faults[0] if faults else f'waited {PATIENCE_S:g} s'}")
        finally:
            for job in over:
                job.cancel()

    async def _try_one_more(self) -> QueuedSession:
        """It comes when all are taken, is let in once somebody has left, and asks one question."""
        extra = self._extra
        job = asyncio.create_task(extra.talk(1, self._begin))
        leaving = [asyncio.create_task(caller.left.wait()) for caller in self._callers]
        await asyncio.wait({*leaving}, return_when=asyncio.FIRST_COMPLETED)
        early = extra.opened.is_set() and extra.opened_s < min(caller.left_s for caller in self._callers if caller.left_s)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await extra.opened.wait()
        except TimeoutError:
            job.cancel()
            return QueuedSession(position=extra.position, early=early, let_in_ms=None, answered=False)
        first_left_s = min((caller.left_s for caller in self._callers if caller.left_s), default=extra.opened_s)
        talk = await job
        let_in_ms = round((extra.opened_s - first_left_s) * 1e3, 1)
        return QueuedSession(position=extra.position, early=early, let_in_ms=let_in_ms, answered=len(talk.turns) == 1)

    def _result(
        self, talks: Sequence[SessionResult], beyond: QueuedSession | None, before: "_Look", after: "_Look", others: float
    ) -> VoiceSessionsResult:
        seconds = after.at_s - before.at_s
        cores = {name: (after.cpu_s[name] - used) / seconds for name, used in before.cpu_s.items() if name in after.cpu_s}
        return VoiceSessionsResult(
            model=self._model, engine=self._target.config.engine, wanted_turns=self._plan.turns, silence_ms=SILENCE_MS,
            talks=tuple(talks), beyond=beyond, seconds=seconds, cores={name: round(used, 3) for name, used in cores.items()},
            driver_cores=round((after.own_s - before.own_s) / seconds, 3),
            others_cores=others if self._target.pid is not None else None,
        )  # fmt: skip


async def _end_of(jobs: Sequence[asyncio.Task[SessionResult]]) -> None:
    await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What only grows, at one moment. `cpu_s` by process of the fleet, where it is ours."""

    at_s: float
    own_s: float
    cpu_s: dict[str, float]


def _look(pid: int | None) -> _Look:
    own = psutil.Process().cpu_times()
    cpu_s: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True) if pid is not None else []:
        times = process.cpu_times()
        name = _name(process.cmdline())
        cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
    return _Look(at_s=time.monotonic(), own_s=own.user + own.system, cpu_s=cpu_s)


def _name(words: Sequence[str]) -> str:
    """`worker ROLE` of `python -m fleet.cli worker ROLE --config ...`."""
    if "fleet.cli" not in words:
        return Path(words[0]).name if words else "?"
    said = words[words.index("fleet.cli") + 1 :]
    return " ".join(word for word in said[:2] if not word.startswith("-"))
