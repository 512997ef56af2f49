"""A whole fleet in one test: real Redis and real scripts, with a conductor and workers on threads
instead of in slower processes.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import redis
from redis.exceptions import ResponseError

from fleet.conductor.driver import Driver
from fleet.config import FleetConfig, load_config
from fleet.config.placement import for_role
from fleet.control import scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, run
from fleet.control.stream import ClientStream
from fleet.core.ids import (
    EdgeName,
    RequestId,
    RoleName,
    StageName,
    WorkerId,
    new_request_id,
    new_worker_id,
)
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Graph
from fleet.stages.base import BuiltStage
from fleet.telemetry.trace import RequestTrace
from fleet.transfer.base import Transfer
from fleet.transfer.factory import open_transfer
from fleet.worker.context import WorkerContext, WorkerSettings
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.main import build_stage, fingerprint_of
from fleet.worker.open_worker import OpenWorker, open_worker
from fleet.worker.process.peers import read_peer_access
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.worker_process import WorkerProcess
from tests.support import await_until, wait_until

LEASE_US = 3_600_000_000
ARENA_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class ThreadFleet:
    """A fleet on threads whose parts a test may inspect. `stop()` ends every thread, or fails the
    test, and closes all resources.
    """

    config: FleetConfig
    url: str
    driver: Driver
    checkpoint: Path = Path()
    transfer: str = "redis"
    opened: list[OpenWorker] = field(default_factory=list[OpenWorker])
    loops: list[WorkerLoop] = field(default_factory=list[WorkerLoop])
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    clients: list[redis.Redis] = field(default_factory=list[redis.Redis])
    killed: set[WorkerId] = field(default_factory=set[WorkerId])
    fenced: set[WorkerId] = field(default_factory=set[WorkerId])

    def add_worker(
        self, role: str, built: BuiltStage | None = None, transfer: Transfer | None = None
    ) -> WorkerLoop:
        serves = self.config.role(role)
        config = for_role(self.config, serves)
        built = built or build_stage(config, serves.stage, self.checkpoint)
        worker = new_worker_id(role, "test", len(self.loops))
        client = connect(self.url, one_connection=True)
        self.clients.append(client)
        access = read_peer_access(self.config)
        transfer = transfer or open_transfer(
            self.transfer, worker, ARENA_BYTES, ARENA_BYTES, access.reach
        )
        settings = WorkerSettings(
            config=config,
            role=serves.name,
            built=built,
            access=access,
            fingerprint=self._fingerprint(),
            dtype="" if config.engine == "fake" else "float32",
        )
        opened = open_worker(
            WorkerContext(
                settings=settings,
                worker=worker,
                client=client,
                transfer=transfer,
                link=RedisLink(client, worker, serves.name, access.secret),
                lease_us=LEASE_US,
            )
        )
        self.opened.append(opened)
        loop = opened.loop
        self.loops.append(loop)
        self._start(lambda: self._serve(loop))
        return loop

    def _fingerprint(self) -> str:
        """Return the hash of the checkpoint that workers in processes would register too."""
        has_files = (self.checkpoint / "config.json").exists()
        return fingerprint_of(self.checkpoint) if has_files else ""

    def _serve(self, loop: WorkerLoop) -> None:
        """Run a worker until it ends. A fenced worker ends with an error, since its inbox is
        deleted and its next read fails.
        """
        try:
            loop.run(lambda: self.stopping.is_set() or loop.worker in self.killed, _publisher(loop))
        except ResponseError:
            if loop.worker not in self.fenced:
                raise
        self.killed.add(loop.worker)

    def owner(self, request: RequestId, stage: StageName) -> WorkerLoop:
        """Return the worker loop that runs the task; fail the test if no worker claims it."""

        def loop_of() -> WorkerLoop | None:
            live = [
                loop
                for loop in self.loops
                if loop.worker not in self.killed and loop.stage == stage
            ]
            return next((loop for loop in live if request in loop.tasks), None)

        found = wait_until(loop_of, f"a worker to run {stage}")
        assert found is not None
        return found

    def kill(self, loop: WorkerLoop, *, died: bool = True) -> None:
        """Stop a worker between two turns, losing all it holds, and fence it as if its lease had
        lapsed.
        """
        self.killed.add(loop.worker)
        self.fence(loop, died=died)

    def fence(self, loop: WorkerLoop, *, died: bool = True) -> None:
        """Fence a worker in Redis, before the worker can notice."""
        self.fenced.add(loop.worker)
        run(self.clients[0], scripts.fence_worker("", loop.worker, died=died))

    def start_conductor(self) -> None:
        self._start(self.driver.run)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.threads.append(thread)

    def stop(self) -> None:
        self.stopping.set()
        self.driver.stopping = True
        for thread in self.threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), "a fleet thread does not end"
        for opened in self.opened:
            opened.close()
            opened.loop.transfer.close()
        for client in self.clients:
            client.close()


def _publisher(loop: WorkerLoop) -> Callable[[], None]:
    """Return a function that writes the version of the worker's draft head to Redis, as the lease
    renewal of a worker process does.
    """
    published = ""

    def publish() -> None:
        nonlocal published
        held = str(loop.maintenance.vitals.get("held_head", ""))
        if held != published:
            published = held
            loop.link.exchange(
                [scripts.renew(loop.worker, LEASE_US, {"held_head": held})],
                free_slots=0,
                block_ms=0,
            )

    return publish


@contextmanager
def thread_fleet(
    url: str,
    *overrides: str,
    checkpoint: Path | None = None,
    transfer: str = "redis",
    file: Path | None = None,
    without: str = "",
    conductor: bool = True,
) -> Generator[ThreadFleet]:
    """Run one conductor and one worker per role of the configuration as threads, on the fake engine
    unless `overrides` choose another. `without`: role that gets no worker.
    """
    config = load_config(file, ("engine=fake", "device=cpu", EACH_TOKEN, *overrides))
    client = connect(url)
    fleet = ThreadFleet(
        config=config,
        url=url,
        driver=Driver(config, client, WorkerId("conductor@test")),
        clients=[client],
    )
    fleet.checkpoint, fleet.transfer = checkpoint or Path(), transfer
    try:
        if conductor:
            fleet.start_conductor()
        for role in config.roles():
            if role.name != without:
                fleet.add_worker(role.name)
        yield fleet
    finally:
        fleet.stop()


def build(config: FleetConfig, stage: StageName) -> BuiltStage:
    return build_stage(config, stage, Path())


def settings_of(
    config: FleetConfig,
    role: RoleName,
    built: BuiltStage,
    *,
    fingerprint: str = "",
    device: str = "",
    dtype: str = "",
) -> WorkerSettings:
    """Return the settings of a worker of `role`, with the peer access of the configuration."""
    return WorkerSettings(
        config=config,
        role=role,
        built=built,
        access=read_peer_access(config),
        fingerprint=fingerprint,
        device=device,
        dtype=dtype,
    )


@contextmanager
def processes(
    url: str, config: FleetConfig, built: Callable[[FleetConfig, StageName], BuiltStage] = build
) -> Generator[list[WorkerProcess]]:
    """Run a conductor and one worker per role, each on a thread, with the classes that their
    processes run (which reconnect to Redis by themselves).
    """
    client = connect(url, one_connection=True)
    driver = Driver(config, client, WorkerId("conductor@test"))
    workers: list[WorkerProcess] = []
    for role in config.roles():
        narrowed = for_role(config, role)
        settings = settings_of(narrowed, role.name, built(narrowed, role.stage))
        workers.append(WorkerProcess(url, settings))
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (driver.run, *(worker.run for worker in workers))
    ]
    for thread in threads:
        thread.start()
    try:
        yield workers
    finally:
        driver.stopping = True
        for worker in workers:
            worker.stop.set()
        for thread in threads:
            thread.join(timeout=20)
        client.close()
    assert not any(thread.is_alive() for thread in threads), "a fleet thread does not end"


@asynccontextmanager
async def open_processes(
    url: str, config: FleetConfig, built: Callable[[FleetConfig, StageName], BuiltStage] = build
) -> AsyncGenerator[tuple[list[WorkerProcess], FleetClient]]:
    """Run `processes`; once every role has a worker, yield the workers and a client connected as a
    gateway.
    """
    with processes(url, config, built) as workers:
        async with gateway_at(url, config) as client:
            await ready(client)
            yield workers, client


def stop_claims(loop: WorkerLoop) -> None:
    """Stop the worker from claiming tasks, from its next read of grants on; its lease stays
    valid.
    """
    last_poll, loop.availability.draining = loop.maintenance.next_poll_s, True
    wait_until(lambda: loop.maintenance.next_poll_s != last_poll, "the worker to stop claiming")


async def ready(client: FleetClient) -> None:
    async def served() -> bool:
        return not await client.telemetry.missing_roles()

    await await_until(served, "every role to be served", timeout_s=60.0)


def gateway(fleet: ThreadFleet) -> AbstractAsyncContextManager[FleetClient]:
    return gateway_at(fleet.url, fleet.config)


@asynccontextmanager
async def gateway_at(url: str, config: FleetConfig) -> AsyncGenerator[FleetClient]:
    client = await FleetClient.connect(url, config)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def open_fleet(
    url: str,
    *overrides: str,
    transfer: str = "redis",
    file: Path | None = None,
    without: str = "",
    conductor: bool = True,
) -> AsyncGenerator[tuple[ThreadFleet, FleetClient]]:
    """Run a `thread_fleet`, and yield it with a client connected as a gateway."""
    with thread_fleet(
        url, *overrides, transfer=transfer, file=file, without=without, conductor=conductor
    ) as fleet:
        async with gateway(fleet) as client:
            yield fleet, client


def fake_spec(
    fleet: ThreadFleet, *, prompt_len: int = 12, num_tokens: int = 40, seed: int = 1
) -> RequestSpec:
    """Return a request for every client edge of the graph, with at most `num_tokens` per stage."""
    return fake_spec_of(fleet.config, prompt_len=prompt_len, num_tokens=num_tokens, seed=seed)


def fake_spec_of(
    config: FleetConfig, *, prompt_len: int = 12, num_tokens: int = 40, seed: int = 1
) -> RequestSpec:
    graph = config.graph_declaration()
    return RequestSpec(
        id=new_request_id(),
        graph=graph.name,
        prompt_ids=tuple(range(prompt_len)),
        outputs=tuple(graph.media),
        sampling={stage.name: Sampling(max_tokens=num_tokens, seed=seed) for stage in graph.stages},
    )


ANSWER_TIMEOUT_S = 60.0


async def answer(
    client: FleetClient, spec: RequestSpec, blob: bytes | None = None
) -> dict[EdgeName, np.ndarray]:
    """Submit a request and return each client edge's tensors, joined. If the stream stalls, fail
    with the request's trace.
    """
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await collected(await client.requests.submit(spec, blob), spec)
    except TimeoutError as error:
        raise AssertionError(
            f"no whole answer within {ANSWER_TIMEOUT_S} s: {await client.telemetry.trace(spec.id)}"
        ) from error


async def collected(stream: ClientStream, spec: RequestSpec) -> dict[EdgeName, np.ndarray]:
    """Receive the rest of an answer and return each client edge's tensors, joined."""
    parts: dict[EdgeName, list[np.ndarray]] = {edge: [] for edge in spec.outputs}
    async for chunk in stream:
        for tensor in chunk.tensors.values():
            assert tensor.data is not None
            parts[chunk.edge].append(np.frombuffer(tensor.data, tensor.dtype))
    return {
        edge: np.concatenate(arrays) if arrays else np.empty(0) for edge, arrays in parts.items()
    }


