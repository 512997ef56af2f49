"""A gateway under attack keeps its memory, its lease and its streams, and frees everything
afterwards.
"""

import asyncio
import math
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from fleet.control import keys
from fleet.control.connect import connect
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from fleet.lab.client.chat import read_stream
from fleet.lab.client.errors import StreamError
from tests.e2e.fleets import FAKE, PATIENCE_S, START_S, fleet_up, worker_ids
from tests.support import REPO, await_until, cli_env, command_line, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

GRAPH = GRAPHS[DEFAULT_GRAPH]
DRAWING = [stage for stage in GRAPH.stages if stage.default_sampling]
SHORT_S = 5.0
"""Duration of the attack in seconds without `--attack-s`."""
MAX_RSS, MAX_LEFT_RSS, ABORT_RSS = 600 << 20, 250 << 20, 3 << 30
"""Limits of the gateway's resident memory in bytes: during the attack; growth that may remain after
it (the allocator keeps what decoding one long clip needed); and the size at which the attack is
stopped to protect the machine.
"""
MAX_HEALTH_MS = 200.0
FREED_S = 35.0
"""Seconds after the attack within which the gateway must close the connections that attackers still
hold; its longest timeout is 30 s.
"""
NUM_STREAMS, FRAMES, STEP_MS, PROBE_S = 4, 25, 40, 0.05
SETTINGS = (
    *FAKE,
    *(f"stages.{stage.name}.extra.step_ms={STEP_MS}" for stage in DRAWING),
    *(f"stages.{stage.name}.sampling.max_tokens={FRAMES}" for stage in DRAWING),
)
SHORT_TIMEOUTS = (
    "web.header_timeout_s=4",
    "web.body_timeout_s=4",
    "web.send_timeout_s=1",
    "lease.gateway_timeout_s=4",
)
"""Settings of short timeouts, longer than a stall of this process on a busy machine, whose own
requests must not be refused.
"""
Stream = tuple[str, bytes]


@dataclass(slots=True, kw_only=True)
class Attacked:
    """The attacked fleet, and observations of it. `health_ms`: duration of each /health probe,
    infinite if it was not answered.
    """

    url: str
    model: str
    process: psutil.Process
    control: redis.Redis
    max_rss: int = 0
    health_ms: list[float] = field(default_factory=list[float])
    streams: list[Stream] = field(default_factory=list[Stream])
    faults: list[str] = field(default_factory=list[str])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def rss(self) -> int:
        return self.process.memory_info().rss

    def connections(self) -> int:
        """Return the number of client connections that the gateway holds."""
        held = self.process.net_connections(kind="tcp")
        return sum(bool(one.raddr) and one.laddr.port == self.port for one in held)


@pytest.fixture
def attacked(tmp_path: Path, attack_s: float | None) -> Iterator[Attacked]:
    """A fleet to attack; in a long attack the gateway has its default timeouts."""
    with (
        fleet_up(tmp_path, *SETTINGS, *(SHORT_TIMEOUTS if attack_s is None else ())) as fleet,
        connect(fleet.redis_url) as control,
    ):
        (gateway,) = [
            process for process in fleet.family() if command_line(process)[-1:] == ("web",)
        ]
        yield Attacked(url=fleet.url, model=fleet.api.model(), process=gateway, control=control)


