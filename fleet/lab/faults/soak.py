"""`fleet chaos --soak`: a fleet of its own on the fake engine, loaded for long, and what it
occupies at the end.

The fake engine computes nothing, so that the fleet itself is measured. Some clients leave before
the end of their answer, and workers and gateways are killed. What ended requests leave is retained
for a minute only, so that it is constant long before the first comparison.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count

from rich.console import Console

from fleet.config.settings import read_settings
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.event_log import EventLog
from fleet.lab.faults.faults import FaultInjector, InjectedFault, gateway_command
from fleet.lab.faults.options import SoakOptions, chaos_overrides
from fleet.lab.faults.processes import ExtraProcesses
from fleet.lab.faults.requests import make_soak_bodies
from fleet.lab.faults.schedule import CONDUCTOR, GATEWAY, Fault, FaultKind, draw_faults
from fleet.lab.faults.soak_load import SoakLoad
from fleet.lab.faults.soak_report import (
    SoakVerdict,
    changes_between,
    draw,
    has_passed,
    is_calm,
    show,
)
from fleet.lab.faults.soak_samples import FleetSampler
from fleet.lab.faults.watch import FleetWatch, Residue, own_redis_url
from fleet.lab.measure.deployment import RESOLVED_NAME, TargetFleet, own_fleet, resolve_config
from fleet.lab.report.files import check_report_folders, write_json
from fleet.lab.report.machine import describe_machine
from fleet.lab.report.progress import Meter, meter
from fleet.process.free_ports import free_port
from fleet.process.interrupts import interrupted_by_sigterm

RETENTION_S = 60
NUM_BODIES = 64
OVERRIDES = (
    "engine=fake",
    "device=cpu",
    "transfer.kind=redis",
    f"retention_s={RETENTION_S}",
    "lease.worker_ttl_s=5",
    "lease.conductor_ttl_s=5",
)
SAMPLES = 200
"""Number of samples of a run, about."""
MIN_INTERVAL_S = 0.5
ABORTS = 0.1
KILL_EVERY_S = 15.0
"""Pause between the recovery from a kill and the next, times 0.5 to 1.5."""
OVERTIME, OVERTIME_S = 1.5, 180.0
"""A run on a busy machine stops after so many times its duration, and so many seconds."""
SETTLE_S = 30.0
POLL_S = 0.2
INTERRUPTED = 130
WIDTH = 140


def run_soak(options: SoakOptions, command: tuple[str, ...]) -> int:
    """Run the soak and return the exit status. Raises: ApiError, BenchError, ChaosError,
    ConfigError.
    """
    check_report_folders(json=options.json, png=options.png)
    try:
        with interrupted_by_sigterm():
            verdict = _run(options, command)
    except KeyboardInterrupt:
        print("fleet chaos: stopped before the end", file=sys.stderr)
        return INTERRUPTED
    show(verdict, Console() if Console().is_terminal else Console(width=WIDTH))
    if options.json:
        write_json(verdict, options.json)
    if options.png:
        draw(verdict, options.png)
    return 1 if options.check and not verdict.passed else 0


def _run(options: SoakOptions, command: tuple[str, ...]) -> SoakVerdict:
    plain = resolve_config(options.config, (*OVERRIDES, *options.overrides))
    overrides = chaos_overrides(plain, (*OVERRIDES, *options.overrides))
    with meter("fleet chaos") as progress:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, overrides) as target:
            started()
            return _Soak(options, target, progress).run(command)


class _Soak:
    """One fleet under a soak, from ready to judged."""

    def __init__(self, options: SoakOptions, target: TargetFleet, progress: Meter) -> None:
        self._options, self._target, self._progress = options, target, progress
        self._kills: list[tuple[float, str]] = []
        self._pause = threading.Event()

    def run(self, command: tuple[str, ...]) -> SoakVerdict:
        options, config = self._options, self._target.config
        began, machine, redis_url = (
            time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            describe_machine(),
            own_redis_url(config),
        )
        extras = ExtraProcesses(config.data_dir / RESOLVED_NAME, config.data_dir / "chaos.log")
        with ExitStack() as stack:
            stack.callback(extras.stop)
            port = free_port()
            extras.start([CONDUCTOR])
            extras.start(gateway_command(port))
            urls = [self._target.url, f"http://127.0.0.1:{port}"]
            watch = stack.enter_context(closing(FleetWatch(config, len(urls), redis_url)))
            event_log = stack.enter_context(closing(EventLog(redis_url)))
            injector = FaultInjector(watch, event_log, extras)
            self._progress.steps("waiting until the fleet is complete", None)
            if not injector.wait_until_complete():
                raise ChaosError(
                    "the fleet did not become complete, although no fault was injected"
                )
            gateways = Gateways(urls, read_settings().api_key)
            bodies = make_soak_bodies(self._target.api.model(), config, options.seed, NUM_BODIES)
            load = SoakLoad(
                gateways,
                bodies,
                total=options.requests,
                duration_s=options.minutes * 60,
                aborts=ABORTS,
                seed=options.seed,
            )
            sampler = FleetSampler(
                redis_url,
                max(MIN_INTERVAL_S, options.minutes * 60 / SAMPLES),
                lambda: (load.now_s(), load.sent),
            )
            self._load(load, sampler, injector)
            seconds, residue = load.now_s(), self._settle(watch)
        changes, counts = changes_between(sampler.samples, load.sent), load.counts()
        complete = load.sent == options.requests
        return SoakVerdict(
            passed=complete and has_passed(counts, changes, residue),
            complete=complete,
            began=began,
            command=command,
            machine=machine,
            seed=options.seed,
            requests=load.sent,
            seconds=seconds,
            concurrency=options.concurrency,
            counts=counts,
            kills=tuple(self._kills),
            changes=changes,
            residue=residue,
            samples=tuple(sampler.samples),
        )

    def _load(self, load: SoakLoad, sampler: FleetSampler, injector: FaultInjector) -> None:
        load.start(self._options.concurrency, self._progress_of(load))
        sampler.start()
        try:
            kills = injector.inject_all(self._draw_kills(load), load.now_s, self._report)
            if any(kill.recovered_s is None for kill in kills):
                raise ChaosError(f"the fleet did not recover from the kill of {kills[-1].target}")
            while load.is_running and not self._is_late(load):
                self._pause.wait(POLL_S)
        finally:
            load.stop()
            sampler.stop()

    def _progress_of(self, load: SoakLoad) -> Callable[[], None]:
        """Return a function that advances the progress bar, and prints a line after every twentieth
        of the requests.
        """
        step, total, ended = (
            self._progress.steps("requests", self._options.requests),
            self._options.requests,
            count(1),
        )

        def advance() -> None:
            step()
            if (number := next(ended)) % (total // 20) == 0:
                self._progress.say(
                    f"{load.now_s():7.1f} s  {number} of {total} requests have ended"
                )

        return advance

    def _draw_kills(self, load: SoakLoad) -> Iterator[Fault]:
        """Yield kills of workers and gateways in turn while requests are sent, except in the calm
        parts.
        """
        roles = (*(str(role.name) for role in self._target.config.roles()), GATEWAY)
        spacing_s = min(KILL_EVERY_S, self._options.minutes * 60 / 20)
        rounds = (
            draw_faults(self._options.seed + turn, len(roles), roles, (FaultKind.KILL,), spacing_s)
            for turn in count()
        )
        for fault in (fault for one_round in rounds for fault in one_round):
            while load.is_running and is_calm(load.share_sent):
                self._pause.wait(POLL_S)
            if not load.is_running or self._is_late(load):
                return
            yield fault

    def _is_late(self, load: SoakLoad) -> bool:
        return load.now_s() > self._options.minutes * 60 * OVERTIME + OVERTIME_S

    def _report(self, fault: InjectedFault) -> None:
        self._kills.append((fault.at_s, fault.role))
        after = (
            "not recovered"
            if fault.recovered_s is None
            else f"recovered after {fault.recovered_s:.1f} s"
        )
        self._progress.say(f"{fault.at_s:7.1f} s  {fault.signal} {fault.target}: {after}")

    def _settle(self, watch: FleetWatch) -> Residue:
        """Return what is left after a while without requests."""
        self._progress.steps("waiting until no request is left", None)
        deadline_s = time.monotonic() + SETTLE_S + self._target.config.lease.gateway_timeout_s
        while not (residue := watch.residue()).is_empty and time.monotonic() < deadline_s:
            self._pause.wait(POLL_S)
        return residue
