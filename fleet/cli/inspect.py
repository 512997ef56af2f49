"""Implementation of `fleet status`, `fleet config` and `fleet checkpoint`, which start no process
of the fleet.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
import yaml

from fleet.cli.deployment import Deployment, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.clock import now_us
from fleet.graphs import DEFAULT_GRAPH
from fleet.telemetry.routes import SpanRoutes, routes_of

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from fleet.control.client import FleetClient
    from fleet.telemetry.views import RoleView, WorkerView

REFRESH_S = 1.0
WORKER_FIELDS = ("id", "role", "host", "pid", "started_us", "lease_left_s", "running", "capacity")
"""Fields of a worker in the JSON output of `fleet status`."""

checkpoint_app = typer.Typer(name="checkpoint", no_args_is_help=True)


def status(
    once: Annotated[bool, typer.Option("--once", help="Print the tables once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Show roles and their queues, workers, roles without a worker, the number of live requests,
    and routes of divided models.

    Per role: tasks queued for a worker, the age of the oldest, how many of them no worker has read
    yet (lag), workers that receive tasks, tasks running and capacity. A worker that is leaving, on
    standby or starting adds no capacity.

    Per process of a route: its layers, and how long a pass is computed in it, waits for it and is
    sent from it.

    On a terminal the tables are refreshed until Ctrl-C; elsewhere they are printed once.

    Example: fleet status --once
    """
    deployment = open_deployment(config, set_)
    deployment.connect().close()
    try:
        asyncio.run(_show(deployment, once=once, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _show(deployment: Deployment, *, once: bool, as_json: bool) -> None:
    from rich.console import Console

    from fleet.control.client import FleetClient

    console = Console()
    client = await FleetClient.connect(deployment.redis_url, deployment.config)
    try:
        state = await _read_state(client)
        if as_json:
            print(json.dumps(_as_json(state)))
        elif once or not console.is_terminal:
            console.print(_render(state))
        else:
            await _follow(client, state, console)
    finally:
        await client.stop()


async def _follow(client: "FleetClient", state: "FleetState", console: "Console") -> None:
    """Refresh the tables of `fleet status` on the terminal until Ctrl-C. `state`: first state to
    show.
    """
    from rich.live import Live

    with Live(_render(state), console=console, refresh_per_second=4) as live:
        while True:
            await asyncio.sleep(REFRESH_S)
            live.update(_render(await _read_state(client)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """State of the fleet at one moment, as `fleet status` prints it."""

    roles: "tuple[RoleView, ...]"
    workers: "tuple[WorkerView, ...]"
    missing_roles: tuple[str, ...]
    num_live: int
    refused: dict[str, str]
    spans: SpanRoutes


async def _read_state(client: "FleetClient") -> FleetState:
    workers = tuple(
        sorted(await client.telemetry.workers(), key=lambda worker: (worker.role, worker.id))
    )
    return FleetState(
        roles=tuple(await client.telemetry.roles()),
        workers=workers,
        missing_roles=tuple(await client.telemetry.missing_roles()),
        num_live=await client.telemetry.num_live(),
        refused=await client.telemetry.refused_workers(),
        spans=routes_of(workers),
    )


def _as_json(state: FleetState) -> dict[str, object]:
    workers = [
        {
            name: value
            for name, value in msgspec.to_builtins(worker).items()
            if name in WORKER_FIELDS
        }
        | {"draining": worker.draining, "standby": worker.standby}
        for worker in state.workers
    ]
    roles = [msgspec.to_builtins(role) for role in state.roles]
    rest = {
        "missing_roles": list(state.missing_roles),
        "live_requests": state.num_live,
        "refused": state.refused,
    }
    routes, unused = msgspec.to_builtins((state.spans.routes, state.spans.unused))
    return {
        "roles": roles,
        "workers": workers,
        **rest,
        "routes": routes,
        "unused_span_workers": unused,
    }


def _render(state: FleetState) -> "Group":
    from rich.console import Group

    from fleet.cli.route_tables import route_tables

    refused = [f"refused: {worker}: {why}" for worker, why in state.refused.items()]
    return Group(_role_table(state), _worker_table(state), *route_tables(state.spans), *refused)


def _role_table(state: FleetState) -> "Table":
    from rich.table import Table

    gaps = {str(role.role): f" ({role.gap})" for role in state.roles if role.gap}
    named = [f"{role}{gaps.get(str(role), '')}" for role in state.missing_roles]
    missing = f"; missing: {', '.join(named)}" if named else ""
    table = Table(title=f"{state.num_live} live requests{missing}", title_justify="left")
    for heading in ("role", "queued", "oldest", "lag", "workers", "running"):
        table.add_column(heading)
    for role in state.roles:
        table.add_row(
            role.role,
            str(role.queue_depth),
            f"{role.oldest_s:.1f} s" if role.queue_depth else "-",
            str(role.lag),
            _workers_of(role),
            f"{role.running}/{role.capacity}",
        )
    return table


def _loaded(role: "RoleView") -> str:
    return "" if role.loaded_percent is None else f" ({role.loaded_percent} % loaded)"


def _workers_of(role: "RoleView") -> str:
    others = (
        (role.standby, "on standby"),
        (role.draining, "leaving"),
        (role.starting, f"starting{_loaded(role)}"),
    )
    return str(role.workers) + "".join(f" + {count} {state}" for count, state in others if count)


def _worker_table(state: FleetState) -> "Table":
    from rich.table import Table

    table = Table()
    for heading in ("role", "worker", "host", "pid", "up", "lease left", "tasks"):
        table.add_column(heading, overflow="fold")
    for worker in state.workers:
        table.add_row(
            worker.role or "gateway",
            worker.id,
            worker.host,
            str(worker.pid),
            _duration((now_us() - worker.started_us) / 1e6),
            "leaving"
            if worker.draining
            else "standby"
            if worker.standby
            else f"{worker.lease_left_s:.1f} s",
            f"{worker.running}/{worker.capacity}",
        )
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def config(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check a deployment and print it with all defaults, as a file for --config.

    Example: fleet config --config configs/text.yaml --set web.port=8001
    """
    deployment = open_deployment(config, set_)
    source = deployment.settings.config_path or "the defaults"
    print(
        "# from "
        f"{source}\n{yaml.safe_dump(deployment.config.model_dump(mode='json'), sort_keys=False)}",
        end="",
    )


@checkpoint_app.callback()
def checkpoint() -> None:
    """Write checkpoints for trying Fleet without a download."""


@checkpoint_app.command()
def tiny(
    out_dir: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    seed: Annotated[
        int, typer.Option(help="Seed of the weights; equal seeds give equal files.")
    ] = 0,
    graph: Annotated[
        str, typer.Option(help="The graph to write a checkpoint for.")
    ] = DEFAULT_GRAPH,
) -> None:
    """Write a tiny checkpoint with random weights to OUT_DIR: it has the real architecture, and its
    answers are noise.

    Example: fleet checkpoint tiny /tmp/tiny --seed 1
    """
    from fleet.cli.checkpoint import write_tiny

    write_tiny(graph, out_dir, seed)
    print(f"fleet: wrote {out_dir.absolute()}", flush=True)