EdgeArrays = Mapping[EdgeName, np.ndarray]


async def answer_disturbed(
    client: FleetClient,
    spec: RequestSpec,
    blob: bytes | None,
    disturb: Callable[[EdgeName, int], None],
) -> EdgeArrays:
    """Receive an answer; after each chunk call `disturb`, on a thread, with the chunk's edge and
    index.
    """
    parts: dict[EdgeName, list[np.ndarray]] = {edge: [] for edge in spec.outputs}
    async for chunk in await client.requests.submit(spec, blob):
        assert chunk.index == len(parts[chunk.edge]), "a chunk is duplicated or missing"
        arrays = [
            np.frombuffer(tensor.data or b"", tensor.dtype) for tensor in chunk.tensors.values()
        ]
        parts[chunk.edge].append(np.concatenate(arrays) if arrays else np.empty(0, np.int16))
        await asyncio.to_thread(disturb, chunk.edge, chunk.index)
    return {edge: np.concatenate(arrays) for edge, arrays in parts.items()}


def assert_same(got: EdgeArrays, expected: EdgeArrays) -> None:
    assert {edge: len(array) for edge, array in got.items()} == {
        edge: len(array) for edge, array in expected.items()
    }
    for edge, array in got.items():
        np.testing.assert_array_equal(array, expected[edge], err_msg=str(edge))


