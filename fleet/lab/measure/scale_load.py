"""Load generator of the scale benchmark: acts as a gateway that submits streams, reads their client
edges and records the chunks' ages.

The generator registers through `FleetClient` and acknowledges as `web` does, but without HTTP: the
control plane is measured, and one Python HTTP server does not serve 3,750 chunks a second. The
generator runs in this process, whose CPU is not counted as the fleet's.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import psutil

from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.connect import connect, exchange
from fleet.core.clock import now_us
from fleet.core.errors import FleetError
from fleet.core.ids import EdgeName
from fleet.core.request import RequestSpec
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.scale_fleet import ScaleFleet
from fleet.lab.measure.scale_result import Ages, Window
from fleet.lab.report.background_load import BackgroundLoad
from fleet.telemetry.counts import LatencyCounts

ARRIVALS_PER_S = 150
MIN_SPREAD_S = 1.0
POLL_S = 0.05
TIMEOUT_S = 120.0
PERCENT = (50.0, 99.0)


def spread_s(num_streams: int) -> float:
    """Return the time over which the starts of `num_streams` streams are spread."""
    return max(MIN_SPREAD_S, num_streams / ARRIVALS_PER_S)


@dataclass(slots=True)
class Stream:
    """A stream, with the number of received chunks and a digest of their content for each edge.
    `fault`: the latest fault, "" if there is none.
    """

    spec: RequestSpec
    num_chunks: dict[EdgeName, int] = field(default_factory=dict[EdgeName, int])
    digests: dict[EdgeName, hashlib.blake2b] = field(
        default_factory=dict[EdgeName, hashlib.blake2b]
    )
    begun: bool = False
    ended: bool = False
    fault: str = ""

    def __post_init__(self) -> None:
        self.num_chunks = dict.fromkeys(self.spec.outputs, 0)
        self.digests = {edge: hashlib.blake2b() for edge in self.spec.outputs}

    def content(self) -> dict[EdgeName, bytes]:
        return {edge: digest.digest() for edge, digest in self.digests.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """Values of all counters, which only grow, at one moment."""

    at_s: float
    chunks: int
    arrived: LatencyCounts
    between: LatencyCounts
    cpu_s: dict[str, float]
    own_s: float


class StreamLoad:
    """All streams of one run, on one event loop. `fleet` is only read."""

    def __init__(
        self, fleet: ScaleFleet, client: FleetClient, specs: Sequence[RequestSpec]
    ) -> None:
        self._fleet, self._client = fleet, client
        self.streams = [Stream(spec) for spec in specs]
        self._arrived = LatencyCounts()
        self._redis = connect(fleet.url)
        self._receivers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Submit all streams, evenly spread over `spread_s`."""
        pause_s = spread_s(len(self.streams)) / len(self.streams)
        for stream in self.streams:
            self._receivers.append(asyncio.create_task(self._receive(stream)))
            await asyncio.sleep(pause_s)

    async def _receive(self, stream: Stream) -> None:
        try:
            async for chunk in await self._client.requests.submit(stream.spec, None):
                self._arrived.add(now_us() - chunk.produced_us)
                if chunk.index != stream.num_chunks[chunk.edge]:
                    stream.fault = (
                        f"chunk {chunk.index} of {chunk.edge} arrived as number "
                        f"{stream.num_chunks[chunk.edge]}"
                    )
                stream.num_chunks[chunk.edge] += 1
                for tensor in chunk.tensors.values():
                    stream.digests[chunk.edge].update(tensor.data or b"")
                stream.begun = True
        except FleetError as error:
            stream.fault = error.message
        stream.ended = True

    def num_begun(self) -> int:
        return sum(stream.begun for stream in self.streams)

    async def wait_for(self, reached: Callable[[], bool], description: str) -> None:
        """Poll until `reached()` is True. `description`: awaited state, for the error. Raises:
        BenchError if a process or a stream fails, or after `TIMEOUT_S`.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not reached():
            self._fleet.check()
            faults = [stream.fault for stream in self.streams if stream.fault]
            if faults:
                raise BenchError(f"scale: a stream failed: {faults[0]}")
            if time.monotonic() > deadline:
                raise BenchError(
                    f"scale: timed out after {TIMEOUT_S:g} s waiting for {description}"
                )
            await asyncio.sleep(POLL_S)

    async def window(self, seconds: float) -> Window:
        """Measure for `seconds` and return the differences of all counters. Raises: BenchError if a
        stream ends before the window does.
        """
        background_load = BackgroundLoad()
        before = await self._read_counters()
        await asyncio.sleep(seconds)
        after = await self._read_counters()
        others_cores = background_load.cores()
        ended = sum(stream.ended for stream in self.streams)
        if ended:
            raise BenchError(
                f"scale: {ended} of {len(self.streams)} streams ended before the window, since "
                "the fleet was slow to start them; "
                "use a quieter machine, or fewer --streams"
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

    async def _read_counters(self) -> _Counters:
        between = await self._client.telemetry.hop_counts()
        chunks = await asyncio.to_thread(self._appended)
        times = psutil.Process().cpu_times()
        return _Counters(
            at_s=time.monotonic(),
            chunks=chunks,
            arrived=LatencyCounts(list(self._arrived.counts)),
            between=between,
            cpu_s=self._fleet.cpu_s(),
            own_s=times.user + times.system,
        )

    def _appended(self) -> int:
        """Return the number of chunks appended to all edges of all streams, from their producers'
        counters.
        """
        commands: list[Sequence[str]] = []
        for stream in self.streams:
            for edge in self._fleet.config.graph_declaration().edges_of(stream.spec):
                commands.append(
                    ("HGET", keys.task(stream.spec.id, edge.source), f"produced:{edge.name}")
                )
        return sum(
            int(cast(bytes, reply))
            for reply in exchange(self._redis, (), *commands)
            if reply is not None
        )

    async def finish(self) -> None:
        """Wait for the end of every stream and request; then set the fault of each stream whose
        request did not finish, or whose log has unread chunks.
        """
        await self.wait_for(
            lambda: all(stream.ended for stream in self.streams), "the streams to end"
        )
        deadline = time.monotonic() + TIMEOUT_S
        while await self._client.telemetry.num_live() and time.monotonic() < deadline:
            self._fleet.check()
            await asyncio.sleep(POLL_S)
        for stream in self.streams:
            view = await self._client.telemetry.trace(stream.spec.id)
            left = (
                [edge.name for edge in view.edges if edge.produced != edge.consumed]
                if view
                else ["every edge"]
            )
            if view is None or view.state != "finished" or left:
                state = view.state if view else "unknown"
                stream.fault = (
                    f"the request is {state}; unread chunks on {', '.join(left) or 'no edge'}"
                )

    async def close(self) -> None:
        for receiver in self._receivers:
            receiver.cancel()
        await asyncio.gather(*self._receivers, return_exceptions=True)
        self._redis.close()


def _ages(counts: LatencyCounts) -> Ages | None:
    p50, p99 = (counts.percentile_us(percent) for percent in PERCENT)
    return (
        Ages(count=counts.total, p50_us=p50, p99_us=p99)
        if p50 is not None and p99 is not None
        else None
    )
