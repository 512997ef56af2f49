"""`fleet chaos`: starts its own fleet, loads it first undisturbed and then under faults, and judges
the result; with `--soak`, loads it for long.
"""

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from fleet.core.hand_off import VLLM_LEASE_S
from fleet.core.ids import StageName
from fleet.lab.client.client import ApiClient
from fleet.lab.faults import report, soak_report
from fleet.lab.faults.audio_calls import AudioLoad, has_audio_calls, make_calls, spoken_prompts
from fleet.lab.faults.captures import CaptureLoad
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.fleet_under_test import EXTRAS_LOG, FleetUnderTest, fleet_under_test
from fleet.lab.faults.load import ChaosLoad
from fleet.lab.faults.options import ChaosOptions, ChaosPlan, chaos_overrides, check_soak, make_plan
from fleet.lab.faults.redis_faults import HOLD_S, RedisFaults, check_available
from fleet.lab.faults.redis_servers import find_clock_library, redis_servers
from fleet.lab.faults.relay import Relay
from fleet.lab.faults.requests import make_bodies, make_save_tasks
from fleet.lab.faults.saves import SAVE_S, SaveLoad, SaveSurroundings
from fleet.lab.faults.schedule import REDIS, FaultKind
from fleet.lab.faults.session_files import SessionFiles
from fleet.lab.faults.slow import SlowGateways, SlowReaders
from fleet.lab.faults.soak import run_soak
from fleet.lab.faults.soak_report import SoakVerdict
from fleet.lab.faults.verdict import INVARIANT, ChaosRecord, Verdict, judge
from fleet.lab.faults.voice_load import VoiceLoad
from fleet.lab.measure.deployment import LOG_NAME, TargetFleet, own_fleet, resolve_config
from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine, describe_machine
from fleet.lab.report.progress import Meter, meter
from fleet.process.interrupts import interrupted_by_sigterm
from fleet.process.private import make_private_folder

REDIS_FOLDER, SAVES_FOLDER = "bench-redis-", "saves"
SILENCE_S = 5.0
"""Read time-out of a client's connection in runs that freeze gateways; the client then resumes at
another gateway.
"""
SETTLE_S = 15.0
"""Time, in addition to a lease, until the end of a request has reached all workers and their
reports.
"""
INTERRUPTED = 130
WIDTH = 140
"""Width of tables that are written to a file or a pipe, in characters."""
V = TypeVar("V", Verdict, SoakVerdict)


def run(options: ChaosOptions, command: tuple[str, ...]) -> int:
    """Run the command and return its exit status: 0 if the run passed, 1 if it failed, 130 if it
    was interrupted. A soak without `check` returns 0 even if it failed. `command`: arguments as
    typed. Raises: ApiError, BenchError, ChaosError, ConfigError.
    """
    try:
        with interrupted_by_sigterm():
            if options.soak is None:
                return _publish(_run_chaos(options, command), options, report.show, report.draw)
            check_soak(options)
            soak = run_soak(options, command)
            status = _publish(soak, options, soak_report.show, soak_report.draw)
            return status if options.check else 0
    except KeyboardInterrupt:
        print("fleet chaos: stopped before the end", file=sys.stderr)
        return INTERRUPTED


def _publish(
    verdict: V,
    options: ChaosOptions,
    show: Callable[[V, Console], None],
    draw: Callable[[V, Path], None],
) -> int:
    show(verdict, Console() if Console().is_terminal else Console(width=WIDTH))
    if options.json:
        write_json(verdict, options.json)
    if options.png:
        draw(verdict, options.png)
    return 0 if verdict.passed else 1


def _run_chaos(options: ChaosOptions, command: tuple[str, ...]) -> Verdict:
    # Twice: the overrides of chaos name the graph's stages, and the deployment names the graph.
    plain = resolve_config(options.config, options.overrides)
    config = resolve_config(options.config, chaos_overrides(plain, options.overrides))
    plan = make_plan(options, config)
    check_available(plan.redis_kinds)
    data_dir = config.data_dir.absolute()
    hold_s = max(HOLD_S, 2 * config.lease.worker_ttl_s, 2 * config.lease.conductor_ttl_s)
    began, machine = time.strftime("%Y-%m-%dT%H:%M:%S%z"), describe_machine()
    with (
        meter("fleet chaos") as progress,
        _redis_faults(plan.redis_kinds, data_dir, hold_s) as redis_faults,
    ):
        started = progress.steps("starting the fleet", 1)
        url = redis_faults.servers.url if redis_faults else None
        with own_fleet(plan.options.config, plan.options.overrides, url) as target:
            started()
            run = ChaosRun(target, plan, progress, redis_faults)
            verdict = run.run(began, command, machine)
            if not verdict.passed:
                log = data_dir / f"chaos-{began[:19].replace(':', '')}.log"
                _save_log(target.config.data_dir, log, progress)
    return verdict


