"""A control plane without processes, with its fixtures, for tests of the Lua scripts: the test
calls every script itself, and no conductor or worker runs.
"""

import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import fakeredis
import pytest
import redis

from fleet.config import load_config
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, first_text, load_scripts, run, text, texts
from fleet.control.connect import stream_entries as entries_of
from fleet.control.telemetry.logs import line_of
from fleet.core.chunk import Chunk, Location, TensorRef
from fleet.core.events import Event, TaskFailed, decode_event
from fleet.core.ids import (
    CLIENT,
    EdgeName,
    Epoch,
    RequestId,
    RoleName,
    StageName,
    WorkerId,
    role_of,
)
from fleet.core.request import RequestSpec
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.telemetry.views import LogLine, WorkerOrder
from fleet.worker.task import sender
from tests.support import RedisProcess, server_binaries, stream_entries

STAGE, ROLE, TEXT = StageName("lm"), RoleName("lm"), EdgeName("text")
REQUEST, WORKER, GATEWAY = RequestId("req-1"), WorkerId("lm@test:1:a"), WorkerId("gateway@test:1:a")
OTHER, OTHER_GATEWAY = WorkerId("lm@test:2:b"), WorkerId("gateway@test:2:b")
CONDUCTOR = WorkerId("conductor@test")
HALVES = (RoleName("lm.prefill"), RoleName("lm.decode"))
KEEP_S, LEASE_US = 600, 60_000_000
SEEN = Epoch(1_700_000_000_000_000)
"""An epoch that Redis issued before it lost its data."""
MAX_DEATHS = 2
"""Deaths over a task before it runs alone, as in `lua/common`."""
E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class Control:
    """Calls the control plane's Lua scripts in the role of the conductor, a gateway or a worker, by
    default about one request and one task of it.
    """

    client: redis.Redis
    leader: str = ""

    def lead(self) -> "Control":
        """Become the leader among the conductors."""
        self.leader = self.run(scripts.lead(CONDUCTOR, "", 60_000))
        return self

    def begin(self) -> "Control":
        """Become the leader, register a gateway and a worker, and submit the request."""
        self.lead()
        self.register(GATEWAY, "")
        self.register(WORKER)
        assert self.submit(REQUEST)[0] == "ok"
        return self

    def run(self, call: scripts.Call) -> str:
        """Run a script; return the first word of its answer."""
        return first_text(run(self.client, call))

    def epoch(self, stage: StageName = STAGE, request: RequestId = REQUEST) -> Epoch:
        return Epoch(int(text(self.client.hget(keys.task(request, stage), "epoch"))))

    def task(self, stage: StageName = STAGE, request: RequestId = REQUEST) -> dict[str, str]:
        fields = cast("dict[bytes, bytes]", self.client.hgetall(keys.task(request, stage)))
        return {text(name): text(value) for name, value in fields.items()}

    def tasks_of(self, worker: WorkerId = WORKER) -> set[bytes]:
        """Return the tasks that the worker owns or has reserved, as `request|stage`."""
        return cast("set[bytes]", self.client.smembers(keys.worker_tasks(worker)))

    def submit(self, request: str = "req-2", **options: Any) -> list[str]:
        """Submit a request; return all words of the answer."""
        return texts(run(self.client, submission(request, **options)))

    def restore(
        self, request: str = "req-2", *, epoch: Epoch = SEEN, gateway: WorkerId = GATEWAY
    ) -> list[str]:
        """Restore a request that the gateway holds at `epoch`; return all words of the answer."""
        spec = RequestSpec(
            id=RequestId(request), graph="text", prompt_ids=(1,), outputs=(TEXT,), session="talk"
        )
        call = scripts.restore(
            spec, b"sound", epoch=epoch, stages=[STAGE], edges=[TEXT], gateway=gateway
        )
        return texts(run(self.client, call))

    def grant(self, request: RequestId = REQUEST) -> Epoch:
        """Take the task from its owner, if it has one, and grant it again; return the epoch."""
        assert self.redeliver(request=request) == "ok"
        return self.epoch(request=request)

    def grant_alone(self) -> Epoch:
        """Let the task, which is granted, run alone, as after deaths over it; return the epoch."""
        old, epoch = self.task(), self.epoch()
        if old.get("reserved_for"):
            self.grant()
            old, epoch = self.task(), self.epoch()
        stream = keys.role(ROLE, first=old["first"] == "1")
        self.client.xdel(stream, old["entry"])
        entry = text(self.client.xadd(stream, {"r": REQUEST, "s": STAGE, "e": epoch, "a": "1"}))
        self.client.hset(keys.task(REQUEST, STAGE), mapping={"entry": entry, "alone": "1"})
        return epoch

    def watch(self, *, timeout_us: int = 0, grace_us: int | None = None) -> str:
        """Decide about unclaimed grants, in the role of the leader."""
        return self.run(scripts.overdue(self.leader, timeout_us, grace_us))

    def claim(
        self, epoch: Epoch | None = None, worker: WorkerId = WORKER, request: RequestId = REQUEST
    ) -> str:
        """Claim the grant of `epoch` (by default the task's current epoch) and remove its entry
        from the role's queue.
        """
        present = self.epoch(request=request)
        epoch = present if epoch is None else epoch
        entry = self.task(request=request).get("entry", "") if epoch == present else ""
        return self.run(scripts.claim(worker, ROLE, entry, request, STAGE, epoch))

    def read(
        self, worker: WorkerId = WORKER, free: int = 1, role: RoleName = ROLE
    ) -> list[RequestId]:
        """Read up to `free` grants of a role as a worker does; return their requests in order."""
        reply = run(self.client, scripts.read_grants(worker, role, free))
        entries = entries_of(reply) if isinstance(reply, list) else []
        return [RequestId(text(fields["r"])) for _, fields in entries]

    def own(self, worker: WorkerId = WORKER, *, alone: bool = False) -> Epoch:
        """Claim the task, which is granted; return the epoch at which the worker owns it. `alone`:
        True if the grant is first replaced by a grant to run alone.
        """
        epoch = self.grant_alone() if alone else self.epoch()
        assert self.claim(epoch, worker) == "ok"
        return epoch

    def append(
        self, epoch: Epoch, index: int = 0, *, finish: bool = False, request: RequestId = REQUEST
    ) -> str:
        chunk = Chunk(request=request, edge=TEXT, index=index, epoch=epoch, final=finish)
        return self.run(scripts.append([appended(chunk, finish=finish)]))

    def acknowledge(
        self, consumed: int = 1, *, delivered: bool = False, epoch: Epoch | None = None
    ) -> str:
        """Acknowledge `consumed` chunks as the client. `delivered`: whether the client has the
        whole answer.
        """
        epoch = self.epoch(CLIENT) if epoch is None else epoch
        return self.run(acknowledgement(epoch, consumed, delivered=delivered))

    def relocate(self, epoch: Epoch, agent: WorkerId, index: int = 0) -> str:
        moved = scripts.Relocation(
            request=REQUEST,
            stage=STAGE,
            epoch=epoch,
            edge=TEXT,
            consumer=CLIENT,
            index=index,
            location=place(agent),
        )
        return self.run(scripts.relocate(moved))

    def hand_off(
        self,
        epoch: Epoch,
        role: RoleName = ROLE,
        worker: WorkerId = WORKER,
        produced: Mapping[EdgeName, int] | None = None,
    ) -> str:
        call = scripts.hand_off(
            REQUEST, STAGE, epoch, worker, role, num_rows=3, data=b"blocks", produced=produced
        )
        return self.run(call)

    def lose_tensors(self, epoch: Epoch | None = None) -> str:
        """Report, as the client and only consumer, that the tensors of the task's chunks are
        lost.
        """
        epoch = self.epoch(CLIENT) if epoch is None else epoch
        return self.run(scripts.lose_tensors(REQUEST, CLIENT, epoch, STAGE))

    def lose_task(self, epoch: Epoch) -> str:
        """Report, as the task's owner, that a step of the task failed."""
        return self.run(scripts.lose_tasks([(REQUEST, STAGE, epoch)]))

    def redeliver(
        self, epoch: int = 0, request: RequestId = REQUEST, stage: StageName = STAGE
    ) -> str:
        return self.run(scripts.redeliver(request, stage, Epoch(epoch)))

    def attach(
        self, gateway: WorkerId, *, held: Epoch | None = None, request: RequestId = REQUEST
    ) -> str:
        return self.run(scripts.attach(request, gateway, held=held))

    def detach(self, gateway: WorkerId, epoch: Epoch) -> str:
        return self.run(scripts.detach(REQUEST, gateway, epoch))

    def abort(self, request: RequestId = REQUEST, right: str | Epoch = scripts.API_RIGHT) -> str:
        return self.run(scripts.abort(request, right, "stop"))

    def fail(self, message: str = "it failed", epoch: Epoch | None = None) -> str:
        """Fail the request as the owner of its task, which it is at `epoch`; by default at the
        present epoch, after a claim if the task does not run.
        """
        if epoch is None:
            epoch = self.epoch() if self.task()["state"] == "running" else self.own()
        failed = TaskFailed(
            request=REQUEST,
            stage=STAGE,
            epoch=epoch,
            code="engine_error",
            message=message,
        )
        return self.run(scripts.fail(failed))

    def condemn(self) -> None:
        """Let the task kill its workers until its request becomes a dead letter."""
        for _ in range(MAX_DEATHS + 1):
            assert self.claim() == "ok"
            self.kill()
            self.register(WORKER)

    def register(
        self,
        worker: WorkerId,
        role: str = ROLE,
        *,
        replicas: int = 1,
        standby: int = 0,
        **fields: str,
    ) -> str:
        call = scripts.register(
            worker, role, LEASE_US, {"kind": "test", **fields}, replicas=replicas, standby=standby
        )
        return self.run(call)

    def renew(self, worker: WorkerId = WORKER) -> str:
        return self.run(scripts.renew(worker, LEASE_US, {"running": 1}))

    def order(self, action: WorkerOrder, worker: WorkerId = WORKER) -> str:
        return self.run(scripts.order(worker, action))

    def drain(self, worker: WorkerId = WORKER) -> str:
        return self.run(scripts.drain(worker))

    def kill(self, worker: WorkerId = WORKER) -> None:
        """End the worker as its keeper does, which sees its process die."""
        assert self.leave(worker, died=True) == "ok"

    def fence(self, worker: WorkerId = WORKER) -> str:
        """Fence the worker, whose lease lapsed, in the role of a leader that has watched its
        current deadline for a whole lease duration.
        """
        deadline_us = int(self.client.zscore(keys.WORKERS, worker) or 0)
        return self.run(scripts.fence_worker(self.leader, worker, deadline_us=deadline_us))

    def leave(self, worker: WorkerId = WORKER, *, died: bool = False, cause: str = "") -> str:
        """End the worker's registration as the worker itself does or, with `died`, as its keeper
        does.
        """
        return self.run(scripts.fence_worker("", worker, died=died, cause=cause))

    def depose(self) -> str:
        """Make another conductor the leader; return the former leader's token."""
        old = self.leader
        self.client.delete(keys.CONDUCTOR)
        self.leader = self.run(scripts.lead(WorkerId("conductor@other"), "", 60_000))
        return old

    def events_of(self, kind: type[E]) -> list[E]:
        """Return every control-plane event of type `kind`, oldest first."""
        events = [
            decode_event(fields[b"e"]) for _, fields in stream_entries(self.client, keys.EVENTS)
        ]
        return [event for event in events if isinstance(event, kind)]

    def grants(self, role: RoleName = ROLE) -> list[tuple[str, int, bool]]:
        """Return the grants in a role's queue as tuples (stage, epoch, whether to run alone), as
        workers read them.
        """
        entries = [
            fields
            for stream in keys.role_streams(role)
            for _, fields in stream_entries(self.client, stream)
        ]
        return [(text(f[b"s"]), int(f[b"e"]), f[b"a"] == b"1") for f in entries]

    def inbox(self, worker: WorkerId = WORKER) -> list[dict[bytes, bytes]]:
        """Return the entries of a worker's inbox, oldest first."""
        return [fields for _, fields in stream_entries(self.client, keys.inbox(worker))]


