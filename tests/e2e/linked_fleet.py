"""A language model divided over three network namespaces whose links have a delay: an anchor, two
span workers in a route, and a span worker that stands by.

Redis is in the anchor's namespace. This process and the conductor reach it by its Unix socket, so
that the links carry only hidden states and the workers' traffic with Redis.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from fleet.config import FleetConfig, load_config
from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.control.embedded import embedded_url
from fleet.control.server import ServerOptions, server_command
from fleet.core.ids import RequestId, WorkerId, place_of, role_of
from fleet.graphs import GRAPHS
from fleet.lab.studies.namespaces import NETWORK, LinkedNamespaces, linked_namespaces
from tests.e2e.fleets import PATIENCE_S, worker_ids
from tests.e2e.span_fleets import SPAN_ROLE, STAGE
from tests.harness import in_step
from tests.support import Running, default_server, redis_answers, set_options, start_cli, wait_until

ANCHOR, FIRST, SECOND = "anchor", "first", "second"
DELAY_S, START_S = 0.01, 60.0
LEASE_S = 2
"""Lease duration in seconds, long enough for processes that share two cores with others."""
REDIS_PORT = 6379
OVER_TCP = {"UCX_TLS": "tcp"}
"""Environment that restricts UCX to TCP; otherwise UCX uses shared memory between namespaces of one
host.
"""


def whole_settings(checkpoint: Path) -> tuple[str, ...]:
    """Return the settings of a fleet with the same model in one process."""
    same = (
        "device=cpu",
        "dtype=float32",
        "numerics=invariant",
        f"lease.worker_ttl_s={LEASE_S}",
        f"checkpoint={checkpoint}",
    )
    return (*same, *in_step(GRAPHS["text"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedFleet:
    """A divided language model whose workers run in several network namespaces.

    `nixl_kib`: value of the setting `spans.nixl_kib`. `url`: address of the Redis Unix socket.
    `processes`: running worker processes. `requests`: ids of the requests answered last.
    """

    links: LinkedNamespaces
    nixl_kib: int
    folder: Path
    url: str
    config: FleetConfig
    settings: tuple[str, ...]
    control: redis.Redis
    stack: ExitStack
    processes: list[Running] = field(default_factory=list[Running])
    requests: list[RequestId] = field(default_factory=list[RequestId])

    def start_worker(self, role: str, name: str) -> Running:
        """Start a worker of `role` in the network namespace `name`."""
        env = {**OVER_TCP, "REDIS_URL": f"redis://{self.links.address(ANCHOR)}:{REDIS_PORT}"}
        options = set_options(*self.settings)
        started = start_cli(
            "worker", role, *options, cwd=self.folder, env=env, within=self.links.command(name)
        )
        self.processes.append(self.stack.enter_context(started))
        return self.processes[-1]

    @property
    def anchor(self) -> WorkerId:
        (anchor,) = wait_until(
            lambda: [worker for worker in worker_ids(self.control) if role_of(worker) == STAGE],
            "an anchor",
            PATIENCE_S,
        )
        return anchor

    @property
    def generation(self) -> int:
        """Return the generation of the anchor's route."""
        return int(text(self.control.hget(keys.worker(self.anchor), "generation")) or 0)

    def route(self) -> dict[str, WorkerId]:
        """Return the route's span workers by span, once all are listed."""

        def listed_route() -> dict[str, WorkerId]:
            hops = json.loads(text(self.control.hget(keys.worker(self.anchor), "route")) or "[]")
            route = {span: WorkerId(worker) for worker, span in hops}
            return route if set(route.values()) <= worker_ids(self.control) else {}

        return wait_until(listed_route, "a route of listed workers", PATIENCE_S)

    def span_workers(self) -> set[WorkerId]:
        return {worker for worker in worker_ids(self.control) if role_of(worker) == SPAN_ROLE}

    def namespace_of(self, worker: WorkerId) -> str:
        """Return the network namespace in which a span worker listens; "" once it has left."""
        address = text(self.control.hget(keys.worker(worker), "span_address"))
        return next(
            (
                name
                for name in self.links.names
                if address.startswith(f"{self.links.address(name)}:")
            ),
            "",
        )

    def process_of(self, worker: WorkerId) -> Running:
        return next(each for each in self.processes if each.process.pid == place_of(worker)[1])

    def num_row_bytes(self, source: str, destination: str) -> tuple[int, int]:
        """Return the number of bytes that have crossed the link between two namespaces on span
        connections, and the number by UCX.
        """
        flows = self.links.flows(source, destination)
        addresses = [
            text(self.control.hget(keys.worker(worker), "span_address"))
            for worker in self.span_workers()
        ]
        ports = {int(address.rpartition(":")[2]) for address in addresses}
        on_connections = [
            flow for flow in flows if {flow.source_port, flow.destination_port} & ports
        ]
        others = [
            flow
            for flow in flows
            if not {flow.source_port, flow.destination_port} & {*ports, REDIS_PORT}
        ]
        return sum(flow.num_bytes for flow in on_connections), sum(
            flow.num_bytes for flow in others
        )

    def num_lost_bytes(self, source: str, destination: str) -> int:
        return sum(flow.num_lost_bytes for flow in self.links.flows(source, destination))


@contextmanager
def linked_fleet(folder: Path, checkpoint: Path, nixl_kib: int) -> Iterator[LinkedFleet]:
    """Run the fleet. The span worker that stands by is in the namespace of the route's last span
    worker.
    """
    spans = (
        f"stages.{STAGE}.spans={{anchor: '0:0', workers: ['1:1', '2:output'], standby: 1, "
        f"nixl_kib: {nixl_kib}}}"
    )
    over_network = (
        "transfer.kind=nixl",
        f"transfer.interface={NETWORK}",
        "security.allow_redis_without_password=true",
    )
    settings = (*whole_settings(checkpoint), spans, *over_network)
    with (
        linked_namespaces(ANCHOR, FIRST, SECOND, delay_s=DELAY_S) as links,
        redis_within(links.command(ANCHOR), links.address(ANCHOR), folder / "redis") as url,
        connect(url) as control,
        start_cli("conductor", *set_options(*settings), cwd=folder, env={"REDIS_URL": url}),
        ExitStack() as stack,
    ):
        fleet = LinkedFleet(
            links=links,
            nixl_kib=nixl_kib,
            folder=folder,
            url=url,
            config=load_config(None, settings),
            settings=settings,
            control=control,
            stack=stack,
        )
        for name in (FIRST, SECOND):
            fleet.start_worker(SPAN_ROLE, name)
        fleet.start_worker(STAGE, ANCHOR).wait_for(r"route \d+ of lm: 1:1 on", START_S)
        fleet.start_worker(SPAN_ROLE, fleet.namespace_of(fleet.route()["2:output"])).wait_for(
            "stands by", START_S
        )
        yield fleet


@contextmanager
def redis_within(command: list[str], host: str, data_dir: Path) -> Iterator[str]:
    """Run Redis in a network namespace; yield the URL of its Unix socket."""
    data_dir.mkdir()
    server = server_command(
        default_server(), ServerOptions(data_dir=data_dir, port=REDIS_PORT, host=host)
    )
    # No other process than those of the test is in the network.
    log = data_dir.with_suffix(".log")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *server, "--protected-mode", "no"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            url = embedded_url(data_dir)
            wait_until(lambda: redis_answers(url), "Redis in its namespace", 20)
            yield url
        finally:
            process.terminate()
