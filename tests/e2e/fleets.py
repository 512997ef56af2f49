"""A fleet of real processes, as `fleet up` starts it: its gateway, its Redis, its workers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import redis

from fleet.config import FleetConfig, load_config
from fleet.control import keys
from fleet.control.connect import text
from fleet.control.embedded import embedded_url
from fleet.core.ids import Epoch, RequestId, StageName, WorkerId, place_of
from fleet.lab.client.client import ApiClient
from tests.support import Running, command_line, set_options, start_cli, wait_until

START_S, PATIENCE_S = 120.0, 60.0
FAKE = ("engine=fake", "device=cpu", "transfer.kind=redis", "web.port=0")
"""Settings of a fleet without a model and without NIXL, since both are slow to load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFleet:
    """A fleet of processes that `fleet up` runs in `folder`. `url`: address of its gateway."""

    running: Running
    folder: Path
    url: str

    @property
    def api(self) -> ApiClient:
        return ApiClient(self.url)

    @property
    def resolved(self) -> Path:
        """Return the configuration that the fleet's processes read."""
        return self.folder / ".fleet" / "resolved.yaml"

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which `fleet` commands address this fleet."""
        return {"FLEET_CONFIG": str(self.resolved)}

    @property
    def config(self) -> FleetConfig:
        return load_config(self.resolved)

    @property
    def redis_url(self) -> str:
        return embedded_url(self.folder / ".fleet" / "redis")

    def family(self) -> list[psutil.Process]:
        """Return every process that `fleet up` and its keepers have started."""
        return psutil.Process(self.running.process.pid).children(recursive=True)

    def commands(self) -> dict[str, psutil.Process]:
        """Return the fleet's processes, without keepers, by command: `redis`, `conductor`, `web`,
        `worker ROLE`, `jobs`.
        """
        found: dict[str, psutil.Process] = {}
        for process in self.family():
            line = command_line(process)
            if "-server" in "".join(line[:1]):
                found["redis"] = process
            elif "up" not in line and "fleet.cli" in line:
                found[" ".join(line[line.index("fleet.cli") + 1 :])] = process
        return found

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()


@contextmanager
def fleet_up(
    folder: Path,
    *settings: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Iterator[ProcessFleet]:
    """Run `fleet up` in `folder`, and yield the fleet once it is ready, at most `start_s` later."""
    with start_cli("up", *options, *set_options(*settings), cwd=folder, env=env) as running:
        url = running.wait_for(r"fleet: ready at (http://\S+)\n", timeout_s=start_s)[1]
        yield ProcessFleet(running=running, folder=folder, url=url)


def worker_ids(control: redis.Redis) -> set[WorkerId]:
    """Return the ids of all listed workers and gateways. A process whose lease lapses rejoins under
    a new id.
    """
    return {
        WorkerId(text(worker))
        for worker in cast("list[bytes]", control.zrange(keys.WORKERS, 0, -1))
    }


def process_of(worker: WorkerId) -> psutil.Process:
    return psutil.Process(place_of(worker)[1])


def owner_of(control: redis.Redis, request: RequestId, stage: StageName) -> tuple[WorkerId, Epoch]:
    """Return the owner and epoch of a stage's task; the owner is "" while no worker owns it."""
    fields = cast(
        "list[bytes | None]", control.hmget(keys.task(request, stage), ["owner", "epoch"])
    )
    owner, epoch = (text(field) for field in fields)
    return WorkerId(owner), Epoch(int(epoch))


def wait_for_workers(control: redis.Redis, role: str, num: int) -> None:
    wait_until(
        lambda: sum(worker.startswith(f"{role}@") for worker in worker_ids(control)) == num,
        f"{num} workers of {role}",
        START_S,
    )


def wait_for_another_owner(
    control: redis.Redis, request: RequestId, stage: StageName, lost: WorkerId
) -> WorkerId:
    """Wait until a worker other than `lost` has claimed the task; return its id."""

    def successor() -> WorkerId | None:
        owner, _ = owner_of(control, request, stage)
        return owner if owner not in ("", lost) else None

    return cast(WorkerId, wait_until(successor, "another worker to claim the task", PATIENCE_S))
