"""Costs of the control plane that must not grow with the fleet: a gateway's resumed answers, and
unclaimed grants.

Each cost is measured on its own Redis without worker processes: the fleet's own code writes and
reads what a large fleet would.
"""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self, cast

from fleet.conductor.driver import Driver
from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.client import FleetClient
from fleet.control.connect import connect, exchange, run, texts
from fleet.control.stream import ClientStream
from fleet.core.ids import RoleName, WorkerId, new_request_id
from fleet.core.request import RequestSpec
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.pair import (
    CONDUCTOR_ID,
    GATEWAY_ID,
    bare_redis,
    ok,
    register_workers,
    workers_in,
)
from fleet.lab.measure.scale_costs_result import ScaleCosts, Sizes
from fleet.lab.measure.scale_replay import AUDIO_BYTES, CODES_BYTES, measure_replay

MAX_ANSWERS, MAX_WAITING = 3000, 15_000
CLIENTS = 16
STEPS = 20
"""Number of chunks of each stream in the replay of calls."""
POLL_S = 0.01
TIMEOUT_S = 60.0


def sizes_for(streams: int) -> Sizes:
    """Return the simulated sizes for a number of streams: the published sizes for 300 or more, and
    proportionally smaller ones for fewer.
    """
    part = min(1.0, streams / 300)
    return Sizes(answers=math.ceil(MAX_ANSWERS * part), waiting=math.ceil(MAX_WAITING * part))


def measure_costs(base: FleetConfig, streams: int) -> ScaleCosts:
    """Measure the costs with `streams` streams. Raises: ConfigError if there is no Redis to start;
    BenchError if a gateway does not get its answers back.
    """
    sizes = sizes_for(streams)
    limits = base.limits.model_copy(update={"max_requests": 2 * MAX_WAITING})
    config = base.model_copy(update={"engine": "fake", "limits": limits})
    rejoin_s, take_over_s, lapsed = asyncio.run(_moves(config, sizes.answers))
    return ScaleCosts(
        sizes=sizes,
        rejoin_s=rejoin_s,
        take_over_s=take_over_s,
        lapsed_leases=lapsed,
        watch_ms=_watch_ms(config, sizes.waiting),
        replays=tuple(measure_replay(streams, STEPS, size) for size in (CODES_BYTES, AUDIO_BYTES)),
    )


def _spec(config: FleetConfig) -> RequestSpec:
    graph = config.graph_declaration()
    return RequestSpec(
        id=new_request_id(), graph=graph.name, prompt_ids=(1,), outputs=tuple(graph.media)
    )


def _submission(config: FleetConfig, spec: RequestSpec) -> scripts.Call:
    graph = config.graph_declaration()
    return scripts.submit(
        spec,
        None,
        bound=config.limits.max_requests,
        stages=graph.stages_of(spec),
        gateway=GATEWAY_ID,
        edges=[edge.name for edge in graph.edges_of(spec)],
        roles=_roles(config),
    )


def _roles(config: FleetConfig) -> list[RoleName]:
    return [role.name for role in config.roles()]


async def _moves(config: FleetConfig, count: int) -> tuple[float, float, int]:
    """Fence a gateway with `count` answers, wait until it has registered again with all of them,
    then let a second gateway resume them.

    Return both durations in seconds, and the number of lease checks that found a lease expired.
    """
    with bare_redis() as server, connect(server.url) as client:
        roles = _roles(config)
        register_workers(partial(run, client), workers_in(roles, len(roles)))
        async with AsyncExitStack() as stack:
            first, second = [await FleetClient.connect(server.url, config) for _ in range(2)]
            for gateway in (first, second):
                await gateway.start()
                stack.push_async_callback(gateway.stop)
            streams = [await first.requests.submit(_spec(config), None) for _ in range(count)]
            with _LeaseWatch(server.url, (first, second)) as leases:
                former, began_s = first.id, time.perf_counter()
                run(client, scripts.fence_worker("", former))
                await _wait_held(first, former, streams)
                rejoined_s = time.perf_counter()
                await asyncio.gather(
                    *(_resume(second, streams[number::CLIENTS]) for number in range(CLIENTS))
                )
                ended_s = time.perf_counter()
    return rejoined_s - began_s, ended_s - rejoined_s, leases.num_lapsed


async def _wait_held(
    gateway: FleetClient, former: WorkerId, streams: Sequence[ClientStream]
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while gateway.id == former or any(stream.gateway != gateway.id for stream in streams):
        if time.monotonic() > deadline:
            raise BenchError(
                f"scale: a fenced gateway did not get its {len(streams)} answers back within "
                f"{TIMEOUT_S:g} s"
            )
        await asyncio.sleep(POLL_S)


async def _resume(gateway: FleetClient, streams: Sequence[ClientStream]) -> None:
    for stream in streams:
        await gateway.requests.resume(stream.request_id)


class _LeaseWatch:
    """Thread that checks the lease of each listed gateway repeatedly. `num_lapsed` counts the
    checks that found a lease expired.
    """

    def __init__(self, url: str, gateways: Sequence[FleetClient]) -> None:
        self._url = url
        self._gateways = gateways
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.num_lapsed = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with connect(self._url) as client:
            while not self._stop.wait(POLL_S):
                names = [gateway.id for gateway in self._gateways]
                lookups = [("ZSCORE", keys.WORKERS, name) for name in names]
                (seconds, micros), *deadlines = cast(
                    "list[Any]", exchange(client, (), ("TIME",), *lookups)
                )
                now_us = int(seconds) * 1_000_000 + int(micros)
                self.num_lapsed += sum(
                    deadline is not None and float(deadline) < now_us for deadline in deadlines
                )


def _watch_ms(config: FleetConfig, waiting: int) -> float:
    """Let a conductor check `waiting` grants that no worker claims; return the duration of the
    longest pass of its loop meanwhile, in ms.
    """
    stages = len(config.graph_declaration().stages)
    with bare_redis() as server, connect(server.url) as client:
        call = partial(run, client)
        roles = _roles(config)
        register_workers(call, workers_in(roles, len(roles)))
        for _ in range(math.ceil(waiting / stages)):
            ok(call(_submission(config, _spec(config))))
        driver = Driver(config, client, CONDUCTOR_ID)
        driver.turn()
        grants = texts(client.zrange(keys.GRANTED, 0, -1))
        if len(grants) < waiting:
            raise BenchError(f"scale: {len(grants)} of {waiting} grants wait")
        client.zadd(keys.GRANTED, dict.fromkeys(grants, 1))
        driver.next_watch = 0.0
        longest_ms = _turn_ms(driver)
        while driver.next_watch == 0.0:
            longest_ms = max(longest_ms, _turn_ms(driver))
        return longest_ms


def _turn_ms(driver: Driver) -> float:
    began_s = time.perf_counter()
    driver.act()
    return (time.perf_counter() - began_s) * 1e3
