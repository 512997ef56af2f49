"""Benchmark of open console pages beside live answers and voice sessions: what a page costs the
gateway and the network, and how soon it shows a new answer and a death.

The fleet computes nothing, and the pages are read as browsers read them, compressed, without being
drawn. Windows without and with pages alternate. Takes the stages from the graph.
"""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import cycle, islice

import httpx2
import uvloop
from rich.console import Group

from fleet.core.ids import WorkerId, place_of, role_of
from fleet.lab.measure.deployment import TargetFleet, started_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.measure.processes import CpuTimes, read_cpu
from fleet.lab.measure.prompts import pick
from fleet.lab.measure.serving import encode_call, stage_bounds
from fleet.lab.measure.voice_client import VoiceClient
from fleet.lab.measure.voice_sessions import GATEWAY, STEP_MS, recorded_question, socket_clients
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_most, summarise
from fleet.lab.report.tables import figure, summary_table, table_of, titled

ROOMS = ("now", "requests", "workers", "fleet", "incidents", "sessions", "queues", "logs")
"""Pages that are opened, in turn. `requests` lists answers, `now` and `workers` show deaths."""
DEATHS_ON = ("now", "workers")
DIED = "state-died"
"""Class by which a page marks a worker that died."""
LISTED = re.compile(r'<tr id="r-([^"]+)"')
NUM_SESSIONS = 8
TOKENS, FRAMES = 32, 125
"""Length limits of an answer: ten seconds of speech, which the fake engine makes in five."""
WINDOWS, WINDOW_S, SETTLE_S = 3, 10.0, 3.0
KILLS, PATIENCE_S, POLL_S = 3, 30.0, 0.1
MOST_CORE, MOST_KB_S, MOST_S = 0.05, 5.0, 1.0
TURNS = 1000
"""Turns of a voice session: more than it can take before the measurement ends."""


class ConsolePagesResult(Result, frozen=True, kw_only=True):
    """Results of all windows. `without_cores`, `with_cores`: CPU cores that the gateway used, by
    window. `kb_s`: kilobytes per second of one page, by room. `answers_s`: time from the submission
    of an answer until the list of answers had it; `deaths_s`: time from a kill until a page had it.
    """

    num_pages: int
    num_answers: int
    without_cores: tuple[float, ...]
    with_cores: tuple[float, ...]
    kb_s: dict[str, float]
    answers_s: tuple[float, ...]
    deaths_s: tuple[float, ...]
    others_cores: float

    @property
    def page_cores(self) -> float:
        """CPU cores of the gateway for each open page."""
        extra = sum(self.with_cores) / len(self.with_cores) - sum(self.without_cores) / len(
            self.without_cores
        )
        return extra / self.num_pages

    def tables(self) -> Iterator[Group]:
        title = (
            f"{self.num_pages} pages beside {self.num_answers} live answers and {NUM_SESSIONS} "
            "voice sessions"
        )
        rows = [
            ("a new answer in the list", summarise(self.answers_s)),
            ("a death on a page", summarise(self.deaths_s)),
        ]
        yield summary_table(f"{title}: shown after", "s", rows)
        cost = table_of("gateway", "cores")
        cost.add_row("without pages", figure(sum(self.without_cores) / len(self.without_cores)))
        cost.add_row("with pages", figure(sum(self.with_cores) / len(self.with_cores)))
        cost.add_row("for each page", figure(self.page_cores))
        yield titled(title, cost)
        sizes = table_of("page", "kB/s")
        for room, rate in self.kb_s.items():
            sizes.add_row(room, figure(rate))
        yield titled("received, compressed", sizes)

    def targets(self) -> list[Ratio]:
        return [
            at_most("gateway for an open page", self.page_cores, MOST_CORE, "cores"),
            at_most("largest page", max(self.kb_s.values()), MOST_KB_S, "kB/s"),
            at_most("a new answer in the list, latest", max(self.answers_s), MOST_S, "s"),
            at_most("a death on a page, latest", max(self.deaths_s), MOST_S, "s"),
        ]


