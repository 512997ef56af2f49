"""Benchmark of many concurrent voice sessions in real time, one more than the gateway admits.

On the fake engine the fleet itself is measured: its stages produce audio at twice the pace of
speech, and compute nothing. The sessions run in this process, whose CPU is reported apart from the
fleet's. Knows no stage.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import psutil
import uvloop

from fleet.lab.measure.deployment import TargetFleet, resolve_config
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.options import BenchOptions
from fleet.lab.measure.voice import SILENCE_MS, TIMEOUT_S, SpokenQuestion, read_question
from fleet.lab.measure.voice_client import EncodedSpeech, VoiceClient
from fleet.lab.measure.voice_sessions_result import (
    QueuedSession,
    SessionResult,
    VoiceSessionsResult,
)
from fleet.lab.report.background_load import BackgroundLoad

STEP_MS = 40
"""Time of a step of the fake engine, which makes one frame of 80 ms: twice the pace of speech."""
ANSWER_TOKENS, ANSWER_FRAMES = 16, 50
"""Length of an answer: four seconds of speech."""
CONSOLE_EACH = 4
"""Every so many sessions one uses the console's socket; the others use the API's."""
OPENING_S = 0.03
"""Interval between the openings of two sessions."""
RECORDING = ("fleet.lab.pocket", "docs/spoken.wav")


def fake_overrides(
    config_file: Path | None, overrides: Sequence[str], sessions: int
) -> tuple[str, ...]:
    """Return the overrides of a fleet that computes nothing, with slots for every session's answers
    and transcriptions.

    Raises: ConfigError.
    """
    result = [
        *overrides,
        "engine=fake",
        "device=cpu",
        "transfer.kind=redis",
        f"limits.max_requests={4 * sessions}",
    ]
    for stage in resolve_config(config_file, tuple(overrides)).graph_declaration().stages:
        result.append(f"stages.{stage.name}.max_batch={4 * sessions}")
        if stage.default_sampling:
            rows = ANSWER_TOKENS if stage.main else ANSWER_FRAMES
            result += [
                f"stages.{stage.name}.extra.step_ms={STEP_MS}",
                f"stages.{stage.name}.sampling.max_tokens={rows}",
            ]
    return tuple(result)


def session_limit(sessions: int) -> tuple[str, ...]:
    """Return the override that admits so many sessions and no more."""
    return (f"voice.max_sessions={sessions}",)


def recorded_question() -> SpokenQuestion:
    """Return a spoken sentence that ships with Fleet, since a fleet that computes nothing cannot
    speak one.
    """
    package, name = RECORDING
    with resources.as_file(resources.files(package) / name) as path:
        return read_question(path)


def measure_voice_sessions(
    target: TargetFleet,
    questions: Sequence[SpokenQuestion],
    options: BenchOptions,
    step: Callable[[], None],
) -> VoiceSessionsResult:
    """Run `options.sessions`, and one more if the fleet was started here, since it then admits no
    more than those.

    `step` is called after the end of each. Raises: BenchError if a session cannot be opened.
    """
    return uvloop.run(_SessionRun(target, questions, options).measure(step))


class _SessionRun:
    """The sessions of one run, on one event loop."""

    def __init__(
        self, target: TargetFleet, questions: Sequence[SpokenQuestion], options: BenchOptions
    ) -> None:
        self._target, self._options = target, options
        api = target.api
        self._model = api.model()
        self._begin = asyncio.Event()
        speech = {
            console: EncodedSpeech.of(questions, console=console) for console in (False, True)
        }

        def client(number: int) -> VoiceClient:
            console = number % CONSOLE_EACH == CONSOLE_EACH - 1
            url = api.console_url() if console else api.realtime_url(self._model)
            return VoiceClient(
                url, api.headers, speech[console], self._model, console=console, seed=number
            )

        self._clients = [client(number) for number in range(options.sessions)]
        self._extra = client(0)

    async def measure(self, step: Callable[[], None]) -> VoiceSessionsResult:
        runs: list[asyncio.Task[SessionResult]] = []
        async with AsyncExitStack() as stack:
            stack.callback(lambda: [run.cancel() for run in runs])
            for client in self._clients:
                runs.append(asyncio.create_task(client.run(self._options.requests, self._begin)))
                runs[-1].add_done_callback(lambda _run: step())
                await asyncio.sleep(OPENING_S)
            await self._wait_until_open(runs)
            extra = asyncio.create_task(self._try_one_more()) if self._options.up else None
            background_load, before = BackgroundLoad(), _read_cpu(self._target.pid)
            self._begin.set()
            await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
            after, others = _read_cpu(self._target.pid), background_load.cores()
            sessions = await asyncio.gather(*runs)
            queued = await extra if extra is not None else None
        return self._result(sessions, queued, before, after, others)

    async def _wait_until_open(self, runs: Sequence[asyncio.Task[SessionResult]]) -> None:
        opened = asyncio.gather(*(client.opened.wait() for client in self._clients))
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

    async def _try_one_more(self) -> QueuedSession:
        """Open a session beyond the limit: it is admitted once another has left, and asks one
        question.
        """
        extra = self._extra
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
        before: "_CpuTimes",
        after: "_CpuTimes",
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
            wanted_turns=self._options.requests,
            silence_ms=SILENCE_MS,
            sessions=tuple(sessions),
            queued=queued,
            seconds=seconds,
            cores={name: round(used, 3) for name, used in cores.items()},
            client_cores=round((after.own_s - before.own_s) / seconds, 3),
            others_cores=others if self._target.pid is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CpuTimes:
    """CPU seconds used by this process and, where the fleet was started here, by each of its
    processes.
    """

    at_s: float
    own_s: float
    cpu_s: dict[str, float]


def _read_cpu(pid: int | None) -> _CpuTimes:
    own = psutil.Process().cpu_times()
    cpu_s: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True) if pid is not None else []:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            times, name = process.cpu_times(), _process_name(process.cmdline())
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
    return _CpuTimes(at_s=time.monotonic(), own_s=own.user + own.system, cpu_s=cpu_s)


def _process_name(command: Sequence[str]) -> str:
    """Return `worker ROLE` for `python -m fleet.cli worker ROLE --config ...`."""
    if "fleet.cli" not in command:
        return Path(command[0]).name if command else "?"
    arguments = command[command.index("fleet.cli") + 1 :]
    return " ".join(argument for argument in arguments[:2] if not argument.startswith("-"))
