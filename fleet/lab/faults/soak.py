"""`fleet chaos --soak`: loads its own fleet on the fake engine for long, and compares what the
fleet occupies at the end with earlier.

The fake engine computes nothing, so that the fleet itself is measured. Some clients leave before
the end of their answer, and workers and gateways are killed. The state of ended requests is
retained for a minute only, so that its size is constant long before the first comparison.
"""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.faults import FaultInjector, InjectedFault
from fleet.lab.faults.fleet_under_test import fleet_under_test
from fleet.lab.faults.options import ChaosOptions, chaos_overrides
from fleet.lab.faults.requests import make_soak_bodies
from fleet.lab.faults.schedule import GATEWAY, Fault, FaultKind, draw_faults
from fleet.lab.faults.soak_load import SoakLoad
from fleet.lab.faults.soak_report import SoakVerdict, changes_between, has_passed, is_calm
from fleet.lab.faults.soak_samples import FleetSampler
from fleet.lab.measure.deployment import TargetFleet, own_fleet, resolve_config
from fleet.lab.report.machine import describe_machine
from fleet.lab.report.progress import Meter, meter

RETENTION_S = 60
USUAL_MINUTES = 20.0
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
"""Approximate number of resource samples of a run."""
MIN_INTERVAL_S = 0.5
KILL_EVERY_S = 15.0
"""Longest mean pause between the recovery from a kill and the next kill; the actual pause is 0.5 to
1.5 times the mean.
"""
OVERTIME, OVERTIME_S = 1.5, 180.0
"""A run on a busy machine stops after `OVERTIME` times its planned duration plus `OVERTIME_S`."""
SETTLE_S = 30.0
POLL_S = 0.2


def run_soak(options: ChaosOptions, command: tuple[str, ...]) -> SoakVerdict:
    """Run the soak and return its verdict. Raises: ApiError, BenchError, ChaosError,
    ConfigError.
    """
    overrides = (*OVERRIDES, *options.overrides)
    overrides = chaos_overrides(resolve_config(options.config, overrides), overrides)
    with meter("fleet chaos") as progress:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, overrides) as target:
            started()
            return _Soak(options, target, progress).run(command)


class _Soak:
    """A soak run, from the start of the fleet to the verdict."""

    def __init__(self, options: ChaosOptions, target: TargetFleet, progress: Meter) -> None:
        assert options.soak is not None, "checked before"
        self._options = options
        self._total = options.soak
        self._duration_s = (options.minutes or USUAL_MINUTES) * 60
        self._target = target
        self._progress = progress
        self._kills: list[tuple[float, str]] = []
        self._pause = threading.Event()

    def run(self, command: tuple[str, ...]) -> SoakVerdict:
        options, config = self._options, self._target.config
        began, machine = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine()
        with fleet_under_test(self._target, self._progress, second_gateway=True) as fleet:
            load = SoakLoad(
                fleet.gateways,
                make_soak_bodies(fleet.model, config, options.seed, NUM_BODIES),
                total=self._total,
                duration_s=self._duration_s,
                seed=options.seed,
            )
            interval_s = max(MIN_INTERVAL_S, self._duration_s / SAMPLES)
            sampler = FleetSampler(fleet.redis_url, interval_s, lambda: (load.now_s(), load.sent))
            self._load(load, sampler, fleet.injector)
            seconds = load.now_s()
            self._progress.steps("waiting until no request is left", None)
            residue = fleet.settle(SETTLE_S + config.lease.gateway_timeout_s)
        changes, counts = changes_between(sampler.samples, load.sent), load.counts()
        complete = load.sent == self._total
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
        """Return a function to call after each request: it advances the progress bar, and prints a
        line after every twentieth of all requests.
        """
        step, total, ended = self._progress.steps("requests", self._total), self._total, count(1)

        def advance() -> None:
            step()
            if (number := next(ended)) % (total // 20) == 0:
                self._progress.say(
                    f"{load.now_s():7.1f} s  {number} of {total} requests have ended"
                )

        return advance

    def _draw_kills(self, load: SoakLoad) -> Iterator[Fault]:
        """Yield kills while requests are sent, except in the `CALM` parts. A round kills one worker
        of every role and one gateway, in random order.
        """
        roles = (*(str(role.name) for role in self._target.config.roles()), GATEWAY)
        spacing_s = min(KILL_EVERY_S, self._duration_s / 20)
        kinds = (FaultKind.KILL,)
        for turn in count(self._options.seed):
            for fault in draw_faults(turn, len(roles), roles, kinds, spacing_s):
                while load.is_running and is_calm(load.share_sent):
                    self._pause.wait(POLL_S)
                if not load.is_running or self._is_late(load):
                    return
                yield fault

    def _is_late(self, load: SoakLoad) -> bool:
        return load.now_s() > self._duration_s * OVERTIME + OVERTIME_S

    def _report(self, fault: InjectedFault) -> None:
        self._kills.append((fault.at_s, fault.role))
        self._progress.say(f"{fault.at_s:7.1f} s  {fault.signal} {fault.target}: {fault.outcome}")