@contextmanager
def _redis_faults(
    kinds: Collection[FaultKind], data_dir: Path, hold_s: float
) -> Iterator[RedisFaults | None]:
    """Run the Redis servers in which faults are injected until the end of the block. Yields None,
    and runs no server, if `kinds` is empty; the fleet then starts its own Redis.
    """
    if not kinds:
        yield None
        return
    make_private_folder(data_dir)
    folder = Path(tempfile.mkdtemp(prefix=REDIS_FOLDER, dir=data_dir))
    clock = find_clock_library() if FaultKind.CLOCK in kinds else None
    with_replica = FaultKind.FAILOVER in kinds
    try:
        with redis_servers(folder, clock=clock, with_replica=with_replica) as servers:
            if FaultKind.PARTITION not in kinds:
                yield RedisFaults(servers, None, hold_s)
                return
            with Relay.to(lambda: servers.primary.port) as relay:
                yield RedisFaults(servers, relay, hold_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save_log(folder: Path, path: Path, progress: Meter) -> None:
    """Copy the logs of the fleet's processes from its temporary folder to `path`."""
    logs = [folder / name for name in (LOG_NAME, EXTRAS_LOG)]
    path.write_bytes(b"".join(log.read_bytes() for log in logs if log.is_file()))
    progress.say(f"the log of the fleet's processes is {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsBeside:
    """Loads of a run beside its requests; each may be empty."""

    voice: VoiceLoad
    audio_calls: AudioLoad
    saves: SaveLoad
    captures: CaptureLoad


class ChaosRun:
    """A chaos run, from the start of the fleet to the verdict. `redis_faults`: faults of the run's
    own Redis.
    """

    def __init__(
        self,
        target: TargetFleet,
        plan: ChaosPlan,
        progress: Meter,
        redis_faults: RedisFaults | None,
    ) -> None:
        self._target = target
        self._config = target.config
        self._plan = plan
        self._options = plan.options
        self._progress = progress
        self._redis_faults = redis_faults

    def run(self, began: str, command: tuple[str, ...], machine: Machine) -> Verdict:
        plan, config, options = self._plan, self._config, self._options
        with fleet_under_test(
            self._target,
            self._progress,
            second_gateway=plan.has_second_gateway,
            redis_faults=self._redis_faults,
            silence_s=SILENCE_S if plan.has_silent_gateways else None,
        ) as fleet:
            clips = self._clips(fleet)
            bodies = make_bodies(fleet.model, config, options, clips)
            beside = self._loads_beside(fleet, clips)
            undisturbed = self._record_reference(fleet, bodies, beside)
            expected = [undisturbed.answers[request] for request in range(len(bodies))]
            load = ChaosLoad(fleet.gateways, bodies, expected, may_forget=plan.may_forget)
            slow = SlowReaders(
                lambda: SlowGateways(fleet.urls, fleet.api_key),
                bodies,
                expected,
                plan.num_readers,
                may_forget=plan.may_forget,
            )
            try:
                faults = self._disturb(fleet, load, beside, slow)
                self._progress.steps("the last answers", None)
                disturbed = load.finish()
            finally:
                load.abandon()
            return judge(
                ChaosRecord(
                    began=began,
                    command=command,
                    machine=machine,
                    model=fleet.model,
                    numerics=config.numerics,
                    seed=options.seed,
                    requests=options.requests,
                    concurrency=options.concurrency,
                    voice=options.voice,
                    replicas={str(role.name): role.replicas for role in config.roles()},
                    standby={
                        str(role.name): role.standby for role in config.roles() if role.standby
                    },
                    faults=tuple(faults),
                    faults_left=_num_left(plan, faults),
                    undisturbed=tuple(undisturbed.outcomes),
                    disturbed=tuple(disturbed),
                    slow=tuple(slow.outcomes),
                    # In this order: all clients have ended before what is left is counted.
                    sessions=beside.voice.finish(),
                    audio_calls=beside.audio_calls.finish(),
                    conversations=beside.saves.finish(),
                    captures=beside.captures.finish(),
                    residue=fleet.settle(self._settle_s()),
                )
            )

    def _clips(self, fleet: FleetUnderTest) -> list[bytes]:
        """Return questions as WAV files, spoken by the fleet itself; [] unless the graph recognises
        speech and speaks texts in stages of their own.
        """
        if not has_audio_calls(self._config.graph_declaration()):
            return []
        self._progress.steps("the clips of spoken questions", None)
        return spoken_prompts(ApiClient(fleet.urls[0], fleet.api_key), fleet.model)

    def _loads_beside(self, fleet: FleetUnderTest, clips: Sequence[bytes]) -> LoadsBeside:
        options, access = self._options, (fleet.urls, fleet.api_key, fleet.model)
        return LoadsBeside(
            voice=VoiceLoad(*access, options.voice, options.seed, clips),
            audio_calls=AudioLoad(*access, make_calls(clips)),
            saves=self._saves(fleet),
            captures=CaptureLoad(fleet.redis_url, self._config, options.seed),
        )

    def _saves(self, fleet: FleetUnderTest) -> SaveLoad:
        """Prepare the load that saves conversations; it is empty if the plan has none."""
        config, plan = self._config, self._plan
        folder = config.data_dir / SAVES_FOLDER
        make_private_folder(folder)
        around = SaveSurroundings(
            gateways=fleet.gateways,
            store=SessionFiles(fleet.redis_url, config),
            stages=plan.saved_stages,
            folder=folder,
            exact=config.numerics == INVARIANT,
            longest_s=SAVE_S + config.lease.worker_ttl_s,
        )
        tasks = make_save_tasks(fleet.model, config, self._options.seed, plan.num_saved)
        return SaveLoad(tasks, around, fleet.saves)

    def _record_reference(
        self, fleet: FleetUnderTest, bodies: list[bytes], beside: LoadsBeside
    ) -> ChaosLoad:
        """Record the reference answers and conversation files without faults. Raises: ChaosError if
        an answer is lost.
        """
        if beside.audio_calls.count:
            label = "undisturbed speech and transcription calls"
            beside.audio_calls.record_reference(
                self._progress.steps(label, beside.audio_calls.count)
            )
        concurrency, num_saved = self._options.concurrency, self._plan.num_saved
        self._load_undisturbed("warm-up", fleet, bodies[:concurrency])
        if num_saved:
            step = self._progress.steps("undisturbed conversations, saved", num_saved)
            beside.saves.record_reference(step)
        label = f"undisturbed requests, {concurrency} at a time"
        return self._load_undisturbed(label, fleet, bodies)

    def _load_undisturbed(
        self, label: str, fleet: FleetUnderTest, bodies: list[bytes]
    ) -> ChaosLoad:
        load = ChaosLoad(fleet.gateways, bodies, once=True)
        load.start(self._options.concurrency, self._progress.steps(label, len(bodies)))
        lost = next((outcome for outcome in load.finish() if outcome.lost), None)
        if lost:
            raise ChaosError(
                f"the fleet failed request {lost.request}, although no fault was injected: "
                f"{lost.lost}"
            )
        return load

    def _disturb(
        self,
        fleet: FleetUnderTest,
        load: ChaosLoad,
        loads: LoadsBeside,
        slow: SlowReaders,
    ) -> list[InjectedFault]:
        """Inject all planned faults while the loads run; return the injected faults."""
        plan, options, steps = self._plan, self._options, self._progress.steps
        beside = (
            (options.voice, f" and {options.voice} voice sessions"),
            (plan.num_saved, f" and {plan.num_saved} conversations that are saved"),
            (self._config.training.enabled, " and captures for the trainer"),
        )
        kinds = "".join(text for wanted, text in beside if wanted)
        label = f"faults, under {options.concurrency} requests at a time{kinds}"
        injected = steps(label, plan.total_faults if plan.limit_s is None else None)

        def report_fault(fault: InjectedFault) -> None:
            injected()
            self._progress.say(_line_of(fault))

        load.start(options.concurrency, steps("requests answered under faults", None))
        with (
            loads.voice.running(steps("voice turns answered under faults", None)),
            loads.audio_calls.running(
                self._steps("speech and transcription calls", loads.audio_calls.count)
            ),
            loads.saves.running(load.now_s, self._steps("saves", plan.num_saved)),
            loads.captures.running(self._steps("captures", self._config.training.enabled)),
        ):
            due = itertools.takewhile(
                lambda _: plan.limit_s is None or load.now_s() < plan.limit_s, plan.schedule()
            )
            return fleet.injector.inject_all(due, load.now_s, report_fault, slow)

    def _steps(self, name: str, is_wanted: object) -> Callable[[], None]:
        if is_wanted:
            return self._progress.steps(f"{name} under faults", None)
        return lambda: None

    def _settle_s(self) -> float:
        """Return the longest time for which state of ended requests may remain after the load.
        State that remains longer was left by a fault.

        A client whose gateway died before sending the request's id sends the request again, and the
        first copy stays open until its gateway times out. Where a decode half on vLLM died, the
        prefill half keeps the KV blocks of its prompts until vLLM's lease ends.
        """
        config, lease = self._config, self._config.lease
        on_vllm = any(
            stage.split and config.engine_of(StageName(name)) == "vllm"
            for name, stage in config.stages.items()
        )
        return (
            SETTLE_S
            + lease.worker_ttl_s
            + (lease.gateway_timeout_s if self._plan.has_second_gateway else 0)
            + (VLLM_LEASE_S if on_vllm else 0)
        )


def _num_left(plan: ChaosPlan, faults: Sequence[InjectedFault]) -> int:
    """Return the number of faults that were not injected although there was time for them."""
    if plan.limit_s is not None and faults and faults[-1].recovered_s is not None:
        return 0
    return plan.total_faults - len(faults)


def _line_of(fault: InjectedFault) -> str:
    if fault.role == REDIS:
        affected = f"repaired after {fault.until_s - fault.at_s:.1f} s"
    else:
        affected = f"{len(fault.requests)} requests"
        affected += f", in a {fault.moment}" if fault.in_moment else ""
    return f"{fault.at_s:6.1f} s  {fault.signal} {fault.target} ({affected}): {fault.outcome}"