EACH_TOKEN = "edges.text.policy={kind: each, max_chunks_per_s: 0}"
"""Setting that puts each text token into a chunk of its own. The fake engine computes so fast that
chunk sizes would otherwise depend on the machine.
"""


NO_PARKING = "lease.park_after_s=3600"
"""Setting for tests that need the owner of a task for as long as its client does not read."""


def in_step(graph: Graph, credits: int = 2) -> tuple[str, ...]:
    """Return settings with so few credits that no stage runs far ahead of the client: every stage
    is still working when a test kills its worker.
    """
    return (
        f"graph={graph.name}",
        EACH_TOKEN,
        *(f"edges.{edge.name}.credits={credits}" for edge in graph.edges),
        NO_PARKING,
    )


def held(fleet: ThreadFleet) -> set[RequestId]:
    """Return the requests for which a living worker still holds any state."""
    living = [loop for loop in fleet.loops if loop.worker not in fleet.killed]
    return {request for loop in living for request in (*loop.tasks, *loop.tasks.lingering)}


async def wait_ended(client: FleetClient, request: RequestId) -> RequestTrace:
    """Return the request's trace once it has ended."""

    async def ended_trace() -> RequestTrace | None:
        trace = await client.telemetry.trace(request)
        return trace if trace is not None and trace.ended_us else None

    trace = await await_until(ended_trace, f"{request} to end")
    assert trace is not None
    return trace


async def wait_none_live(client: FleetClient, timeout_s: float = 10.0) -> None:
    """Wait until no request is live any more, so that no admission place is taken."""

    async def none_live() -> bool:
        return await client.telemetry.num_live() == 0

    await await_until(none_live, "every request to end", timeout_s)
