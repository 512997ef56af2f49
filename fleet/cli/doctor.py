"""`fleet doctor`: reports what the deployment exposes, whether Redis, NIXL and this host are ready,
and what to change.
"""

import logging
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from fleet.cli.deployment import Deployment, check_data_dir, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.config import FleetConfig
from fleet.config.placement import gpu_of, place_workers
from fleet.config.safety import GATEWAY_CHECKS, Check, Finding, run_checks
from fleet.config.settings import (
    EnvironmentSettings,
    check_redis_password,
    check_redis_placeholder,
    has_password,
)
from fleet.core.errors import ConfigError
from fleet.process.fleet_secret import read_fleet_secret
from fleet.process.private import OTHERS
from fleet.transfer.agent import has_cuda_transports
from fleet.transfer.reach import reach_of

log = logging.getLogger(__name__)


def check_redis_access(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    url = settings.redis_url
    if placeholder := _refusal(lambda: check_redis_placeholder(url)):
        yield Finding("Redis", "", refusal=placeholder, param="REDIS_URL")
        return
    if url is None:
        port = config.redis.port
        also = f", and 127.0.0.1:{port} with a generated password" if port is not None else ""
        yield Finding("Redis", f"embedded: a Unix socket of this user{also}")
        return
    refusal = _refusal(lambda: check_redis_password(url))
    permitted = (
        "security.allow_redis_without_password"
        if refusal and config.security.allow_redis_without_password
        else ""
    )
    value = f"REDIS_URL, {'with' if has_password(url) else 'without'} a password"
    yield Finding("Redis", value, refusal=refusal, permitted_by=permitted, param="REDIS_URL")


def check_transfers(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    if config.transfer.kind == "redis":
        yield Finding("transfers", "tensors are sent through Redis")
        return
    interface = config.transfer.interface
    refusal = _refusal(lambda: reach_of(interface, allow_public=False))
    allowed = config.security.allow_public_transfer and not _refusal(
        lambda: reach_of(interface, allow_public=True)
    )
    permitted = "security.allow_public_transfer" if refusal and allowed else ""
    value = (
        f"tensors are readable at {interface}, without authentication"
        if interface
        else "tensors are readable on this host only"
    )
    yield Finding(
        "transfers",
        value,
        refusal=refusal,
        permitted_by=permitted,
        param="transfer.interface",
    )


def check_hand_offs(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    """Report whether the halves of a split stage exchange KV caches directly between GPUs or
    through host memory. Yields nothing if no half may be on a GPU.
    """
    placed = [
        one
        for one in place_workers(config)
        if config.stage(one.role.stage).split and gpu_of(config, one.device)
    ]
    if not placed or config.transfer.kind == "redis":
        return
    wanted, can = config.transfer.buffer_device, has_cuda_transports()
    param, missing = "transfer.buffer_device", "no installed NIXL has UCX's transports for CUDA"
    if wanted != "cpu" and can:
        value = "keys and values on a GPU are read there by NIXL, where it can register its memory"
    else:
        cause = "transfer.buffer_device is cpu" if wanted == "cpu" else missing
        value = f"keys and values on a GPU are copied through host memory: {cause}"
    refusal = (
        f"{param}: {missing}; install nixl with them, or set auto"
        if wanted == "cuda" and not can
        else ""
    )
    yield Finding("hand-offs", value, refusal=refusal, param=param)


def check_fleet_secret(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    file = config.security.fleet_secret
    value = (
        f"records of workers are signed with {file}"
        if file
        else "records of workers are not signed"
    )
    refusal = _refusal(lambda: read_fleet_secret(file)) if file else ""
    yield Finding("fleet secret", value, refusal=refusal, param="security.fleet_secret")


def check_data_folder(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    folder = config.data_dir.absolute()
    if not folder.is_dir():
        yield Finding("data folder", f"{folder} will be created for this user alone")
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    access = (
        "others can list it; the files that Fleet writes there are private"
        if mode & OTHERS
        else "this user alone"
    )
    refusal = _refusal(lambda: check_data_dir(folder)) if settings.redis_url is None else ""
    yield Finding(
        "data folder",
        f"{folder} (mode {mode:04o}): {access}",
        refusal=refusal,
        param="data_dir",
    )


def _refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError as error:
        return error.message
    return ""


CONFIGURED: tuple[Check, ...] = (
    *GATEWAY_CHECKS,
    check_redis_access,
    check_transfers,
    check_hand_offs,
    check_fleet_secret,
    check_data_folder,
)
"""Checks that only need the configuration, in output order."""

Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Check the configuration and files only; contact neither Redis nor workers.",
    ),
]


def doctor(config: ConfigFile = None, set_: Overrides = None, offline: Offline = False) -> None:
    """Check the deployment: one line each, OK, WARNING or REFUSED (with the remedy), or PERMITTED
    by a setting.

    The configuration: what others can reach. Redis: version, append-only file, memory, replicas,
    clock, latency, scripts, rights. Transfers: NIXL reads on this host, and from workers that are
    listed. This host: ports, certificates, disk, checkpoint.

    Run it on each host, with the configuration and environment of the fleet, before the start or
    while the fleet runs. Every check has a time limit. The exit status is 1 if anything is refused;
    `fleet up` would not start then.

    Examples:

      fleet doctor --set web.host=0.0.0.0

      fleet doctor --set transfer.interface=10.0.0.0/16
    """
    deployment = open_deployment(config, set_)
    results = list(_run(deployment, offline))
    verdict_width = max(len(finding.verdict) for finding in results)
    subject_width = max(len(finding.subject) for finding in results)
    for finding in results:
        print(
            f"{finding.verdict:{verdict_width}}  {finding.subject:{subject_width}}  {finding.text}"
        )
    if any(finding.refused for finding in results):
        raise typer.Exit(1)


def _run(deployment: Deployment, offline: bool) -> Iterator[Finding]:
    # Imported here and below, since every command imports this module when it starts.
    from fleet.cli.host_checks import FILE_CHECKS, check_checkpoint, check_ports
    from fleet.cli.network_checks import NETWORK_CHECKS

    config, settings = deployment.config, deployment.settings
    configured = list(run_checks(CONFIGURED, config, settings))
    yield from configured
    if not offline and not any(
        finding.refused and finding.param == "REDIS_URL" for finding in configured
    ):
        yield from run_checks(NETWORK_CHECKS, config, settings)
    if not offline:
        yield from check_ports(config, settings)
    yield from run_checks((*FILE_CHECKS, check_checkpoint), config, settings)


def refuse_unready(deployment: Deployment) -> None:
    """Run the quick checks of this host, and of a Redis that Fleet does not start itself, before a
    fleet starts; print their warnings.

    Raises: ConfigError for the first finding with status REFUSED.
    """
    from fleet.cli.host_checks import FILE_CHECKS
    from fleet.cli.network_checks import QUICK_REDIS_CHECK

    checks = FILE_CHECKS if deployment.embedded_redis else (*FILE_CHECKS, QUICK_REDIS_CHECK)
    for finding in run_checks(checks, deployment.config, deployment.settings):
        if finding.refused:
            raise ConfigError(finding.refusal, param=finding.param)
        if finding.warning:
            print(
                f"fleet: warning: {finding.subject}: {finding.warning}", file=sys.stderr, flush=True
            )


def log_redis_findings(deployment: Deployment) -> None:
    """Log the refusals and warnings of the quick checks of a Redis that Fleet does not run itself,
    when a conductor starts.
    """
    from fleet.cli.network_checks import QUICK_REDIS_CHECK

    for finding in run_checks((QUICK_REDIS_CHECK,), deployment.config, deployment.settings):
        if finding.refused or finding.warning:
            log.log(
                logging.ERROR if finding.refused else logging.WARNING,
                "%s: %s",
                finding.subject,
                finding.text,
            )