def set_deadline(client: redis.Redis, worker: str, deadline_us: int) -> None:
    """Set the lease deadline of a listed worker, in its record and in the indexes."""
    role, group = map(
        text,
        cast(
            "list[bytes | None]",
            client.hmget(keys.worker(WorkerId(worker)), ["role", "settings_group"]),
        ),
    )
    indexes = [
        *(keys.role_workers(RoleName(role), status) for status in keys.STATUSES),
        keys.settings_group(group),
    ]
    for key in (keys.WORKERS, *indexes):
        client.zadd(key, {worker: deadline_us}, xx=True)


def place(agent: WorkerId) -> Location:
    return {
        "rows": TensorRef(
            agent=agent, address=0, length_bytes=4, device_id=0, generation=1, checksum=0, slot=0
        )
    }


def submission(
    request: str,
    *,
    bound: int = 8,
    roles: Sequence[RoleName] = (),
    grace_us: int = 0,
    session: str = "",
    client: str = "",
    waits: scripts.Waits = "",
) -> scripts.Call:
    spec = RequestSpec(
        id=RequestId(request), graph="text", prompt_ids=(1,), outputs=(TEXT,), session=session
    )
    return scripts.submit(
        spec,
        None,
        bound=bound,
        stages=[STAGE],
        edges=[TEXT],
        gateway=GATEWAY,
        roles=roles,
        grace_us=grace_us,
        client=client,
        waits=waits,
    )


