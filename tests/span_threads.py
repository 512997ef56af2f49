"""A divided language model in one process: a conductor, anchors and span workers on threads, real
layers and a real Redis.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fleet.conductor.driver import Driver
from fleet.config import FleetConfig, load_config
from fleet.config.placement import for_role
from fleet.control import keys, scripts
from fleet.control.connect import connect, run
from fleet.core.errors import FleetError
from fleet.core.ids import RoleName, StageName, WorkerId, new_request_id
from fleet.core.request import RequestSpec, Sampling
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.process.fleet_secret import FleetSecret
from fleet.spans.host.process import SpanWorkerProcess, SpanWorkerSettings
from fleet.spans.route.entry import AnchorRoute
from fleet.stages.builders import SpanBuilder, build_options
from fleet.worker.context import WorkerSettings
from fleet.worker.main import build_stage
from fleet.worker.process.peers import PeerAccess
from fleet.worker.process.registered_process import RegisteredProcess
from fleet.worker.worker_process import WorkerProcess
from tests.harness import EACH_TOKEN
from tests.support import wait_until

STAGE, SPAN_ROLE = StageName("lm"), RoleName("lm.span")
REVERSE = "stages.lm.spans={anchor: '2:output', workers: ['0:0', '1:1']}"
FORWARD = "stages.lm.spans={anchor: '0:0', workers: ['1:1', '2:output']}"
ProcessT = TypeVar("ProcessT", bound=RegisteredProcess)


class DeadSpanWorker(BaseException):
    """Raised in a span worker's thread to end it in the middle of a pass, as SIGKILL ends a
    process: its connections close.
    """


@dataclass(slots=True, kw_only=True)
class SpanThreads:
    """Processes of a divided model, run as threads.

    `refused`: errors with which processes ended. `num_died`: number of workers that
    `DeadSpanWorker` ended. An ended process is started again until the end of the test.
    """

    config: FleetConfig
    url: str
    checkpoint: Path
    secret: FleetSecret | None = None
    processes: list[RegisteredProcess] = field(default_factory=list[RegisteredProcess])
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    refused: list[FleetError] = field(default_factory=list[FleetError])
    num_died: int = 0
    is_ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_anchor(self) -> WorkerProcess:
        config = for_role(self.config, self.config.role(STAGE))
        access = PeerAccess(secret=self.secret)
        built = build_stage(config, STAGE, self.checkpoint)
        options, slot = build_options(config, STAGE, self.checkpoint), built.route
        route = AnchorRoute(config, options, slot, self.url, access) if slot is not None else None
        settings = WorkerSettings(
            config=config,
            role=RoleName(STAGE),
            built=built,
            access=access,
            dtype="float32",
            route=route,
        )
        process = WorkerProcess(self.url, settings)
        self._start(process, self.add_anchor)
        return process

    def add_span_worker(
        self, build: SpanBuilder | None = None, access: PeerAccess | None = None
    ) -> SpanWorkerProcess:
        """Start a span worker. `build`: builder of its layers instead of the graph's. `access`:
        peer access instead of the one with the fleet's secret.
        """
        serves = self.config.role(SPAN_ROLE)
        config = for_role(self.config, serves)
        access = access or PeerAccess(secret=self.secret)
        settings = SpanWorkerSettings(
            config=config,
            serves=serves,
            options=build_options(config, STAGE, self.checkpoint),
            access=access,
            build=build,
        )
        process = SpanWorkerProcess(self.url, settings)
        self._start(process, lambda: self.add_span_worker(build, access))
        return process

    def _start(self, process: RegisteredProcess, again: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._run, args=(process, again), daemon=True)
        with self.lock:
            if not self.is_ended:
                self.processes.append(process)
                self.threads.append(thread)
                thread.start()

    def end(self) -> None:
        """Stop every process, and let none be started again."""
        with self.lock:
            self.is_ended = True
        for process in self.processes:
            process.stop.set()
        for thread in self.threads:
            thread.join(timeout=20)

    def _run(self, process: RegisteredProcess, again: Callable[[], object]) -> None:
        try:
            process.run()
        except FleetError as error:
            self.refused.append(error)
        except DeadSpanWorker:
            self.num_died += 1
            assert process.last_id is not None
            with connect(self.url) as client:
                run(client, scripts.fence_worker("", process.last_id, died=True))
            again()

    def wait_joined(self) -> None:
        """Wait until each process is registered."""

        def are_listed() -> bool:
            names = [process.last_id for process in self.processes]
            with connect(self.url) as client:
                return all(name is not None and client.zscore(keys.WORKERS, name) for name in names)

        wait_until(are_listed, "every process to join")

    def wait_route(self) -> None:
        """Wait until every anchor has a route. A worker with all layers needs none."""
        engines = [
            process.settings.built.engine
            for process in self.processes
            if isinstance(process, WorkerProcess)
        ]
        remotes = [engine.remote for engine in engines if engine.remote is not None]
        wait_until(lambda: all(remote.accepts_requests() for remote in remotes), "a route")

    def spec(
        self, seed: int, num_tokens: int = 16, prompt_ids: tuple[int, ...] = ()
    ) -> RequestSpec:
        return RequestSpec(
            id=new_request_id(),
            graph=self.config.graph,
            prompt_ids=prompt_ids or tuple(range(5, 17 + seed)),
            outputs=tuple(self.config.graph_declaration().media),
            sampling={
                STAGE: Sampling(temperature=0.9, max_tokens=num_tokens, seed=seed, ignore_eos=True)
            },
        )


@contextmanager
def span_threads(
    url: str, folder: Path, *settings: str, secret: FleetSecret | None = None
) -> Iterator[SpanThreads]:
    """Run a conductor; at the end also stop the processes that the test has added."""
    write_tiny_checkpoint(folder / "checkpoint")
    config = load_config(
        None,
        (
            "graph=text",
            "numerics=invariant",
            "transfer.kind=redis",
            "device=cpu",
            EACH_TOKEN,
            *settings,
        ),
    )
    client = connect(url, one_connection=True)
    driver = Driver(config, client, WorkerId("conductor@test"))
    conductor = threading.Thread(target=driver.run, daemon=True)
    conductor.start()
    fleet = SpanThreads(config=config, url=url, checkpoint=folder / "checkpoint", secret=secret)
    try:
        yield fleet
    finally:
        driver.stopping = True
        fleet.end()
        conductor.join(timeout=20)
        client.close()
    assert not any(thread.is_alive() for thread in fleet.threads), (
        "a thread of the fleet does not end"
    )
