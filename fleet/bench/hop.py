"""One hop of the control plane: from a producer's `append` to the chunk in a blocked consumer's hands, through real Redis.

Two processes, as in a fleet: the producer sends one small chunk at a time, and the next only when the consumer waits again, in
the worker's own blocking read; so no chunk ever queues behind another.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, cast

import msgspec

from fleet.bench.errors import BenchError
from fleet.bench.stats import Summary, summarise
from fleet.control import scripts
from fleet.control.connect import Reply, connect, run, text
from fleet.control.embedded import embedded_url
from fleet.control.notices import ChunkNotice
from fleet.control.server import ServerOptions, find_server, server_command
from fleet.core.chunk import Chunk, WireTensor
from fleet.core.clock import now_us
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.worker.redis_link import RedisLink, TurnResult

PRODUCER, CONSUMER, EDGE = StageName("producer"), StageName("consumer"), EdgeName("hop")
WORKERS = {PRODUCER: WorkerId("producer@bench"), CONSUMER: WorkerId("consumer@bench")}
GATEWAY_ID = WorkerId("gateway@bench")
LEASE_US = 600_000_000
PAYLOAD_CODES = 16
"""One frame of codes: what most chunks of speech carry between stages."""
PAUSE_S = 0.001
"""From the consumer's word that it has had a chunk to the next append: by then it waits in Redis."""
READY = b"\n"
"""What the consumer says, on the producer's standard input."""
WARM_UP = 50
ACK_STRIDE = 8
FREE_SLOTS = 8
"""Of a worker that is neither idle nor full; with a single one left every read of the inbox would be cut short."""
NUM_PINGS = 500
BLOCK_MS = 200
PATIENCE_S = 20.0


Ask = Callable[[scripts.Call], Reply]


