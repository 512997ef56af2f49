"""Options of `fleet chaos`, checked before anything is started. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.chaos.errors import ChaosError
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, KINDS, FaultKind
from fleet.config import FleetConfig
from fleet.reporting.files import check_report_folders

DEFAULT_REPLICAS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options as typed; None and "" stand for their defaults."""

    config: Path | None
    overrides: tuple[str, ...]
    seed: int
    requests: int
    concurrency: int
    kills: int | None
    kills_per_role: int | None
    roles: str
    how: str
    spacing_s: float
    json: Path | None
    png: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The checked options, with those of chaos among their overrides, and what follows from them for a deployment.

    Invariants: `roles` are those of the deployment, the conductor or the gateway, each once; `kinds` each once; `halves` are the
    roles that serve one half of a stage.
    """

    options: ChaosOptions
    num_faults: int
    roles: tuple[str, ...]
    halves: tuple[str, ...]
    kinds: tuple[FaultKind, ...]


def chaos_overrides(config: FleetConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Put the overrides of chaos before those of the user, which win."""
    replicas = (f"stages.{key}.replicas={DEFAULT_REPLICAS}" for key in _replica_keys(config))
    return ("numerics=invariant", *replicas, *overrides)


def _replica_keys(config: FleetConfig) -> list[str]:
    """Return where a deployment counts its workers: of a stage, or of each half of a split one."""
    split = {stage.name for stage in config.graph_declaration().stages if config.stage(stage.name).split is not None}
    return [str(role.name).replace(".", ".split.") if role.stage in split else str(role.name) for role in config.roles()]


def make_plan(options: ChaosOptions, config: FleetConfig) -> ChaosPlan:
    """Check the options. Raises: ChaosError, BadInput naming the option and the fix."""
    _check_numbers(options, config)
    check_report_folders(json=options.json, png=options.png)
    roles = _parse_list("--roles", options.roles, [*(str(role.name) for role in config.roles()), CONDUCTOR, GATEWAY])
    kinds = tuple(FaultKind(word) for word in _parse_list("--how", options.how, KINDS))
    return ChaosPlan(
        options=replace(options, overrides=chaos_overrides(config, options.overrides)),
        num_faults=options.kills or len(roles) * (options.kills_per_role or len(kinds)),
        roles=roles,
        halves=tuple(str(role.name) for role in config.roles() if role.name in roles and role.name != role.stage),
        kinds=kinds,
    )


def _check_numbers(options: ChaosOptions, config: FleetConfig) -> None:
    counts = {"--requests": options.requests, "--concurrency": options.concurrency, "--kills": options.kills}
    for name, value in (counts | {"--kills-per-role": options.kills_per_role}).items():
        if value is not None and value < 1:
            raise ChaosError(f"{name} {value}: give a whole number of at least 1", param=name)
    if not 0 <= options.spacing_s < float("inf"):
        raise ChaosError(f"--spacing {options.spacing_s:g}: give seconds, 0 or more", param="--spacing")
    if options.concurrency > config.limits.max_requests:
        raise ChaosError(
            f"--concurrency {options.concurrency}: this fleet admits {config.limits.max_requests} requests at a time; "
            f"add --set limits.max_requests={options.concurrency}",
            param="--concurrency",
        )
    if options.kills is not None and options.kills_per_role is not None:
        raise ChaosError("--kills-per-role sets the number of faults; leave out --kills", param="--kills-per-role")


def _parse_list(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse a list with commas, each name once; all of `known` for an empty text."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) if text else tuple(known)
    for name in names:
        if name not in known:
            raise ChaosError(f"{option} {text}: {name!r} is unknown; use one or more of {', '.join(known)}", param=option)
    if not names:
        raise ChaosError(f"{option} {text!r}: the list is empty; use one or more of {', '.join(known)}", param=option)
    return names