class _OpenPage:
    """The event stream of one open page. `num_bytes`: received bytes, compressed. `listed`: times
    at which answers appeared after the page was opened; `died`: times of messages that mark a dead
    worker. Times are on `time.perf_counter`.
    """

    def __init__(self, room: str) -> None:
        self.room = room
        self.num_bytes = 0
        self.listed: dict[str, float] = {}
        self.died: list[float] = []
        self._rest = ""

    async def read(self, client: httpx2.AsyncClient) -> None:
        async with client.stream("GET", f"/console/live/{self.room}") as response:
            response.raise_for_status()
            async for text in response.aiter_text():
                self.num_bytes = response.num_bytes_downloaded
                self._note(text, time.perf_counter())

    def _note(self, text: str, at_s: float) -> None:
        """Note what complete lines of the stream show."""
        lines, newline, rest = text.rpartition("\n")
        if not newline:
            self._rest += text
            return
        seen, self._rest = self._rest + lines, rest
        if self.room == "requests":
            for request in LISTED.findall(seen):
                self.listed.setdefault(request, at_s)
        if DIED in seen:
            self.died.append(at_s)


class _LiveAnswers:
    """Live answers, each followed by the next one. `submitted`: times at which answers were
    submitted, by request, once they have ended.
    """

    def __init__(self, target: TargetFleet, num_answers: int) -> None:
        api, config = target.api, target.config
        model, bounds = api.model(), stage_bounds(config, TOKENS, FRAMES)
        self._api = api
        self._bodies = [encode_call(model, prompt, config, bounds) for prompt in pick(num_answers)]
        self._is_over = False
        self.submitted: dict[str, float] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=len(self._bodies)) as pool:
            runs = [loop.run_in_executor(pool, self._ask, body) for body in self._bodies]
            try:
                yield
            finally:
                self._is_over = True
                await asyncio.gather(*runs)

    def _ask(self, body: bytes) -> None:
        while not self._is_over:
            recording = self._api.record_chat(body, lambda: self._is_over)
            self.submitted[recording.request_id] = recording.sent_s


