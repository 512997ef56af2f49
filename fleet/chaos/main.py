"""`fleet chaos`: a fleet of its own, loaded twice, the second time under faults, and judged. Each step is a module of its own."""

import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fleet.bench.deployment import LOG_NAME, RESOLVED_NAME, TargetFleet, own_fleet, resolve_config
from fleet.chaos.clients import Gateways
from fleet.chaos.errors import ChaosError
from fleet.chaos.event_log import EventLog
from fleet.chaos.faults import FaultInjector, InjectedFault, gateway_command
from fleet.chaos.load import ChaosLoad, Outcome
from fleet.chaos.options import ChaosOptions, ChaosPlan, chaos_overrides, make_plan
from fleet.chaos.plot import draw
from fleet.chaos.processes import ExtraProcesses, free_port
from fleet.chaos.report import ChaosSetup, Verdict, judge, show
from fleet.chaos.requests import make_bodies
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, FaultKind, draw_faults
from fleet.chaos.watch import FleetWatch, Residue
from fleet.config.settings import read_settings
from fleet.core.interrupts import interrupted_by_sigterm
from fleet.reporting.files import write_json
from fleet.reporting.machine import describe_machine
from fleet.reporting.progress import Meter, meter

EXTRAS_LOG = "chaos.log"
SILENCE_S = 5.0
"""Time-out of a client's connection where gateways are frozen, after which it resumes at another."""
SETTLE_S = 15.0
"""Time, besides a lease, in which the end of a request reaches all workers and their reports."""
SETTLE_POLL_S = 0.25
INTERRUPTED = 130
WIDTH = 140
"""Width of tables that are written to a file or a pipe, in characters."""


def run(options: ChaosOptions, command: tuple[str, ...]) -> int:
    """Run the command and return its exit status: 0 if the run passed. Raises: ApiError, BenchError, ChaosError, ConfigError."""
    # Twice: the overrides of chaos name the graph's stages, and the deployment names the graph.
    plain = resolve_config(options.config, options.overrides)
    config = resolve_config(options.config, chaos_overrides(plain, options.overrides))
    plan = make_plan(options, config)
    try:
        with interrupted_by_sigterm():
            verdict = _run(plan, command, log_folder=config.data_dir.absolute())
    except KeyboardInterrupt:
        print("fleet chaos: stopped before the end", file=sys.stderr)
        return INTERRUPTED
    show(verdict, Console() if Console().is_terminal else Console(width=WIDTH))
    if options.json:
        write_json(verdict, options.json)
    if options.png:
        draw(verdict, options.png)
    return 0 if verdict.passed else 1


def _run(plan: ChaosPlan, command: tuple[str, ...], log_folder: Path) -> Verdict:
    began, machine, options = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine(), plan.options
    with meter("fleet chaos") as progress:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(options.config, options.overrides) as target:
            started()
            config, model = target.config, target.api.model()
            setup = ChaosSetup(
                began=began,
                command=command,
                machine=machine,
                model=model,
                numerics=config.numerics,
                seed=options.seed,
                requests=options.requests,
                concurrency=options.concurrency,
                replicas={str(role.name): role.replicas for role in config.roles()},
                standby={str(role.name): role.standby for role in config.roles() if role.standby},
            )
            verdict = ChaosRun(target=target, plan=plan, progress=progress).run(setup)
            if not verdict.passed:
                _save_log(config.data_dir, log_folder / f"chaos-{began[:19].replace(':', '')}.log", progress)
    return verdict


