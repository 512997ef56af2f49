"""`fleet up`: runs all processes of a deployment on this machine. Takes the stages from the
graph.
"""

import http.client
import os
import ssl
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import yaml

from fleet.cli.checkpoint import resolve_checkpoints
from fleet.cli.deployment import (
    Deployment,
    check_data_dir,
    open_serving_deployment,
    secure_data_dir,
)
from fleet.cli.doctor import refuse_unready
from fleet.cli.environment import USES, without_secrets
from fleet.cli.options import ConfigFile, Overrides, ReadOnly, with_read_only
from fleet.config import FleetConfig
from fleet.config.safety import refuse_unsafe
from fleet.config.schema import WebConfig
from fleet.core.ids import RoleName
from fleet.process.free_ports import free_ports
from fleet.process.lan_address import EVERYWHERE, lan_address
from fleet.process.private import write_private

if TYPE_CHECKING:
    from fleet.cli.keeper import ProcessStarter
    from fleet.cli.manager import FleetManager

RESOLVED_NAME = "resolved.yaml"
READY_POLL_S = 0.25


def up(config: ConfigFile = None, set_: Overrides = None, read_only: ReadOnly = False) -> None:
    """Run the whole fleet on this machine: Redis, a conductor, each stage's replicas, the gateway
    and the job worker.

    `fleet scale` and the console change the number of a role's workers while the fleet runs, until
    the last `fleet up` of the fleet ends.

    In addition to a stage's replicas, `standby` workers load their weights and wait: when a worker
    of the stage is lost, one of them replaces it immediately, and the restarted worker becomes a
    standby.

    Prints "fleet: ready" and the address once requests are served. A process that dies is
    restarted, after a pause that grows while it keeps dying; a process that cannot start ends all
    of them. Ctrl-C stops them all, and so does the death of this command. Redis is not started if
    REDIS_URL is set.

    Examples:

      fleet up

      fleet up --config configs/text.yaml --set web.port=8001 --set stages.lm.replicas=2

      fleet up --config configs/text.yaml --set stages.lm.standby=1
    """
    from fleet.cli.manager import FleetManager
    from fleet.cli.scaling import WorkerScaling
    from fleet.cli.supervise import Surroundings

    deployment = open_serving_deployment(config, with_read_only(set_, read_only))
    refuse_unsafe(deployment.config, deployment.settings)
    _check_peers(deployment.config)
    _check_redis(deployment)
    refuse_unready(deployment)
    resolved = _resolve(deployment)
    resolved_file = _store(resolved)
    url = f"{resolved.web.scheme}://{reachable(resolved.web.host)}:{resolved.web.port}"
    watch = threading.Thread(
        target=_report_ready, args=(url, _url_elsewhere(resolved.web)), daemon=True
    )
    surroundings = Surroundings(redis_url=deployment.redis_url, lease=resolved.lease)
    manager = FleetManager(surroundings, watch.start)
    keep = partial(_keep, manager, resolved, resolved_file)
    for name, arguments in list_processes(deployment, resolved):
        keep(name, arguments)
    manager.follower = WorkerScaling(
        deployment.redis_url,
        resolved.roles(),
        manager,
        lambda role, number: keep(*worker_process(resolved, role, number)),
    )
    manager.loop()
    if manager.culprit:
        print(
            f"fleet: {manager.culprit} ended, see its lines above; everything else was stopped",
            file=sys.stderr,
            flush=True,
        )
        raise typer.Exit(1)


def _keep(
    manager: "FleetManager", config: FleetConfig, config_file: Path, name: str, arguments: list[str]
) -> None:
    environment = _environment(arguments[0], config_file)
    manager.keep(name, arguments, environment, _starter_of(arguments, config))


def _check_peers(config: FleetConfig) -> None:
    """Check the transfer settings once, as each worker does when it starts. Raises: ConfigError."""
    from fleet.worker.process.peers import read_peer_access

    read_peer_access(config)


def _check_redis(deployment: Deployment) -> None:
    """Check the connection to Redis, and the ports, before any process starts. Raises:
    RedisUnreachable, ConfigError.
    """
    from fleet.control.connect import connect
    from fleet.control.server import find_server, lock_data_dir, require_free_port

    if deployment.embedded_redis:
        find_server()
        check_data_dir(secure_data_dir(deployment.config))
        # Refuses the folder of a running fleet before its resolved configuration is overwritten.
        os.close(lock_data_dir(deployment.config.redis_data_dir))
        if deployment.config.redis.port is not None:
            require_free_port("127.0.0.1", deployment.config.redis.port, "redis.port")
    else:
        connect(deployment.redis_url).close()
    require_free_port(deployment.config.web.host, deployment.config.web.port, "web.port")