class _PagesRun:
    """The windows and kills of one run, beside the load."""

    def __init__(self, target: TargetFleet, context: Context) -> None:
        self._target, self._context = target, context
        self._num_pages: int = context.options.pages
        self._load = _LiveAnswers(target, context.options.answers)
        self._last_role = str(target.config.roles()[-1].name)
        self._num_bytes = Counter[str]()
        self._listed_s: list[float] = []

    async def measure(self) -> ConsolePagesResult:
        advance = self._context.steps("windows without and with pages", 2 * WINDOWS)
        without, beside = list[float](), list[float]()
        async with self._load.running(), self._speaking():
            background_load = BackgroundLoad()
            await asyncio.sleep(SETTLE_S)
            for _ in range(WINDOWS):
                without.append(await self._window())
                advance()
                beside.append(await self._window_with_pages())
                advance()
            deaths = await self._kill()
            others = background_load.cores()
        opened = self._rooms()
        return ConsolePagesResult(
            num_pages=self._num_pages,
            num_answers=self._context.options.answers,
            without_cores=tuple(without),
            with_cores=tuple(beside),
            kb_s={
                room: self._num_bytes[room] / opened.count(room) / WINDOWS / WINDOW_S / 1e3
                for room in dict.fromkeys(opened)
            },
            answers_s=tuple(self._listed_s),
            deaths_s=tuple(deaths),
            others_cores=others,
        )

    def _rooms(self) -> list[str]:
        return list(islice(cycle(ROOMS), self._num_pages))

    async def _window(self) -> float:
        """Return the CPU cores that the gateway uses for `WINDOW_S`."""
        before = await asyncio.to_thread(read_cpu, self._target.pid)
        await asyncio.sleep(WINDOW_S)
        after = await asyncio.to_thread(read_cpu, self._target.pid)
        return _gateway_cores(before, after)

    async def _window_with_pages(self) -> float:
        """Return the CPU cores of the gateway beside open pages, and note what the pages receive
        and when new answers are listed.
        """
        async with self._open_pages() as pages:
            await asyncio.sleep(SETTLE_S)
            before = [page.num_bytes for page in pages]
            opened_s = time.perf_counter()
            cores = await self._window()
            for page, earlier in zip(pages, before, strict=True):
                self._num_bytes[page.room] += page.num_bytes - earlier
        listed = [shown for page in pages for shown in page.listed.items()]
        submitted = self._load.submitted
        self._listed_s += [
            at_s - submitted[request]
            for request, at_s in listed
            if submitted.get(request, 0.0) > opened_s
        ]
        return cores

    @asynccontextmanager
    async def _open_pages(self) -> AsyncIterator[Sequence[_OpenPage]]:
        pages = [_OpenPage(room) for room in self._rooms()]
        headers = {**self._target.api.headers, "accept-encoding": "gzip"}
        async with httpx2.AsyncClient(
            base_url=self._target.url, headers=headers, timeout=None
        ) as client:
            readings = [asyncio.create_task(page.read(client)) for page in pages]
            try:
                yield pages
            finally:
                for reading in readings:
                    reading.cancel()
                await asyncio.gather(*readings, return_exceptions=True)

    @asynccontextmanager
    async def _speaking(self) -> AsyncIterator[None]:
        """Let `NUM_SESSIONS` voice sessions ask one question after another."""
        api = self._target.api
        new_client = socket_clients(api, api.model(), [recorded_question()], self._context.options)
        begin = asyncio.Event()
        clients: list[VoiceClient] = [new_client(number) for number in range(NUM_SESSIONS)]
        runs = [asyncio.create_task(client.run(TURNS, begin)) for client in clients]
        begin.set()
        try:
            yield
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _kill(self) -> list[float]:
        """Kill workers of the last role, one after another, and return after how long each page
        that shows deaths had it.
        """
        shown = list[float]()
        advance = self._context.steps("kills", KILLS)
        async with self._open_pages() as pages:
            watching = [page for page in pages if page.room in DEATHS_ON]
            for _ in range(KILLS):
                pid = await asyncio.to_thread(self._await_worker)
                await asyncio.sleep(SETTLE_S)
                killed_s = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                for page in watching:
                    shown.append(await _shown_at(page, killed_s) - killed_s)
                advance()
        return shown

    def _await_worker(self) -> int:
        """Return the process id of a worker of the last role that serves."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            workers = self._target.api.workers().data
            ready = [view.id for view in workers if view.state == "ready"]
            for worker in ready:
                if role_of(WorkerId(worker)) == self._last_role:
                    return place_of(WorkerId(worker))[1]
            time.sleep(POLL_S)
        raise BenchError(f"no {self._last_role} serves")


async def _shown_at(page: _OpenPage, killed_s: float) -> float:
    """Return when a page first marked a dead worker after `killed_s`. Raises: BenchError."""
    deadline_s = killed_s + PATIENCE_S
    while time.perf_counter() < deadline_s:
        for at_s in page.died:
            if at_s > killed_s:
                return at_s
        await asyncio.sleep(POLL_S)
    raise BenchError(f"the page {page.room} did not show a death within {PATIENCE_S:g} s")


def _gateway_cores(before: CpuTimes, after: CpuTimes) -> float:
    used = after.cpu_s[GATEWAY] - before.cpu_s[GATEWAY]
    return used / (after.at_s - before.at_s)


def fleet_overrides(context: Context) -> list[str]:
    """Return the overrides of a fleet that computes nothing and has a slot for every answer."""
    slots = context.options.answers + 4 * NUM_SESSIONS
    result = [
        *("engine=fake", "device=cpu", "transfer.kind=redis"),
        f"limits.max_requests={slots}",
        f"voice.max_sessions={NUM_SESSIONS}",
    ]
    for stage in context.resolve().graph_declaration().stages:
        result.append(f"stages.{stage.name}.max_batch={slots}")
        if stage.default_sampling:
            result.append(f"stages.{stage.name}.extra.step_ms={STEP_MS}")
    return result


def measure_console_pages(context: Context) -> ConsolePagesResult:
    """Run the benchmark in a fleet of its own. Raises: BenchError, ApiError."""
    overrides = (*context.options.overrides, *fleet_overrides(context))
    with started_fleet(context, "starting a fleet", *overrides) as target:
        return uvloop.run(_PagesRun(target, context).measure())


MEASUREMENT = Measurement(
    place=147,
    key="console_pages",
    run=measure_console_pages,
    option="--console",
    help="measure open pages of the console beside live answers",
    about={
        "--console": "what an open page costs the gateway and the network, and how soon it shows a "
        f"new answer and a death, beside --answers and {NUM_SESSIONS} voice sessions in a fleet of "
        "its own"
    },
    arguments=(
        argument(
            "--pages",
            type=whole_number(len(ROOMS)),
            default=2 * len(ROOMS),
            metavar="N",
            help=f"open pages of --console ({2 * len(ROOMS)})",
        ),
        argument(
            "--answers",
            type=whole_number(),
            default=64,
            metavar="N",
            help="live answers beside them (64)",
        ),
    ),
)
