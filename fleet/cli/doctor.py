"""`fleet doctor`: reports what the deployment exposes, and which of it is refused at start. Starts and opens nothing."""

import stat
from collections.abc import Callable, Iterator

import typer

from fleet.cli.deployment import check_data_dir, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.config import FleetConfig
from fleet.config.placement import gpu_of, place_workers
from fleet.config.safety import GATEWAY_CHECKS, Check, Finding, run_checks
from fleet.config.settings import EnvironmentSettings, check_redis_password, check_redis_placeholder, has_password
from fleet.core.errors import ConfigError
from fleet.core.fleet_secret import read_fleet_secret
from fleet.core.private import OTHERS
from fleet.transfer.agent import has_cuda_transports
from fleet.transfer.reach import reach_of


def check_redis_access(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    url = settings.redis_url
    if placeholder := _refusal(lambda: check_redis_placeholder(url)):
        yield Finding(subject="Redis", value="", refusal=placeholder, param="REDIS_URL")
        return
    if url is None:
        port = config.redis.port
        also = f", and 127.0.0.1:{port} with a generated password" if port is not None else ""
        yield Finding(subject="Redis", value=f"embedded: a Unix socket of this user{also}")
        return
    refusal = _refusal(lambda: check_redis_password(url))
    permitted = "security.allow_redis_without_password" if refusal and config.security.allow_redis_without_password else ""
    value = f"REDIS_URL, {'with' if has_password(url) else 'without'} a password"
    yield Finding(subject="Redis", value=value, refusal=refusal, permitted_by=permitted, param="REDIS_URL")


def check_transfers(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    if config.transfer.kind == "redis":
        yield Finding(subject="transfers", value="tensors are sent through Redis")
        return
    interface = config.transfer.interface
    refusal = _refusal(lambda: reach_of(interface, allow_public=False))
    allowed = config.security.allow_public_transfer and not _refusal(lambda: reach_of(interface, allow_public=True))
    permitted = "security.allow_public_transfer" if refusal and allowed else ""
    value = (
        f"tensors are readable at {interface}, without authentication" if interface else "tensors are readable on this host only"
    )
    yield Finding(subject="transfers", value=value, refusal=refusal, permitted_by=permitted, param="transfer.interface")


def check_hand_offs(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    """Show where the halves of a split stage read each other's keys and values, if one may be on a GPU."""
    placed = [one for one in place_workers(config) if config.stage(one.role.stage).split and gpu_of(config, one.device)]
    if not placed or config.transfer.kind == "redis":
        return
    wanted, can = config.transfer.buffer_device, has_cuda_transports()
    param, missing = "transfer.buffer_device", "no installed NIXL has UCX's transports for CUDA"
    if wanted != "cpu" and can:
        value = "keys and values on a GPU are read there by NIXL, where it can register its memory"
    else:
        cause = "transfer.buffer_device is cpu" if wanted == "cpu" else missing
        value = f"keys and values on a GPU are copied through host memory: {cause}"
    refusal = f"{param}: {missing}; install nixl with them, or set auto" if wanted == "cuda" and not can else ""
    yield Finding(subject="hand-offs", value=value, refusal=refusal, param=param)


def check_fleet_secret(config: FleetConfig, _settings: EnvironmentSettings) -> Iterator[Finding]:
    file = config.security.fleet_secret
    value = f"records of workers are signed with {file}" if file else "records of workers are not signed"
    refusal = _refusal(lambda: read_fleet_secret(file)) if file else ""
    yield Finding(subject="fleet secret", value=value, refusal=refusal, param="security.fleet_secret")


def check_data_folder(config: FleetConfig, settings: EnvironmentSettings) -> Iterator[Finding]:
    folder = config.data_dir.absolute()
    if not folder.is_dir():
        yield Finding(subject="data folder", value=f"{folder} will be created for this user alone")
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    access = "others can list it; the files that Fleet writes there are private" if mode & OTHERS else "this user alone"
    refusal = _refusal(lambda: check_data_dir(folder)) if settings.redis_url is None else ""
    yield Finding(subject="data folder", value=f"{folder} (mode {mode:04o}): {access}", refusal=refusal, param="data_dir")


def _refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except ConfigError as error:
        return error.message
    return ""


CHECKS: tuple[Check, ...] = (
    *GATEWAY_CHECKS, check_redis_access, check_transfers, check_hand_offs, check_fleet_secret, check_data_folder,
)  # fmt: skip
"""Checks in the order of the output."""


def doctor(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Check what the deployment exposes: one line each, OK, REFUSED (with the remedy) or PERMITTED by a setting.

    The exit status is 1 if the deployment would be refused at start.

    Example: fleet doctor --set web.host=0.0.0.0
    """
    deployment = open_deployment(config, set_)
    results = list(run_checks(CHECKS, deployment.config, deployment.settings))
    verdict_width = max(len(finding.verdict) for finding in results)
    subject_width = max(len(finding.subject) for finding in results)
    for finding in results:
        text = finding.refusal if finding.refused else finding.value
        print(f"{finding.verdict:{verdict_width}}  {finding.subject:{subject_width}}  {text}")
    if any(finding.refused for finding in results):
        raise typer.Exit(1)
