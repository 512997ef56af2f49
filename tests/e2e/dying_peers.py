"""Deaths of peers beside two survivors: what a worker still has open after its peers have died.

Real worker processes with real NIXL, of both halves of a split stage. The surviving decode half
connects to each new prefill half, and each new decode half to the surviving prefill half; then the
new workers are killed and fenced. Run as a module, this file prints the survivors' files, threads,
shared segments and memory after each round of deaths:

    python -m tests.e2e.dying_peers ROUNDS PAIRS
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from fleet.control import scripts
from fleet.control.connect import connect, run
from fleet.core.ids import place_of
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.e2e.fleets import START_S, worker_ids
from tests.support import RedisProcess, Running, set_options, start_cli, wait_until

STAGE = GRAPHS[DEFAULT_GRAPH].stages[0].name
PREFILL, DECODE = f"{STAGE}.prefill", f"{STAGE}.decode"
SETTINGS = (
    "engine=fake",
    "device=cpu",
    "transfer.kind=nixl",
    f"stages.{STAGE}.split={{}}",
)
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenResources:
    """What a process has open. `segments`: mappings of shared memory of UCX."""

    files: int
    threads: int
    segments: int
    rss_kib: int

    @classmethod
    def of(cls, running: Running) -> "OpenResources":
        process = psutil.Process(running.process.pid)
        return cls(
            files=process.num_fds(),
            threads=process.num_threads(),
            segments=Path(f"/proc/{process.pid}/maps").read_text().count("ucx_shm"),
            rss_kib=process.memory_info().rss // 1024,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivors:
    """A prefill and a decode worker that live on. `unconnected`: number of threads of a decode
    worker without peers.
    """

    folder: Path
    redis_url: str
    client: redis.Redis
    prefill: Running
    decode: Running
    unconnected: int

    def kill_peers(self, pairs: int) -> None:
        """Start `pairs` workers of each half, kill them once each is connected, and fence them."""
        before = threads_of(self.decode)
        with ExitStack() as running:
            peers = [
                running.enter_context(start_worker(role, self.redis_url, self.folder))
                for role in (PREFILL, DECODE) * pairs
            ]
            for peer in peers:
                peer.wait_for("is ready", timeout_s=START_S)
            wait_until(
                lambda: (
                    threads_of(self.decode) >= before + pairs
                    and all(threads_of(each) > self.unconnected + pairs for each in peers[1::2])
                ),
                "every decode worker to be connected to every prefill worker",
            )
            for peer in peers:
                peer.process.kill()
            for peer in peers:
                peer.process.wait()
        fence(self.client, peers)

    def open_resources(self) -> tuple[OpenResources, OpenResources]:
        """Return what the prefill and the decode survivor have open."""
        return OpenResources.of(self.prefill), OpenResources.of(self.decode)

    def are_settled(self) -> bool:
        """Return True if the decode survivor is connected to the prefill survivor alone."""
        return threads_of(self.decode) <= self.unconnected + 1


def threads_of(running: Running) -> int:
    return psutil.Process(running.process.pid).num_threads()


def start_worker(role: str, redis_url: str, folder: Path) -> AbstractContextManager[Running]:
    return start_cli(
        "worker",
        role,
        *set_options(*SETTINGS, "lease.worker_ttl_s=3600"),
        cwd=folder,
        env={"REDIS_URL": redis_url},
    )


def fence(client: redis.Redis, dead: Sequence[Running]) -> None:
    """Fence the workers of dead processes, as their keepers would."""
    pids = {running.process.pid for running in dead}
    for worker in worker_ids(client):
        if place_of(worker)[1] in pids:
            run(client, scripts.fence_worker("", worker, died=True, cause="SIGKILL"))


@contextmanager
def survivors(redis_url: str, folder: Path) -> Iterator[Survivors]:
    with (
        connect(redis_url) as client,
        start_worker(DECODE, redis_url, folder) as decode,
    ):
        decode.wait_for("is ready", timeout_s=START_S)
        unconnected = threads_of(decode)
        with start_worker(PREFILL, redis_url, folder) as prefill:
            prefill.wait_for("is ready", timeout_s=START_S)
            wait_until(lambda: threads_of(decode) > unconnected, "the survivors to be connected")
            yield Survivors(
                folder=folder,
                redis_url=redis_url,
                client=client,
                prefill=prefill,
                decode=decode,
                unconnected=unconnected,
            )


def main(rounds: int, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        server = RedisProcess(Path(folder))
        server.start()
        closing.callback(server.stop)
        alive = closing.enter_context(survivors(server.url, Path(folder)))
        for number in range(1, rounds + 1):
            alive.kill_peers(pairs)
            with suppress(AssertionError):  # printed nevertheless
                wait_until(alive.are_settled, "the dead to be forgotten", SETTLE_S)
            print(2 * pairs * number, "deaths:", *alive.open_resources(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
