"""A Redis server and requests with one edge between two owned tasks, for benchmarks that act as
both the producing and the consuming worker.
"""

import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.control.embedded import embedded_url
from fleet.control.notices import Grant
from fleet.control.server import ServerOptions, find_server, server_command
from fleet.core.chunk import Chunk, WireTensor
from fleet.core.clock import now_us
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.process.parent_death import signalled_with_parent
from fleet.worker.process.redis_link import RedisLink

PRODUCER, CONSUMER, EDGE = StageName("producer"), StageName("consumer"), EdgeName("hop")
WORKERS = {PRODUCER: WorkerId("producer@bench"), CONSUMER: WorkerId("consumer@bench")}
GATEWAY_ID = WorkerId("gateway@bench")
CONDUCTOR_ID = WorkerId("conductor@bench")
LEASE_US = 600_000_000
BLOCK_MS = 200

RunScript = Callable[[scripts.Call], Reply]


@dataclass(frozen=True, slots=True)
class BareRedis:
    """A running Redis server with a fleet's settings, without a fleet."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system + times.children_user + times.children_system


@contextmanager
def bare_redis() -> Iterator[BareRedis]:
    """Run a Redis server for the duration of the block. Raises: ConfigError if no Redis is
    installed.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-redis-") as folder:
        options = ServerOptions(data_dir=Path(folder))
        command = server_command(find_server(), options)
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=signalled_with_parent(signal.SIGKILL),
        )
        try:
            yield BareRedis(embedded_url(options.data_dir), process.pid)
        finally:
            process.terminate()
            process.wait()


def open_requests(
    call: RunScript, links: Mapping[StageName, RedisLink], count: int
) -> list[tuple[RequestId, Mapping[StageName, Epoch]]]:
    """Register the gateway and the two workers, submit `count` requests, and claim both tasks of
    each. Return each request with the epochs of its tasks.
    """
    register_workers(call, [(worker, RoleName(stage)) for stage, worker in WORKERS.items()])
    return [_open_request(call, links, count) for _ in range(count)]


def _open_request(
    call: RunScript, links: Mapping[StageName, RedisLink], bound: int
) -> tuple[RequestId, Mapping[StageName, Epoch]]:
    request = new_request_id()
    ok(call(submit_of(request, bound)))
    epochs: dict[StageName, Epoch] = {}
    for stage in WORKERS:
        grant = links[stage].exchange((), free_slots=1, block_ms=BLOCK_MS).grants[0]
        ok(call(claim_of(stage, grant)))
        epochs[stage] = grant.epoch
    return request, epochs


def links_of(connect: Callable[[WorkerId, RoleName], RedisLink]) -> dict[StageName, RedisLink]:
    """Return a link to Redis for each of the two workers, by stage. `connect`: makes a link."""
    return {stage: connect(worker, RoleName(stage)) for stage, worker in WORKERS.items()}


def register_workers(call: RunScript, workers: Iterable[tuple[WorkerId, RoleName]]) -> None:
    """Register a gateway, and workers in their roles."""
    for worker, role in ((GATEWAY_ID, ""), *workers):
        call(scripts.register(worker, role, LEASE_US, {"kind": "bench"}))


def workers_in(roles: Sequence[RoleName], count: int) -> list[tuple[WorkerId, RoleName]]:
    """Return ids of `count` workers, in the roles in turn."""
    turns = [roles[n % len(roles)] for n in range(count)]
    return [(WorkerId(f"{role}@bench:{n}:a"), role) for n, role in enumerate(turns)]


def submit_of(request: RequestId, bound: int) -> scripts.Call:
    """Return the script call that submits a request with one edge."""
    spec = RequestSpec(id=request, graph="hop", prompt_ids=())
    return scripts.submit(
        spec, None, bound=bound, stages=tuple(WORKERS), edges=(EDGE,), gateway=GATEWAY_ID
    )


def claim_of(stage: StageName, grant: Grant) -> scripts.Call:
    """Return the script call that claims a granted task for its worker."""
    return scripts.claim(
        WORKERS[stage], RoleName(stage), grant.entry, grant.request, stage, grant.epoch
    )


def num_commands(stats: Mapping[str, Any]) -> int:
    """Return the number of commands that Redis has run since its start, also in scripts, without
    INFO. `stats`: reply of `INFO commandstats`.
    """
    return sum(stats[name]["calls"] for name in stats if name != "cmdstat_info")


def ok(reply: Reply) -> None:
    """Check that the first result in a script's reply is "ok". Raises: AssertionError."""
    _is_ok(cast("list[Reply]", reply)[0])


def all_ok(reply: Reply) -> None:
    """Check that each result in the reply of `append` is "ok". Raises: AssertionError."""
    for result in cast("list[Reply]", reply):
        _is_ok(result)


def _is_ok(result: Reply) -> None:
    status = text(result)
    assert status == "ok", f"a script refused: {status}"


def append_of(
    request: RequestId,
    epoch: Epoch,
    index: int,
    tensors: Mapping[str, WireTensor],
    first_row: int = 0,
) -> scripts.Append:
    """Return the append of one chunk, for `scripts.append`, with the present time as its timestamp.
    `first_row`: position of the chunk's first row in the edge.
    """
    chunk = Chunk(
        request=request,
        edge=EDGE,
        index=index,
        epoch=epoch,
        tensors=dict(tensors),
        produced_us=now_us(),
        first_row=first_row,
    )
    return scripts.Append(
        stage=PRODUCER,
        consumer=CONSUMER,
        chunk=chunk,
        location={},
        event=None,
        finish=False,
        num_items=1,
    )


def ack_of(request: RequestId, epoch: Epoch, consumed: int) -> scripts.Ack:
    """Return the acknowledgement of the first `consumed` chunks, for `scripts.ack`."""
    return scripts.Ack(
        request=request,
        stage=CONSUMER,
        epoch=epoch,
        edge=EDGE,
        consumed=consumed,
        producer=PRODUCER,
    )
