"""`fleet chaos`: a fleet of its own, loaded twice, struck the second time, and judged. Each step is a module of its own."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fleet.bench.chat import ChatApi
from fleet.bench.deployment import LOG_NAME, RESOLVED_NAME, TargetFleet, own_fleet, resolve_config
from fleet.chaos.clients import Gateways
from fleet.chaos.errors import ChaosError
from fleet.chaos.event_log import EventLog
from fleet.chaos.faults import FaultInjector, InjectedFault, gateway_words
from fleet.chaos.load import ChaosLoad, Outcome
from fleet.chaos.options import ChaosOptions, ChaosPlan, chaos_overrides, check
from fleet.chaos.plot import draw
from fleet.chaos.processes import Extras, free_port
from fleet.chaos.progress import Meter, meter
from fleet.chaos.report import Run, Verdict, judge, show, write_json
from fleet.chaos.requests import make_bodies
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, How
from fleet.chaos.schedule import draw as draw_blows
from fleet.chaos.watch import Residue, Watch
from fleet.config.settings import read_settings
from fleet.reporting.machine import describe_machine

EXTRAS_LOG = "chaos.log"
SILENCE_S = 5.0
"""Where gateways are frozen: a listener who hears nothing for so long asks another."""
SETTLE_S = 15.0
"""Beside a lease, in which workers say more than once what they hold: in this time a request's end reaches all who held it."""
SETTLE_POLL_S = 0.25
INTERRUPTED = 130
WIDTH = 120
"""Of tables that go to a file or a pipe, in characters."""


def run(given: ChaosOptions, command: tuple[str, ...]) -> int:
    """Returns the exit status: 0 if nothing was lost, differed or stayed. Raises: ChaosError, ConfigError, BenchError."""
    # Twice: what chaos adds is named by the graph's stages, which the deployment names.
    plain = resolve_config(given.config, given.overrides)
    config = resolve_config(given.config, chaos_overrides(plain, given.overrides))
    options = check(given, config)
    try:
        with _interrupted_by_sigterm():
            verdict = _run(options, command, kept_log=config.data_dir.absolute())
    except KeyboardInterrupt:
        print("fleet chaos: stopped before the end", file=sys.stderr)
        return INTERRUPTED
    show(verdict, Console() if Console().is_terminal else Console(width=WIDTH))
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


def _run(options: ChaosPlan, command: tuple[str, ...], kept_log: Path) -> Verdict:
    began, machine = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine()
    with meter() as progress:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, options.overrides) as target:
            started()
            config, model = target.config, ChatApi(target.url, read_settings().api_key).model()
            rig = Rig(target=target, options=options, progress=progress)
            asked = Run(
                began=began, command=command, machine=machine, model=model, numerics=config.numerics, seed=options.seed,
                requests=options.requests, concurrency=options.concurrency,
                replicas={str(role.name): role.replicas for role in config.roles()},
                standby={str(role.name): role.standby for role in config.roles() if role.standby},
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

    target: TargetFleet
    options: ChaosPlan
    progress: Meter

    def run(self, asked: Run) -> Verdict:
        config, options = self.target.config, self.options
        extras = Extras(config.data_dir / RESOLVED_NAME, config.data_dir / EXTRAS_LOG)
        with ExitStack() as stack:
            stack.callback(extras.stop)
            # `fleet up` starts one conductor and one gateway; a standby, and another gateway, are what takes over.
            extras.start([CONDUCTOR])
            urls = [self.target.url, *self._more_gateways(extras)]
            watch = stack.enter_context(closing(Watch(config, len(urls))))
            trail = stack.enter_context(closing(EventLog(config.redis_data_dir)))
            striker = FaultInjector(watch, trail, extras)
            self.progress.steps("the fleet becoming whole", None)
            if not striker.await_whole():
                raise ChaosError("the fleet did not become whole although nobody disturbed it")
            silence_s = SILENCE_S if GATEWAY in options.roles and How.STOP in options.hows else None
            gateways = Gateways(urls, read_settings().api_key, silence_s)
            bodies = make_bodies(asked.model, config, options)
            undisturbed = self._learn(gateways, bodies)
            disturbed, hits = self._disturb(gateways, undisturbed, bodies, striker)
            residue = self._settle(watch)
        return judge(asked, undisturbed.outcomes, disturbed, hits, options.kills, residue)

    def _more_gateways(self, extras: Extras) -> list[str]:
        """Addresses of gateways started beside the deployment's own."""
        if GATEWAY not in self.options.roles:
            return []
        port = free_port()
        extras.start(gateway_words(port))
        return [f"http://127.0.0.1:{port}"]

    def _learn(self, gateways: Gateways, bodies: list[bytes]) -> ChaosLoad:
        """Raises: ChaosError if the fleet loses a request that nobody disturbed."""
        options = self.options
        self._undisturbed("warm-up", gateways, bodies[: options.concurrency])
        return self._undisturbed(f"undisturbed requests, {options.concurrency} at a time", gateways, bodies)

    def _undisturbed(self, what: str, gateways: Gateways, bodies: list[bytes]) -> ChaosLoad:
        load = ChaosLoad(gateways, bodies)
        load.start(self.options.concurrency, self.progress.steps(what, len(bodies)), once=True)
        lost = next((outcome for outcome in load.finish() if outcome.lost), None)
        if lost:
            raise ChaosError(f"the fleet failed request {lost.request} although nobody disturbed it: {lost.lost}")
        return load

    def _disturb(
        self, gateways: Gateways, learnt: ChaosLoad, bodies: list[bytes], striker: FaultInjector
    ) -> tuple[list[Outcome], list[InjectedFault]]:
        options = self.options
        blows = draw_blows(options.seed, options.kills, options.roles, options.hows, options.spacing_s, options.halves)
        load = ChaosLoad(gateways, bodies, [learnt.learnt[request] for request in range(len(bodies))])
        struck = self.progress.steps(f"blows, under {options.concurrency} requests at a time", options.kills)

        def tell(hit: InjectedFault) -> None:
            struck()
            after = "not whole again" if hit.whole_s is None else f"whole again after {hit.whole_s:.1f} s"
            held = f"{len(hit.requests)} requests" + (", in a hand-off" if hit.in_hand_off else "")
            self.progress.say(f"{hit.at_s:6.1f} s  {hit.signal} {hit.victim} ({held}): {after}")

        try:
            load.start(options.concurrency, self.progress.steps("requests answered while struck", None))
            hits = striker.strike_all(blows, load.now_s, tell)
            self.progress.steps("the last answers", None)
            return load.finish(), hits
        finally:
            load.abandon()

    def _settle(self, watch: Watch) -> Residue:
        """What is still there after a while without requests.

        A request whose gateway died before it could tell its name is asked anew, and what it left waits to be taken over.
        """
        lease = self.target.config.lease
        patience_s = SETTLE_S + lease.worker_ttl_s + (lease.gateway_timeout_s if GATEWAY in self.options.roles else 0)
        pause, deadline_s = threading.Event(), time.monotonic() + patience_s
        while not (residue := watch.residue()).nothing and time.monotonic() < deadline_s:
            pause.wait(SETTLE_POLL_S)
        return residue
