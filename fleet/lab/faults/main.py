"""`fleet chaos`: a fleet of its own, loaded twice, the second time under faults, and judged. Each
step is a module of its own.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fleet.config.settings import read_settings
from fleet.core.hand_off import VLLM_LEASE_S
from fleet.core.ids import StageName
from fleet.lab.faults.captures import CaptureLoad
from fleet.lab.faults.clients import Gateways
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.event_log import EventLog
from fleet.lab.faults.faults import FaultInjector, InjectedFault, gateway_command
from fleet.lab.faults.load import ChaosLoad, Outcome
from fleet.lab.faults.options import ChaosOptions, ChaosPlan, chaos_overrides, make_plan
from fleet.lab.faults.plot import draw
from fleet.lab.faults.processes import ExtraProcesses
from fleet.lab.faults.redis_faults import HOLD_S, RedisFaults, check_available
from fleet.lab.faults.redis_servers import RedisServers, find_clock_library, redis_servers
from fleet.lab.faults.relay import Relay
from fleet.lab.faults.report import INVARIANT, ChaosSetup, Verdict, judge, show
from fleet.lab.faults.requests import make_bodies, make_save_tasks
from fleet.lab.faults.saves import SAVE_S, SaveLoad, SaveSurroundings
from fleet.lab.faults.schedule import CONDUCTOR, REDIS, FaultKind
from fleet.lab.faults.session_files import SessionFiles
from fleet.lab.faults.voice import VoiceLoad
from fleet.lab.faults.watch import FleetWatch, Residue, own_redis_url
from fleet.lab.measure.deployment import (
    LOG_NAME,
    RESOLVED_NAME,
    TargetFleet,
    own_fleet,
    resolve_config,
)
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import describe_machine
from fleet.lab.report.progress import Meter, meter
from fleet.process.free_ports import free_port
from fleet.process.interrupts import interrupted_by_sigterm
from fleet.process.private import make_private_folder

EXTRAS_LOG, REDIS_FOLDER, SAVES_FOLDER = "chaos.log", "bench-redis-", "saves"
SILENCE_S = 5.0
"""Time-out of a client's connection where gateways are frozen, after which it resumes at
another.
"""
SETTLE_S = 15.0
"""Time, besides a lease, in which the end of a request reaches all workers and their reports."""
SETTLE_POLL_S = 0.25
INTERRUPTED = 130
WIDTH = 140
"""Width of tables that are written to a file or a pipe, in characters."""


def run(options: ChaosOptions, command: tuple[str, ...]) -> int:
    """Run the command and return its exit status: 0 if the run passed. Raises: ApiError,
    BenchError, ChaosError, ConfigError.
    """
    # Twice: the overrides of chaos name the graph's stages, and the deployment names the graph.
    plain = resolve_config(options.config, options.overrides)
    config = resolve_config(options.config, chaos_overrides(plain, options.overrides))
    plan = make_plan(options, config)
    check_available(plan.redis_kinds)
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
    with meter("fleet chaos") as progress, _own_redis(plan, log_folder) as servers:
        started = progress.steps("starting the fleet", 1)
        with own_fleet(
            options.config, options.overrides, servers.url if servers else None
        ) as target:
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
                voice=options.voice,
                replicas={str(role.name): role.replicas for role in config.roles()},
                standby={str(role.name): role.standby for role in config.roles() if role.standby},
            )
            verdict = ChaosRun(target=target, plan=plan, progress=progress, servers=servers).run(
                setup
            )
            if not verdict.passed:
                _save_log(
                    config.data_dir,
                    log_folder / f"chaos-{began[:19].replace(':', '')}.log",
                    progress,
                )
    return verdict


@contextmanager
def _own_redis(plan: ChaosPlan, data_dir: Path) -> Iterator[RedisServers | None]:
    """Run the servers in which faults are injected until the end of the block; None where the fleet
    starts its own.
    """
    if not plan.redis_kinds:
        yield None
        return
    make_private_folder(data_dir)
    folder = Path(tempfile.mkdtemp(prefix=REDIS_FOLDER, dir=data_dir))
    clock = find_clock_library() if FaultKind.CLOCK in plan.redis_kinds else None
    try:
        with redis_servers(
            folder, clock=clock, with_replica=FaultKind.FAILOVER in plan.redis_kinds
        ) as servers:
            yield servers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save_log(folder: Path, path: Path, progress: Meter) -> None:
    """Save the logs of the fleet's processes, since its folder is removed."""
    logs = [folder / name for name in (LOG_NAME, EXTRAS_LOG)]
    path.write_bytes(b"".join(log.read_bytes() for log in logs if log.is_file()))
    progress.say(f"the log of the fleet's processes is {path}")