def join(client: redis.Redis, worker: str, **fields: str) -> list[str]:
    """Register a worker whose id begins with its role. Return "ok", or the kind of refusal and its
    reason.
    """
    call = scripts.register(
        WorkerId(worker), role_of(WorkerId(worker)), LEASE_US, {"kind": "worker", **fields}
    )
    return texts(run(client, call))


def appended(
    chunk: Chunk,
    *,
    stage: StageName = STAGE,
    consumer: StageName = CLIENT,
    location: Location | None = None,
    finish: bool = False,
) -> scripts.Append:
    """Return one chunk in the form that the script `append` takes."""
    return scripts.Append(
        stage=stage,
        consumer=consumer,
        chunk=chunk,
        location=location or {},
        event=None,
        finish=finish,
        num_items=1,
    )


def acknowledgement(epoch: Epoch, consumed: int = 1, *, delivered: bool = False) -> scripts.Call:
    ack = scripts.Ack(
        request=REQUEST,
        stage=CLIENT,
        epoch=epoch,
        edge=TEXT,
        consumed=consumed,
        producer=STAGE,
        delivered=delivered,
    )
    return scripts.ack([ack])


def log_lines(client: redis.Redis, level: str = "") -> list[LogLine]:
    """Return the log lines written by scripts, oldest first; `level` "" means lines of every
    level.
    """
    found = [line_of(entry, fields) for entry, fields in entries_of(client.xrange(keys.LOGS))]
    return [line for line in found if line.logger == "fleet.control" and level in ("", line.level)]


