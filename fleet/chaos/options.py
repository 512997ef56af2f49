"""The words of `fleet chaos`, checked before anything is started. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.chaos.errors import ChaosError
from fleet.chaos.schedule import CONDUCTOR, GATEWAY, HOWS, How
from fleet.config import FleetConfig

DEFAULT_REPLICAS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options as they were typed; None and "" mean their defaults."""

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
    """Invariants: counts are positive; `roles` are those of the deployment, the conductor or the gateway, each once; `hows` each
    once. `halves`: those of the roles that serve one half of a stage.
    """

    config: Path | None
    overrides: tuple[str, ...]
    seed: int
    requests: int
    concurrency: int
    kills: int
    roles: tuple[str, ...]
    halves: tuple[str, ...]
    hows: tuple[How, ...]
    spacing_s: float
    json: Path | None
    png: Path | None


def chaos_overrides(config: FleetConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """What chaos changes about a deployment; what was given wins over it."""
    replicas = (f"stages.{place}.replicas={DEFAULT_REPLICAS}" for place in _places(config))
    return ("numerics=invariant", *replicas, *overrides)


def _places(config: FleetConfig) -> list[str]:
    """Where a deployment says how many workers there are: of a stage, or of each half of one that is split."""
    split = {stage.name for stage in config.graph_declaration().stages if config.stage(stage.name).split is not None}
    return [str(role.name).replace(".", ".split.") if role.stage in split else str(role.name) for role in config.roles()]


def check(given: ChaosOptions, config: FleetConfig) -> ChaosPlan:
    """Raises: ChaosError naming the option and the fix."""
    counts = {"--requests": given.requests, "--concurrency": given.concurrency, "--kills": given.kills}
    for name, value in (counts | {"--kills-per-role": given.kills_per_role}).items():
        if value is not None and value < 1:
            raise ChaosError(f"{name} {value}: give a whole number of at least 1", param=name)
    if not 0 <= given.spacing_s < float("inf"):
        raise ChaosError(f"--spacing {given.spacing_s:g}: give seconds, 0 or more", param="--spacing")
    if given.concurrency > config.limits.max_requests:
        bound = config.limits.max_requests
        raise ChaosError(
            f"--concurrency {given.concurrency}: this fleet admits {bound} requests at a time; "
            f"add --set limits.max_requests={given.concurrency}", param="--concurrency",
        )  # fmt: skip
    for name, path in (("--json", given.json), ("--png", given.png)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ChaosError(f"{name} {path}: there is no folder {path.absolute().parent}", param=name)
    if given.kills is not None and given.kills_per_role is not None:
        raise ChaosError("--kills-per-role counts the blows already; leave out --kills", param="--kills-per-role")
    roles = _words("--roles", given.roles, [*(str(role.name) for role in config.roles()), CONDUCTOR, GATEWAY])
    hows = tuple(How(word) for word in _words("--how", given.how, HOWS))
    return ChaosPlan(
        config=given.config,
        overrides=chaos_overrides(config, given.overrides),
        seed=given.seed,
        requests=given.requests,
        concurrency=given.concurrency,
        kills=given.kills or len(roles) * (given.kills_per_role or len(hows)),
        roles=roles,
        halves=tuple(str(role.name) for role in config.roles() if role.name in roles and role.name != role.stage),
        hows=hows,
        spacing_s=given.spacing_s,
        json=given.json,
        png=given.png,
    )


def _words(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A list with commas, each word once; all of `known` where none was given."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())) if text else tuple(known)
    for word in words:
        if word not in known:
            raise ChaosError(f"{option} {text}: {word!r} is not known; use one or more of {', '.join(known)}", param=option)
    if not words:
        raise ChaosError(f"{option} {text!r}: names nothing; use one or more of {', '.join(known)}", param=option)
    return words