def _resolve(deployment: Deployment) -> FleetConfig:
    """Return the configuration with the values that all processes must share: free ports, absolute
    folders, the checkpoint folder.
    """
    config = resolve_checkpoints(deployment.config)
    web_port, redis_port = free_ports(2)
    web = config.web.model_copy(update={"port": config.web.port or web_port})
    port = redis_port if config.redis.port == 0 else config.redis.port
    redis = config.redis.model_copy(update={"port": port, "data_dir": config.redis_data_dir})
    secret = config.security.fleet_secret
    security = config.security.model_copy(
        update={"fleet_secret": secret.absolute() if secret else None}
    )
    sections = {"web": web, "redis": redis, "security": security}
    return config.model_copy(update={**sections, "data_dir": config.data_dir.absolute()})


def _store(config: FleetConfig) -> Path:
    """Write the resolved configuration to the data folder, print its non-default values, and return
    the file's path.
    """
    path = secure_data_dir(config) / RESOLVED_NAME
    write_private(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    changed = yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    print(
        f"fleet: configuration resolved to {path}; values other than the defaults:\n{changed}",
        end="",
        flush=True,
    )
    return path


def _environment(command: str, config_file: Path) -> dict[str, str]:
    """Return the environment of `fleet COMMAND`, with only the secrets that this command uses.

    FLEET_PORT is left out, since the configuration file already contains it, unless `--set`
    overrode it.
    """
    env = {
        key: value
        for key, value in without_secrets(os.environ, USES[command]).items()
        if key != "FLEET_PORT"
    }
    return {**env, "FLEET_CONFIG": str(config_file), "PYTHONUNBUFFERED": "1"}


def _starter_of(arguments: list[str], config: FleetConfig) -> "ProcessStarter":
    from fleet.cli.fork_client import make_starter
    from fleet.cli.keeper import NewProcesses

    return (
        make_starter(config, config.role(arguments[1]))
        if arguments[0] == "worker"
        else NewProcesses()
    )


def list_processes(deployment: Deployment, config: FleetConfig) -> list[tuple[str, list[str]]]:
    """Return the name and the `fleet` arguments of each process, in start order."""
    named: list[tuple[str, list[str]]] = [("redis", ["redis"])] if deployment.embedded_redis else []
    named.append(("conductor", ["conductor"]))
    for role in config.roles():
        for number in range(1, role.replicas + role.standby + 1):
            named.append(worker_process(config, role.name, number))
    return [*named, ("web", ["web"]), ("jobs", ["jobs"])]


def worker_process(config: FleetConfig, role: RoleName, number: int) -> tuple[str, list[str]]:
    """Return the process name and the `fleet` arguments of a role's worker. `number`: number of the
    worker within the role, from 1.
    """
    has_list = isinstance(config.of_role(config.role(role)).device, tuple)
    of_list = ["--replica", str(number)] if has_list else []
    return f"{role}.{number}", ["worker", role, *of_list]


def reachable(host: str) -> str:
    """Return an address at which clients on this machine reach `host`, which may mean "all
    interfaces".
    """
    if host in EVERYWHERE:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _url_elsewhere(web: WebConfig) -> str:
    """Return the gateway's address for other devices, such as phones, if it listens on all
    addresses; otherwise "".
    """
    address = lan_address() if web.host in EVERYWHERE else None
    return f"{web.scheme}://{address}:{web.port}" if address else ""


def _report_ready(url: str, elsewhere: str) -> None:
    """Wait until the gateway answers at `url`, then print its address. `elsewhere`: gateway address
    for other devices; "" if they cannot reach it.
    """
    pause = threading.Event()
    while not _is_ready(url):
        pause.wait(READY_POLL_S)
    # One write, so that no other process's line gets in between.
    sys.stdout.write(
        f"fleet: ready at {url}{f' and, from other devices, {elsewhere}' if elsewhere else ''}\n"
    )
    sys.stdout.flush()


def _is_ready(url: str) -> bool:
    scheme, _, address = url.partition("://")
    connection = http.client.HTTPConnection(address, timeout=5)
    if scheme == "https":
        connection = http.client.HTTPSConnection(address, timeout=5, context=_own_gateway_context())
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _own_gateway_context() -> ssl.SSLContext:
    """Return a TLS context for readiness requests to this fleet's own gateway. Certificates are not
    verified, since the gateway's may be self-signed or for another name.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