class HopResult(msgspec.Struct, frozen=True, kw_only=True):
    """Units: microseconds. `delivery_us` is append to delivery; `append_us` is how long the producer's own calls took.

    `ping_us` is Redis's bare round trip at the same pace, which tells a slow machine from a slow script: after a pause every
    process involved must be woken first.
    """

    delivery_us: tuple[float, ...]
    append_us: tuple[float, ...]
    ping_us: tuple[float, ...]

    @property
    def delivery(self) -> Summary | None:
        return summarise(self.delivery_us)

    @property
    def append(self) -> Summary | None:
        return summarise(self.append_us)

    @property
    def ping(self) -> Summary | None:
        return summarise(self.ping_us)


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the producing process is told, as the first line of its standard input."""

    redis_url: str
    request: RequestId
    epoch: Epoch
    count: int


def measure_hops(count: int, advance: Callable[[int], None]) -> HopResult:
    """`count` hops through a Redis started for it, set as a fleet's own is.

    Raises: BenchError if a chunk never arrives; ConfigError if there is no Redis to start.
    """
    with _server() as url:
        client = connect(url, one_connection=True)
        ping_us = tuple(_took_us(client.ping) for _ in range(NUM_PINGS))
        links = {stage: RedisLink(client, worker, RoleName(stage)) for stage, worker in WORKERS.items()}
        job, epoch = _open_request(partial(run, client), links, url, count + WARM_UP)
        command = [sys.executable, "-m", "fleet.bench.hop"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
            assert producer.stdin is not None and producer.stdout is not None
            try:
                producer.stdin.write(msgspec.json.encode(job) + b"\n")
                delivery_us = _consume(links[CONSUMER], job, epoch, producer.stdin, advance)
                append_us = msgspec.json.decode(producer.stdout.read(), type=tuple[float, ...])
            finally:
                producer.kill()
                client.close()
    return HopResult(delivery_us=tuple(delivery_us[WARM_UP:]), append_us=append_us[WARM_UP:], ping_us=ping_us)


def _took_us(call: Callable[[], Reply]) -> float:
    time.sleep(PAUSE_S)
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="fleet-bench-redis-") as folder:
        options = ServerOptions(data_dir=Path(folder))
        command = server_command(find_server(), options)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield embedded_url(options.data_dir)
        finally:
            process.terminate()
            process.wait()


def _open_request(ask: Ask, links: Mapping[StageName, RedisLink], url: str, count: int) -> tuple[_Job, Epoch]:
    """A live request of one edge between two owned tasks; also the epoch of the consumer's."""
    spec = RequestSpec(id=new_request_id(), graph="hop", prompt_ids=())
    ask(scripts.register(GATEWAY_ID, "", LEASE_US, {"kind": "bench"}))
    for stage, worker in WORKERS.items():
        ask(scripts.register(worker, stage, LEASE_US, {"kind": "bench"}))
    _ok(ask(scripts.submit(spec, None, bound=1, stages=tuple(WORKERS), edges=(EDGE,), gateway=GATEWAY_ID)))
    leader = text(ask(scripts.lead(WorkerId("conductor@bench"), "", LEASE_US // 1000)))
    epochs: dict[StageName, Epoch] = {}
    for stage, worker in WORKERS.items():
        _ok(ask(scripts.grant(leader, spec.id, stage, RoleName(stage), Epoch(0))))
        grant = links[stage].exchange((), free_slots=1, block_ms=BLOCK_MS).grants[0]
        _ok(ask(scripts.claim(worker, RoleName(stage), grant.entry, spec.id, stage, grant.epoch)))
        epochs[stage] = grant.epoch
    return _Job(redis_url=url, request=spec.id, epoch=epochs[PRODUCER], count=count), epochs[CONSUMER]


def _ok(reply: Reply) -> Sequence[Reply]:
    parts = cast("list[Reply]", reply)
    assert text(parts[0]) == "ok", f"a script refused: {text(parts[0])}"
    return parts


def _consume(link: RedisLink, job: _Job, epoch: Epoch, producer: IO[bytes], advance: Callable[[int], None]) -> list[float]:
    """Wait for every chunk as a worker does, acknowledging in strides, and note how old each was on arrival."""
    ages_us: list[float] = []
    acked = 0
    deadline = time.monotonic() + PATIENCE_S
    _say_ready(producer)
    while len(ages_us) < job.count:
        due = len(ages_us) - acked >= ACK_STRIDE
        acked = len(ages_us) if due else acked
        ack = scripts.Ack(request=job.request, stage=CONSUMER, epoch=epoch, edge=EDGE, consumed=acked, producer=PRODUCER)
        mail = link.exchange([scripts.ack([ack])] if due else [], free_slots=FREE_SLOTS, block_ms=BLOCK_MS)
        arrived_us = time.time_ns() / 1000
        ages_us += _ages(mail, arrived_us)
        if mail.notices:
            if len(ages_us) > WARM_UP:
                advance(1)
            _say_ready(producer)
            deadline = time.monotonic() + PATIENCE_S
        elif time.monotonic() > deadline:
            raise BenchError(f"hop: chunk {len(ages_us)} of {job.count} never arrived; did the producing process die?")
    return ages_us


def _say_ready(producer: IO[bytes]) -> None:
    """A producer that has sent its last chunk may be gone."""
    with suppress(BrokenPipeError):
        producer.write(READY)
        producer.flush()


def _ages(mail: TurnResult, arrived_us: float) -> list[float]:
    return [arrived_us - notice.chunk.made_us for notice in mail.notices if isinstance(notice, ChunkNotice)]


def _produce(job: _Job) -> list[float]:
    """Append one chunk after another, each stamped just before it is sent; how long each call took, in microseconds."""
    client = connect(job.redis_url, one_connection=True)
    data = bytes(4 * PAYLOAD_CODES)
    took_us: list[float] = []
    for index in range(job.count):
        sys.stdin.buffer.read(len(READY))
        time.sleep(PAUSE_S)
        chunk = Chunk(
            request=job.request,
            edge=EDGE,
            index=index,
            epoch=job.epoch,
            tensors={"codes": WireTensor("int32", (1, PAYLOAD_CODES), data)},
            made_us=now_us(),
        )
        item = scripts.Append(stage=PRODUCER, consumer=CONSUMER, chunk=chunk, location={}, event=None, finish=False, num_items=1)
        began_s = time.perf_counter()
        answer = cast("list[Reply]", run(client, scripts.append([item])))
        took_us.append((time.perf_counter() - began_s) * 1e6)
        assert text(answer[0]) == "ok", f"append refused: {text(answer[0])}"
    client.close()
    return took_us


def main() -> None:
    """The producing process: a job on standard input, its times on standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    sys.stdout.buffer.write(msgspec.json.encode(_produce(job)))


if __name__ == "__main__":
    main()
