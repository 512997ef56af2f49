"""The load of the measure of scale: one gateway that submits streams, takes their client edges and notes how old chunks were.

It joins through `FleetClient` as `web` does and acknowledges as it does, but speaks no HTTP: 3,750 chunks a second are not what
one Python HTTP server is for, and it is the control plane that is measured. It is a process of its own, this one, and its CPU is
not the fleet's.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import psutil

from fleet.bench.background_load import BackgroundLoad
from fleet.bench.errors import BenchError
from fleet.bench.scale_fleet import ScaleFleet
from fleet.bench.scale_result import Ages, Window
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, exchange
from fleet.core.clock import now_us
from fleet.core.errors import FleetError
from fleet.core.hops import HopCounts
from fleet.core.ids import EdgeName
from fleet.core.request import RequestSpec

ARRIVALS_PER_S = 150
MIN_SPREAD_S = 1.0
POLL_S = 0.05
PATIENCE_S = 120.0
PERCENT = (50.0, 99.0)


def spread_s(num_streams: int) -> float:
    """Over how long the streams arrive: nobody's listeners all come in the same moment."""
    return max(MIN_SPREAD_S, num_streams / ARRIVALS_PER_S)


@dataclass(slots=True)
class Stream:
    """One answer as it arrives. `fault` says what is wrong with it; "" while nothing is."""

    spec: RequestSpec
    num_chunks: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    digests: dict[EdgeName, hashlib.blake2b] = field(default_factory=dict[EdgeName, hashlib.blake2b])
    begun: bool = False
    ended: bool = False
    fault: str = ""

    def __post_init__(self) -> None:
        self.num_chunks = dict.fromkeys(self.spec.outputs, 0)
        self.digests = {edge: hashlib.blake2b() for edge in self.spec.outputs}

    def content(self) -> dict[EdgeName, bytes]:
        return {edge: digest.digest() for edge, digest in self.digests.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Everything that only grows, at one moment."""

    at_s: float
    chunks: int
    arrived: HopCounts
    between: HopCounts
    cpu_s: dict[str, float]
    own_s: float


class Load:
    """The streams of one run, on one event loop. `fleet` is being looked at, never changed."""

    def __init__(self, fleet: ScaleFleet, client: FleetClient, specs: Sequence[RequestSpec]) -> None:
        self._fleet, self._client = fleet, client
        self.streams = [Stream(spec) for spec in specs]
        self._arrived = HopCounts()
        self._redis = connect(fleet.url)
        self._jobs: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Submit them all, evenly spread; returns when the last was submitted."""
        pause_s = spread_s(len(self.streams)) / len(self.streams)
        for stream in self.streams:
            self._jobs.append(asyncio.create_task(self._listen(stream)))
            await asyncio.sleep(pause_s)

    async def _listen(self, stream: Stream) -> None:
        try:
            async for chunk in await self._client.requests.submit(stream.spec, None):
                self._arrived.add(now_us() - chunk.made_us)
                if chunk.index != stream.num_chunks[chunk.edge]:
                    stream.fault = f"chunk {chunk.index} of {chunk.edge} came as number {stream.num_chunks[chunk.edge]}"
                stream.num_chunks[chunk.edge] += 1
                for tensor in chunk.tensors.values():
                    stream.digests[chunk.edge].update(tensor.data or b"")
                stream.begun = True
        except FleetError as error:
            stream.fault = error.message
        stream.ended = True

    def num_begun(self) -> int:
        return sum(stream.begun for stream in self.streams)

    async def until(self, reached: Callable[[], bool], description: str) -> None:
        """Raises: BenchError if a process or a stream fails meanwhile, or it takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            self._fleet.check()
            faults = [stream.fault for stream in self.streams if stream.fault]
            if faults:
                raise BenchError(f"scale: a stream failed: {faults[0]}")
            if time.monotonic() > deadline:
                raise BenchError(f"scale: waited {PATIENCE_S:g} s in vain for {description}")
            await asyncio.sleep(POLL_S)

    async def window(self, seconds: float) -> Window:
        """What happens in so many seconds. Raises: BenchError if a stream ended before they were over."""
        neighbours = BackgroundLoad()
        before = await self._look()
        await asyncio.sleep(seconds)
        after = await self._look()
        others_cores = neighbours.cores()
        ended = sum(stream.ended for stream in self.streams)
        if ended:
            raise BenchError(
                f"scale: {ended} of {len(self.streams)} streams ended before the measuring did, for the fleet took too long to "
                "start them; measure on a quieter machine, or fewer --streams"
            )
        took_s = after.at_s - before.at_s
        return Window(
            seconds=took_s,
            chunks=after.chunks - before.chunks,
            between_workers=_ages(after.between - before.between),
            to_gateway=_ages(after.arrived - before.arrived),
            cpu_s={name: after.cpu_s[name] - before.cpu_s.get(name, 0.0) for name in after.cpu_s},
            generator_cores=(after.own_s - before.own_s) / took_s,
            others_cores=others_cores,
        )

    async def _look(self) -> _Look:
        between = await self._client.telemetry.hop_counts()
        chunks = await asyncio.to_thread(self._appended)
        times = psutil.Process().cpu_times()
        return _Look(
            at_s=time.monotonic(),
            chunks=chunks,
            arrived=HopCounts(list(self._arrived.counts)),
            between=between,
            cpu_s=self._fleet.cpu_s(),
            own_s=times.user + times.system,
        )

    def _appended(self) -> int:
        """Chunks in the logs of all edges of all streams, as their producers' counts say."""
        commands: list[Sequence[str]] = []
        for stream in self.streams:
            for edge in self._fleet.config.graph_declaration().edges_for(stream.spec.outputs):
                commands.append(("HGET", keys.task(stream.spec.id, edge.source), f"produced:{edge.name}"))
        return sum(int(cast(bytes, reply)) for reply in exchange(self._redis, (), *commands) if reply is not None)

    async def finish(self) -> None:
        """Wait for the end of every stream and request; then look for what was appended and never taken."""
        await self.until(lambda: all(stream.ended for stream in self.streams), "the streams to end")
        deadline = time.monotonic() + PATIENCE_S
        while await self._client.telemetry.num_live() and time.monotonic() < deadline:
            self._fleet.check()
            await asyncio.sleep(POLL_S)
        for stream in self.streams:
            view = await self._client.telemetry.trace(stream.spec.id)
            left = [edge.name for edge in view.edges if edge.produced != edge.consumed] if view else ["every edge"]
            if view is None or view.state != "finished" or left:
                state = view.state if view else "unknown"
                stream.fault = f"the request is {state}; chunks not taken on {', '.join(left) or 'no edge'}"

    async def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._redis.close()


def _ages(counts: HopCounts) -> Ages | None:
    p50, p99 = (counts.percentile_us(percent) for percent in PERCENT)
    return Ages(count=counts.total, p50_us=p50, p99_us=p99) if p50 is not None and p99 is not None else None