async def listen(attacked: Attacked, seed: int) -> Stream:
    """Return the text and audio of a streamed answer. Raises: HTTPError, AssertionError or
    StreamError if the answer is incomplete.
    """
    body = {
        "model": attacked.model,
        "stream": True,
        "seed": seed,
        "modalities": ["text", "audio"],
        "audio": {"voice": "chelsie", "format": "pcm16"},
        "messages": [{"role": "user", "content": f"question {seed}"}],
    }
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", f"{attacked.url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, (answer.status_code, await answer.aread())
        stream = read_stream([(0.0, piece) async for piece in answer.aiter_bytes()])
    return "".join(text for _, text in stream.text), b"".join(pcm for _, pcm in stream.audio)


async def listen_on(attacked: Attacked, seed: int, expected: Stream, over: asyncio.Event) -> None:
    """Request one answer after another until `over` is set, and compare each with `expected`."""
    while not over.is_set():
        try:
            got = await listen(attacked, seed)
        except (httpx.HTTPError, AssertionError, StreamError) as error:
            attacked.faults.append(f"stream {seed}: {error!r}")
            continue
        attacked.streams.append(got)
        if got != expected:
            attacked.faults.append(
                f"stream {seed} differs: {len(got[0])} characters, {len(got[1])} bytes of audio"
            )


async def probe_health(attacked: Attacked, over: asyncio.Event) -> None:
    """Request /health at a steady rate, each time on a new connection, without waiting for earlier
    responses.
    """
    probes: list[asyncio.Task[float]] = []
    while not over.is_set():
        probes.append(asyncio.create_task(health_ms(attacked)))
        await pause()
    attacked.health_ms = await asyncio.gather(*probes)


async def health_ms(attacked: Attacked) -> float:
    """Return the time until /health is answered, in ms; infinite if it is not answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", attacked.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
    except OSError:
        return math.inf
    return (loop.time() - began) * 1e3 if answer.startswith(b"HTTP/1.1 200") else math.inf


async def watch_memory(attacked: Attacked, attackers: Process, over: asyncio.Event) -> None:
    while not over.is_set():
        attacked.max_rss = max(attacked.max_rss, attacked.rss())
        if attacked.max_rss > ABORT_RSS and attackers.returncode is None:
            attacked.faults.append("the attack was stopped: the gateway uses too much memory")
            attackers.kill()
            return
        await pause()


async def pause() -> None:
    due = asyncio.get_running_loop().create_future()
    due.get_loop().call_later(PROBE_S, due.set_result, None)
    await due


@asynccontextmanager
async def attackers_of(attacked: Attacked, seconds: float) -> AsyncGenerator[Process]:
    """Run the attackers until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.attackers",
        str(attacked.port),
        str(seconds),
        attacked.model,
        cwd=REPO,
        env=cli_env(),
        stdin=PIPE,
        stdout=PIPE,
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), START_S) == b"attacking\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_attacked_gateway_keeps_its_memory_its_lease_and_its_streams(
    attacked: Attacked, attack_s: float | None
) -> None:
    """An attacked gateway keeps its memory, its lease and its streams. `--attack-s 60` extends the
    attack, and checks the latency of /health.
    """
    expected = await asyncio.gather(*(listen(attacked, seed) for seed in range(NUM_STREAMS)))
    assert all(audio for _, audio in expected) and len(set(expected)) == NUM_STREAMS
    before, members, over = attacked.rss(), worker_ids(attacked.control), asyncio.Event()
    async with attackers_of(attacked, attack_s or SHORT_S) as attackers:
        assert attackers.stdout is not None
        seen = [
            *(
                asyncio.ensure_future(listen_on(attacked, seed, expected[seed], over))
                for seed in range(NUM_STREAMS)
            ),
            asyncio.ensure_future(probe_health(attacked, over)),
            asyncio.ensure_future(watch_memory(attacked, attackers, over)),
        ]
        sent = (await attackers.stdout.readline()).decode().strip()
        over.set()
        await asyncio.gather(*seen)
        report(attacked, before, sent)
        assert worker_ids(attacked.control) == members and not attacked.control.exists(keys.GONE), (
            "a lease lapsed"
        )
        assert not attacked.faults, attacked.faults[:10]
        assert len(attacked.streams) >= NUM_STREAMS
        assert attacked.max_rss <= MAX_RSS
        assert attack_s is None or percentile(attacked.health_ms, 0.99) <= MAX_HEALTH_MS
        # attackers keep their connections open: the gateway must close them by itself
        await await_until(
            lambda: asyncio.to_thread(lambda: attacked.connections() == 0),
            "connections to be closed",
            FREED_S,
        )
    wait_until(lambda: attacked.control.scard(keys.LIVE) == 0, "requests to end", FREED_S)
    wait_until(lambda: attacked.rss() <= before + MAX_LEFT_RSS, "memory to be freed", FREED_S)
    assert await listen(attacked, 0) == expected[0]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def report(attacked: Attacked, before: int, sent: str) -> None:
    """Print the measurements; pytest shows them if the test fails, or with `-rP`."""
    health = (
        f"median {percentile(attacked.health_ms, 0.5):.0f} ms, p99 "
        f"{percentile(attacked.health_ms, 0.99):.0f} ms"
    )
    unanswered = sum(math.isinf(one) for one in attacked.health_ms)
    print(
        f"\nmemory {before >> 20} MiB, then at most {attacked.max_rss >> 20} MiB, then "
        f"{attacked.rss() >> 20} MiB"
    )
    print(f"/health {health} over {len(attacked.health_ms)} connections, {unanswered} unanswered")
    print(f"{len(attacked.streams)} streams, {len(attacked.faults)} faults; sent {sent}")