def commands_run(client: redis.Redis) -> dict[str, int]:
    """Return the number of calls of each Redis command since `config_resetstat`."""
    stats = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    return {name.removeprefix("cmdstat_"): counts["calls"] for name, counts in stats.items()}


def num_commands(client: redis.Redis, call: scripts.Call, answer: str) -> int:
    """Return the number of Redis commands that one script call executes, and check its answer."""
    client.config_resetstat()
    assert first_text(run(client, call)) == answer
    counts = commands_run(client)
    return sum(n for name, n in counts.items() if not name.startswith(("config", "info")))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames and not metafunc.config.getoption("--redis-server"):
        metafunc.parametrize(
            "server", server_binaries(), indirect=True, ids=lambda binary: binary.name
        )


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis server for this test alone, with its data in `tmp_path`. Tests run with the newest
    and the oldest supported Redis, or with the one of `--redis-server`.
    """
    process = RedisProcess(tmp_path, getattr(request, "param", None))
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def gateway_client(redis_url: str, tmp_path: Path) -> AsyncIterator[FleetClient]:
    """A `FleetClient` connected as a gateway connects, though no gateway is registered."""
    client = await FleetClient.connect(
        redis_url, load_config(None, ("engine=fake", f"data_dir={tmp_path}"))
    )
    yield client
    await client.stop()


@pytest.fixture(params=["redis", "fakeredis"])
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    """A control plane on a real Redis server and, in a second run, on the fake Redis of the unit
    tests: both must give the same replies.
    """
    if request.param == "fakeredis":
        client: redis.Redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(6, 2)))
        load_scripts(client)
    else:
        client = connect(request.getfixturevalue("redis_url"))
    yield Control(client).begin()
    client.close()


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> EdgeName:
    """Name of an edge whose tensors all go by NIXL and never inline. The fake engine produces only
    the first tensor of a chunk.
    """
    monkeypatch.setattr(sender, "INLINE_BYTES", 0)
    graph = GRAPHS[DEFAULT_GRAPH]
    chosen = next(edge for edge in graph.edges if edge.remote)
    remote = dataclasses.replace(chosen, remote=tuple(chosen.tensors))
    edges = tuple(remote if edge is chosen else edge for edge in graph.edges)
    monkeypatch.setitem(GRAPHS, DEFAULT_GRAPH, dataclasses.replace(graph, edges=edges))
    return chosen.name
