"""`fleet chaos`: a fleet of its own, loaded twice, struck the second time, and judged. Each step is a module of its own."""

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from fleet.bench.chat import ChatApi, ChatBody
from fleet.bench.deployment import LOG_NAME, RESOLVED_NAME, Target, configured, own_fleet
from fleet.bench.machine import describe_machine
from fleet.bench.prompts import PROMPTS
from fleet.bench.serving import chat_of, stage_bounds
from fleet.chaos.blows import Hit, Striker
from fleet.chaos.errors import ChaosError
from fleet.chaos.load import Load, Outcome
from fleet.chaos.options import Given, Options, chaos_overrides, check
from fleet.chaos.plot import draw
from fleet.chaos.processes import Extras
from fleet.chaos.progress import Meter, meter
from fleet.chaos.report import Run, Verdict, judge, show, write_json
from fleet.chaos.schedule import CONDUCTOR
from fleet.chaos.schedule import draw as draw_blows
from fleet.chaos.watch import Residue, Watch
from fleet.config import FleetConfig
from fleet.config.settings import read_settings

EXTRAS_LOG = "chaos.log"
MAX_TOKENS, FRAMES = (12, 32), (40, 120)
"""Bounds of an answer, each request's drawn between them: long enough to be struck in the middle, short enough to be many."""
TEMPERATURE = 0.9
SETTLE_S = 15.0
"""Beside a lease, in which workers say three times what they hold: in this time the end of a request reaches all who held it."""
SETTLE_POLL_S = 0.25
INTERRUPTED = 130


def run(given: Given, command: tuple[str, ...]) -> int:
    """Returns the exit status: 0 if nothing was lost, differed or stayed. Raises: ChaosError, ConfigError, BenchError."""
    # Twice: what chaos adds is named by the graph's stages, which the deployment names.
    plain = configured(given.config, given.overrides)
    config = configured(given.config, chaos_overrides(plain, given.overrides))
    options = check(given, config)
    try:
        with _interrupted_by_sigterm():
            verdict = _run(options, command, kept_log=config.data_dir.absolute())
    except KeyboardInterrupt:
        print("fleet chaos: stopped before the end", file=sys.stderr)
        return INTERRUPTED
    show(verdict, Console())
    if options.json:
        write_json(verdict, options.json)
    if options.png:
        draw(verdict, options.png)
    return 0 if verdict.passed else 1


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Being told to stop must end as Ctrl-C does, with everything that was started stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: Options, command: tuple[str, ...], kept_log: Path) -> Verdict:
    began, machine = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine()
    with meter() as progress:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, options.overrides) as target:
            started()
            api = ChatApi(target.url, read_settings().api_key)
            rig = Rig(target=target, api=api, options=options, progress=progress)
            asked = Run(
                began=began, command=command, machine=machine, model=api.model(), numerics=target.config.numerics,
                seed=options.seed, requests=options.requests, concurrency=options.concurrency,
            )  # fmt: skip
            verdict = rig.run(asked)
            if not verdict.passed:
                _keep_log(target.config.data_dir, kept_log / f"chaos-{began[:19].replace(':', '')}.log", progress)
    return verdict


def _keep_log(folder: Path, path: Path, progress: Meter) -> None:
    """The fleet's folder is about to be removed, and its lines may say why."""
    logs = [folder / name for name in (LOG_NAME, EXTRAS_LOG)]
    path.write_bytes(b"".join(log.read_bytes() for log in logs if log.is_file()))
    progress.say(f"what the fleet's processes said is kept in {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """One fleet under test, from ready to judged."""

    target: Target
    api: ChatApi
    options: Options
    progress: Meter

    def run(self, asked: Run) -> Verdict:
        config, options = self.target.config, self.options
        extras = Extras(config.data_dir / RESOLVED_NAME, config.data_dir / EXTRAS_LOG)
        with closing(Watch(config)) as watch:
            try:
                # `fleet up` starts one conductor; a standby is what takes over.
                extras.start([CONDUCTOR])
                bodies = make_bodies(asked.model, config, options)
                undisturbed = self._learn(bodies)
                disturbed, hits = self._disturb(undisturbed, bodies, watch, extras)
                residue = self._settle(watch)
            finally:
                extras.stop()
        return judge(asked, undisturbed.outcomes, disturbed, hits, options.kills, residue)

    def _learn(self, bodies: list[bytes]) -> Load:
        """Raises: ChaosError if the fleet loses a request that nobody disturbed."""
        options = self.options
        warm_up = bodies[: options.concurrency]
        self._undisturbed("warm-up", warm_up)
        return self._undisturbed(f"undisturbed requests, {options.concurrency} at a time", bodies)

    def _undisturbed(self, what: str, bodies: list[bytes]) -> Load:
        load = Load(self.api, bodies)
        load.start(self.options.concurrency, self.progress.steps(what, len(bodies)), once=True)
        lost = next((outcome for outcome in load.finish() if outcome.lost), None)
        if lost:
            raise ChaosError(f"the fleet failed request {lost.request} although nobody disturbed it: {lost.lost}")
        return load

    def _disturb(self, learnt: Load, bodies: list[bytes], watch: Watch, extras: Extras) -> tuple[list[Outcome], list[Hit]]:
        options = self.options
        blows = draw_blows(options.seed, options.kills, options.roles, options.hows, options.spacing_s)
        load = Load(self.api, bodies, [learnt.learnt[request] for request in range(len(bodies))])
        striker = Striker(watch, extras, load.now_s)
        if not striker.await_whole():
            raise ChaosError("the fleet did not become whole although nobody disturbed it")
        struck = self.progress.steps(f"blows, under {options.concurrency} requests at a time", options.kills)

        def tell(hit: Hit) -> None:
            struck()
            after = "not whole again" if hit.whole_s is None else f"whole again after {hit.whole_s:.1f} s"
            self.progress.say(f"{hit.at_s:6.1f} s  {hit.signal} {hit.victim} ({hit.num_tasks} tasks): {after}")

        try:
            load.start(options.concurrency, self.progress.steps("requests answered while struck", None))
            hits = striker.strike_all(blows, tell)
            self.progress.steps("the last answers", None)
            return load.finish(), hits
        finally:
            load.abandon()

    def _settle(self, watch: Watch) -> Residue:
        """What is still there after a while without requests."""
        patience_s = SETTLE_S + self.target.config.lease.worker_s
        pause, deadline_s = threading.Event(), time.monotonic() + patience_s
        while not (residue := watch.residue()).nothing and time.monotonic() < deadline_s:
            pause.wait(SETTLE_POLL_S)
        return residue


def make_bodies(model: str, config: FleetConfig, options: Options) -> list[bytes]:
    """Spoken where the graph speaks; every other one greedy, the others drawn with a seed of their own; all from one seed."""
    rng = random.Random(options.seed)
    media = set(config.graph_declaration().media.values())
    bodies: list[bytes] = []
    for number in range(options.requests):
        bounds = stage_bounds(config, rng.randint(*MAX_TOKENS), rng.randint(*FRAMES))
        drawn = number % 2 == 1
        if drawn:
            bounds = {stage: {"max_tokens": given["max_tokens"]} for stage, given in bounds.items()}
        body = ChatBody(
            model=model,
            messages=chat_of(rng.choice(PROMPTS)),
            modalities=sorted(media, reverse=True),
            audio={"format": "pcm16"} if "audio" in media else None,
            temperature=TEMPERATURE if drawn else 0.0,
            seed=rng.randrange(2**31),
            fleet=bounds,
        )
        bodies.append(msgspec.json.encode(body))
    return bodies
