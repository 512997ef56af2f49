"""The commands that run one process until SIGTERM: redis, conductor, worker, web."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.checkpoint import resolve_checkpoints
from fleet.cli.deployment import (
    Deployment,
    check_data_dir,
    open_deployment,
    open_serving_deployment,
    secure_data_dir,
)
from fleet.cli.doctor import log_redis_findings
from fleet.cli.options import ConfigFile, Keep, Overrides, ReadOnly, passed_on, with_read_only
from fleet.config.roles import Role
from fleet.config.safety import refuse_unsafe
from fleet.core.errors import ConfigError
from fleet.core.log_labels import Labels
from fleet.process.beat import UNBOUNDED_S, beat

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def redis(config: ConfigFile = None, set_: Overrides = None, kept: Keep = False) -> None:
    """Run the fleet's Redis server; idle if REDIS_URL is set.

    The server is the Valkey installed with Fleet, else redis-server or valkey-server from PATH (6.2
    or newer). Its data is an append-only file in `redis.data_dir`, or in `redis` under `data_dir`,
    and survives restarts. Clients connect to the Unix socket `redis.sock` in that folder; with
    `redis.port` also to that port, with the password in the file `password` there.

    Example: fleet redis --set redis.port=6400
    """
    deployment = open_deployment(config, set_)
    if kept:
        from fleet.cli.supervise import Surroundings, keep

        url = deployment.redis_url if deployment.embedded_redis else None
        around = Surroundings(redis_url=url, lease=deployment.config.lease)
        raise typer.Exit(asyncio.run(keep(["redis", *passed_on(config, set_)], around)))
    if not deployment.embedded_redis:
        idle("redis: REDIS_URL names a server; there is nothing to run here")
    from fleet.control.server import ServerOptions, exec_server

    options = deployment.config.redis
    if options.port == 0:
        raise ConfigError(
            "redis.port: only `fleet up` chooses a free port; set a port, or null for the Unix "
            "socket alone",
            param="redis.port",
        )
    if options.data_dir is None:
        check_data_dir(secure_data_dir(deployment.config))
    data_dir = deployment.config.redis_data_dir
    print(f"redis: {deployment.redis_url}, data in {data_dir}", flush=True)
    exec_server(ServerOptions(data_dir=data_dir, port=options.port))


def conductor(config: ConfigFile = None, set_: Overrides = None, kept: Keep = False) -> None:
    """Run a conductor, which fences workers whose lease has lapsed, grants overdue tasks again and
    ends requests that cannot continue. If several run, one leads and the others stand by.

    Example: fleet conductor
    """
    deployment = open_serving_deployment(config, set_)
    if kept:
        raise typer.Exit(_keep_fenced(["conductor", *passed_on(config, set_)], deployment))
    _await_redis(deployment)
    if not deployment.embedded_redis:
        log_redis_findings(deployment)
    from fleet.conductor.driver import run_conductor
    from fleet.control.log_stream import shipping

    with shipping(deployment.redis_url, Labels("conductor")):
        run_conductor(deployment.config, deployment.redis_url)


def worker(
    role: Annotated[
        str, typer.Argument(help="A stage; of a split one, STAGE.prefill or STAGE.decode.")
    ],
    config: ConfigFile = None,
    set_: Overrides = None,
    kept: Keep = False,
    replica: Annotated[
        int,
        typer.Option(
            min=1, help="Which device of a list this worker uses: 1 the first, 2 the second."
        ),
    ] = 1,
) -> None:
    """Run one worker of ROLE. Any number can be started, at any time, on any machine that reaches
    Redis.

    A worker joins its role when it starts and leaves it when it stops; its tasks then continue on
    other workers.

    Examples:

      fleet worker thinker --set stages.thinker.max_batch=8

      fleet worker thinker --set 'stages.thinker.device=[cuda:0, cuda:1]' --replica 2
    """
    deployment = open_serving_deployment(config, set_)
    own_role = deployment.config.role(role)
    from fleet.worker.process.peers import read_peer_access

    read_peer_access(deployment.config)  # before anything is loaded
    if kept:
        number = ["--replica", str(replica)] if replica > 1 else []
        raise typer.Exit(
            _keep_fenced(["worker", role, *number, *passed_on(config, set_)], deployment, own_role)
        )
    _await_redis(deployment)
    _run_worker(deployment, own_role, replica)


def web(
    config: ConfigFile = None,
    set_: Overrides = None,
    kept: Keep = False,
    read_only: ReadOnly = False,
) -> None:
    """Run a gateway: the OpenAI API, the Realtime WebSocket and the console, at http://HOST:PORT.

    FLEET_PORT sets the port. FLEET_API_KEY sets the key that clients must send; without it the
    gateway listens on loopback only.

    Example: fleet web --set web.port=8001
    """
    set_ = with_read_only(set_, read_only)
    deployment = open_serving_deployment(config, set_)
    refuse_unsafe(deployment.config, deployment.settings)
    if kept:
        raise typer.Exit(_keep_fenced(["web", *passed_on(config, set_)], deployment))
    from fleet.control.server import require_free_port

    require_free_port(deployment.config.web.host, deployment.config.web.port, "web.port")
    _await_redis(deployment)
    resolved = resolve_checkpoints(deployment.config)
    from fleet.control.log_stream import shipping
    from web.serve import run

    with shipping(deployment.redis_url, Labels("web")):
        run(resolved, deployment.settings, deployment.redis_url, Path(resolved.checkpoint))


def _keep_fenced(arguments: list[str], deployment: Deployment, role: Role | None = None) -> int:
    """Keep a registered command running; when it dies, fence it immediately, before its lease
    lapses. Return the exit status.

    `role`: role of a worker, during whose restart requests wait; None for other commands.
    """
    from fleet.cli.fork_client import make_starter
    from fleet.cli.supervise import Surroundings, keep

    starter = make_starter(deployment.config, role) if role else None
    around = Surroundings(redis_url=deployment.redis_url, lease=deployment.config.lease)
    return asyncio.run(keep(arguments, around, starter))


def _run_worker(deployment: Deployment, role: Role, replica: int) -> None:
    """Run a worker in this process. While it loads, waiting clients see it as starting."""
    os.nice(deployment.config.worker_nice)  # before there are threads: each has its own
    from fleet.control.starting import StartAnnouncement

    with StartAnnouncement(deployment.redis_url, role) as starting:
        starting.end_by(signal.SIGTERM)  # until the worker is loaded and handles the signal itself
        given = deployment.config
        config = given if given.engine == "fake" else resolve_checkpoints(given, role.stage)
        # OpenMP reads these once, when torch is first imported; threads that spin while they wait
        # starve Redis and NIXL.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ["OMP_NUM_THREADS"] = str(deployment.config.stage(role.stage).threads)
        from fleet.control.log_stream import shipping
        from fleet.worker.main import run_worker

        with shipping(deployment.redis_url, Labels("worker", stage=role.stage)) as labels:
            run_worker(
                config,
                role.name,
                deployment.redis_url,
                Path(config.checkpoint),
                labels,
                starting.joined,
                starting.loaded,
                replica,
            )


def _await_redis(deployment: Deployment) -> None:
    """Wait for Redis, which may still be starting. Raises: RedisUnreachable after about ten
    seconds.
    """
    from fleet.control.connect import connect

    connect(deployment.redis_url).close()


def idle(line: str) -> None:
    """Print `line`, then wait for a stop signal. Used when there is nothing to run, since the end
    of one Procfile process would end the others.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    print(line, flush=True)
    beat(UNBOUNDED_S, UNBOUNDED_S)
    signal.sigwait(STOP_SIGNALS)
    raise typer.Exit(0)