def _save_log(folder: Path, path: Path, progress: Meter) -> None:
    """Save the logs of the fleet's processes, since its folder is removed."""
    logs = [folder / name for name in (LOG_NAME, EXTRAS_LOG)]
    path.write_bytes(b"".join(log.read_bytes() for log in logs if log.is_file()))
    progress.say(f"the log of the fleet's processes is {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """One fleet under test, from ready to judged."""

    target: TargetFleet
    plan: ChaosPlan
    progress: Meter

    def run(self, setup: ChaosSetup) -> Verdict:
        config, plan = self.target.config, self.plan
        extras = ExtraProcesses(config.data_dir / RESOLVED_NAME, config.data_dir / EXTRAS_LOG)
        with ExitStack() as stack:
            stack.callback(extras.stop)
            # `fleet up` starts one conductor and one gateway; faults need another of each, which takes over.
            extras.start([CONDUCTOR])
            urls = [self.target.url, *self._start_gateways(extras)]
            watch = stack.enter_context(closing(FleetWatch(config, len(urls))))
            event_log = stack.enter_context(closing(EventLog(config.redis_data_dir)))
            injector = FaultInjector(watch, event_log, extras)
            self.progress.steps("waiting until the fleet is complete", None)
            if not injector.wait_until_complete():
                raise ChaosError("the fleet did not become complete, although no fault was injected")
            silence_s = SILENCE_S if GATEWAY in plan.roles and FaultKind.STOP in plan.kinds else None
            gateways = Gateways(urls, read_settings().api_key, silence_s)
            bodies = make_bodies(setup.model, config, plan.options)
            undisturbed = self._record_reference(gateways, bodies)
            disturbed, faults = self._disturb(gateways, undisturbed, bodies, injector)
            residue = self._settle(watch)
        return judge(setup, undisturbed.outcomes, disturbed, faults, plan.num_faults, residue)

    def _start_gateways(self, extras: ExtraProcesses) -> list[str]:
        """Start a second gateway if the plan has faults for gateways, and return its address."""
        if GATEWAY not in self.plan.roles:
            return []
        port = free_port()
        extras.start(gateway_command(port))
        return [f"http://127.0.0.1:{port}"]

    def _record_reference(self, gateways: Gateways, bodies: list[bytes]) -> ChaosLoad:
        """Record the answers without faults. Raises: ChaosError if the fleet loses one."""
        concurrency = self.plan.options.concurrency
        self._load_undisturbed("warm-up", gateways, bodies[:concurrency])
        return self._load_undisturbed(f"undisturbed requests, {concurrency} at a time", gateways, bodies)

    def _load_undisturbed(self, label: str, gateways: Gateways, bodies: list[bytes]) -> ChaosLoad:
        load = ChaosLoad(gateways, bodies)
        load.start(self.plan.options.concurrency, self.progress.steps(label, len(bodies)), once=True)
        lost = next((outcome for outcome in load.finish() if outcome.lost), None)
        if lost:
            raise ChaosError(f"the fleet failed request {lost.request}, although no fault was injected: {lost.lost}")
        return load

    def _disturb(
        self, gateways: Gateways, reference: ChaosLoad, bodies: list[bytes], injector: FaultInjector
    ) -> tuple[list[Outcome], list[InjectedFault]]:
        plan, options = self.plan, self.plan.options
        faults = draw_faults(options.seed, plan.num_faults, plan.roles, plan.kinds, options.spacing_s, plan.halves)
        load = ChaosLoad(gateways, bodies, [reference.answers[request] for request in range(len(bodies))])
        injected = self.progress.steps(f"faults, under {options.concurrency} requests at a time", plan.num_faults)

        def report(fault: InjectedFault) -> None:
            injected()
            after = "not recovered" if fault.recovered_s is None else f"recovered after {fault.recovered_s:.1f} s"
            affected = f"{len(fault.requests)} requests" + (", in a hand-off" if fault.in_hand_off else "")
            self.progress.say(f"{fault.at_s:6.1f} s  {fault.signal} {fault.target} ({affected}): {after}")

        try:
            load.start(options.concurrency, self.progress.steps("requests answered under faults", None))
            done = injector.inject_all(faults, load.now_s, report)
            self.progress.steps("the last answers", None)
            return load.finish(), done
        finally:
            load.abandon()

    def _settle(self, watch: FleetWatch) -> Residue:
        """Return what is left after a while without requests.

        A client whose gateway died before it sent the request's id sends the request again; the first one waits for a gateway.
        """
        lease = self.target.config.lease
        timeout_s = SETTLE_S + lease.worker_ttl_s + (lease.gateway_timeout_s if GATEWAY in self.plan.roles else 0)
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while not (residue := watch.residue()).is_empty and time.monotonic() < deadline_s:
            pause.wait(SETTLE_POLL_S)
        return residue