def _no_step() -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """One fleet under test, from ready to judged."""

    target: TargetFleet
    plan: ChaosPlan
    progress: Meter
    servers: RedisServers | None = None

    def run(self, setup: ChaosSetup) -> Verdict:
        config, plan = self.target.config, self.plan
        own_url = self.servers.url if self.servers else None
        redis_url = own_url or own_redis_url(config)
        extras = ExtraProcesses(
            config.data_dir / RESOLVED_NAME, config.data_dir / EXTRAS_LOG, own_url
        )
        with ExitStack() as stack:
            faults = self._redis_faults(stack)
            stack.callback(extras.stop)
            # `fleet up` starts one conductor and one gateway; faults need another of each, which
            # takes over.
            extras.start([CONDUCTOR])
            urls = [self.target.url, *self._start_gateways(extras, faults)]
            watch = stack.enter_context(closing(FleetWatch(config, len(urls), redis_url)))
            event_log = stack.enter_context(closing(EventLog(redis_url)))
            silence_s = SILENCE_S if plan.has_silent_gateways else None
            gateways = Gateways(urls, read_settings().api_key, silence_s)
            saves = self._saves(setup.model, gateways, redis_url)
            injector = FaultInjector(watch, event_log, extras, faults, saves.clock)
            self.progress.steps("waiting until the fleet is complete", None)
            if not injector.wait_until_complete():
                raise ChaosError(
                    "the fleet did not become complete, although no fault was injected"
                )
            bodies = make_bodies(setup.model, config, plan.options)
            undisturbed = self._record_reference(gateways, bodies, saves)
            voice = VoiceLoad(
                urls, read_settings().api_key, setup.model, plan.options.voice, plan.options.seed
            )
            captures = CaptureLoad(redis_url, config, plan.options.seed)
            disturbed, injected = self._disturb(
                gateways, undisturbed, bodies, injector, voice, saves, captures
            )
            sessions, conversations, captured = voice.finish(), saves.finish(), captures.finish()
            residue = self._settle(watch)
        return judge(
            setup,
            undisturbed.outcomes,
            disturbed,
            sessions,
            injected,
            plan.total_faults,
            residue,
            conversations,
            captured,
        )

    def _saves(self, model: str, gateways: Gateways, redis_url: str) -> SaveLoad:
        """Prepare the conversations that are saved; none if the plan has none."""
        config, plan = self.target.config, self.plan
        folder = config.data_dir / SAVES_FOLDER
        make_private_folder(folder)
        around = SaveSurroundings(
            gateways=gateways,
            store=SessionFiles(redis_url, config),
            stages=plan.saved_stages,
            folder=folder,
            exact=config.numerics == INVARIANT,
            longest_s=SAVE_S + config.lease.worker_ttl_s,
        )
        return SaveLoad(make_save_tasks(model, config, plan.options.seed, plan.num_saved), around)

    def _redis_faults(self, stack: ExitStack) -> RedisFaults | None:
        if self.servers is None:
            return None
        servers, lease = self.servers, self.target.config.lease
        partitions = FaultKind.PARTITION in self.plan.redis_kinds
        relay = stack.enter_context(Relay.to(lambda: servers.primary.port)) if partitions else None
        return RedisFaults(
            servers, relay, max(HOLD_S, 2 * lease.worker_ttl_s, 2 * lease.conductor_ttl_s)
        )

    def _start_gateways(self, extras: ExtraProcesses, faults: RedisFaults | None) -> list[str]:
        """Start a second gateway if the plan has faults for gateways, and return its address."""
        if not self.plan.has_second_gateway:
            return []
        port = free_port()
        relayed = faults.relayed_url if faults else None
        extras.start(gateway_command(port), relayed)
        return [f"http://127.0.0.1:{port}"]

    def _record_reference(
        self, gateways: Gateways, bodies: list[bytes], saves: SaveLoad
    ) -> ChaosLoad:
        """Record the answers, and the files of conversations, without faults. Raises: ChaosError if
        the fleet loses one.
        """
        concurrency = self.plan.options.concurrency
        self._load_undisturbed("warm-up", gateways, bodies[:concurrency])
        if self.plan.num_saved:
            saves.record_reference(
                self.progress.steps("undisturbed conversations, saved", self.plan.num_saved)
            )
        return self._load_undisturbed(
            f"undisturbed requests, {concurrency} at a time", gateways, bodies
        )

    def _load_undisturbed(self, label: str, gateways: Gateways, bodies: list[bytes]) -> ChaosLoad:
        load = ChaosLoad(gateways, bodies)
        load.start(
            self.plan.options.concurrency, self.progress.steps(label, len(bodies)), once=True
        )
        lost = next((outcome for outcome in load.finish() if outcome.lost), None)
        if lost:
            raise ChaosError(
                f"the fleet failed request {lost.request}, although no fault was injected: "
                f"{lost.lost}"
            )
        return load

    def _disturb(
        self,
        gateways: Gateways,
        reference: ChaosLoad,
        bodies: list[bytes],
        injector: FaultInjector,
        voice: VoiceLoad,
        saves: SaveLoad,
        captures: CaptureLoad,
    ) -> tuple[list[Outcome], list[InjectedFault]]:
        plan, options = self.plan, self.plan.options
        expected = [reference.answers[request] for request in range(len(bodies))]
        load = ChaosLoad(gateways, bodies, expected, may_forget=plan.may_forget)
        beside = f" and {options.voice} voice sessions" if options.voice else ""
        beside += f" and {plan.num_saved} conversations that are saved" if plan.num_saved else ""
        trains = self.target.config.training.enabled
        beside += " and captures for the trainer" if trains else ""
        injected = self.progress.steps(
            f"faults, under {options.concurrency} requests at a time{beside}", plan.total_faults
        )

        def report(fault: InjectedFault) -> None:
            injected()
            after = (
                "not recovered"
                if fault.recovered_s is None
                else f"recovered after {fault.recovered_s:.1f} s"
            )
            in_redis = f"repaired after {fault.until_s - fault.at_s:.1f} s"
            in_process = f"{len(fault.requests)} requests" + (
                f", in a {fault.moment}" if fault.in_moment else ""
            )
            affected = in_redis if fault.role == REDIS else in_process
            self.progress.say(
                f"{fault.at_s:6.1f} s  {fault.signal} {fault.target} ({affected}): {after}"
            )

        try:
            load.start(
                options.concurrency, self.progress.steps("requests answered under faults", None)
            )
            with (
                voice.running(self.progress.steps("voice turns answered under faults", None)),
                saves.running(
                    load.now_s,
                    self.progress.steps("saves under faults", None) if plan.num_saved else _no_step,
                ),
                captures.running(
                    self.progress.steps("captures under faults", None) if trains else _no_step
                ),
            ):
                done = injector.inject_all(plan.schedule(), load.now_s, report)
            self.progress.steps("the last answers", None)
            return load.finish(), done
        finally:
            load.abandon()

    def _settle(self, watch: FleetWatch) -> Residue:
        """Return what is left after a while without requests.

        A client whose gateway died before it sent the request's id sends the request again; the
        first one waits for a gateway. Where a decode half on vLLM died, the prefill half holds the
        blocks of its prompts for vLLM's lease.
        """
        config, lease = self.target.config, self.target.config.lease
        timeout_s = (
            SETTLE_S
            + lease.worker_ttl_s
            + (lease.gateway_timeout_s if self.plan.has_second_gateway else 0)
        )
        if any(
            given.split and config.engine_of(StageName(name)) == "vllm"
            for name, given in config.stages.items()
        ):
            timeout_s += VLLM_LEASE_S
        pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
        while not (residue := watch.residue()).is_empty and time.monotonic() < deadline_s:
            pause.wait(SETTLE_POLL_S)
        return residue
