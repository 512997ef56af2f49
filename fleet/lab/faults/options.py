"""Options of `fleet chaos`, checked before anything is started. Starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.core.ids import StageName
from fleet.graphs.training import TRAINER
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.schedule import (
    CONDUCTOR,
    GATEWAY,
    KINDS,
    REDIS,
    REDIS_KINDS,
    Fault,
    FaultKind,
    Moment,
    draw_faults,
    draw_redis_faults,
    mix,
)
from fleet.lab.report.files import check_report_folders

DEFAULT_REPLICAS, DEFAULT_SAVES = 2, 2
MIN_SOAK_REQUESTS = 100
TRAINING = (f"stages.{TRAINER}.replicas=1", f"stages.{TRAINER}.standby=1", "training.passes=1")
"""One trainer is active, so its replacement stands by."""
VOICE_TOKENS, VOICE_FRAMES = 24, 60
"""Length of a spoken answer: about five seconds."""


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
    voice: int
    saves: int | None
    json: Path | None
    png: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """The options of `--soak`. `requests` are sent evenly over `minutes`; `check`: exit with 1 if
    the soak fails.
    """

    config: Path | None
    overrides: tuple[str, ...]
    seed: int
    requests: int
    minutes: float
    concurrency: int
    check: bool
    json: Path | None
    png: Path | None

    def __post_init__(self) -> None:
        if self.requests < MIN_SOAK_REQUESTS:
            raise ChaosError(
                f"--soak {self.requests}: give at least {MIN_SOAK_REQUESTS} requests",
                param="--soak",
            )
        if not 0 < self.minutes < float("inf"):
            raise ChaosError(
                f"--minutes {self.minutes:g}: give minutes, more than 0", param="--minutes"
            )
        if self.concurrency < 1:
            raise ChaosError(
                f"--concurrency {self.concurrency}: give a whole number of at least 1",
                param="--concurrency",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The checked options, with those of chaos among their overrides, and what follows from them
    for a deployment.

    Invariants: `roles` are those of the deployment, the conductor or the gateway, each once;
    `kinds` are those of faults in processes of these roles, `redis_kinds` the others, each once.
    `moments`: that for which every other fault in a role waits. `num_faults`, `num_redis_faults`:
    of these kinds. `num_saved`: conversations that are saved, at each of `saved_stages`.
    """

    options: ChaosOptions
    num_faults: int
    num_redis_faults: int
    roles: tuple[str, ...]
    moments: Mapping[str, Moment]
    kinds: tuple[FaultKind, ...]
    redis_kinds: tuple[FaultKind, ...]
    num_saved: int = 0
    saved_stages: tuple[str, ...] = ()

    @property
    def total_faults(self) -> int:
        return self.num_faults + self.num_redis_faults

    @property
    def has_second_gateway(self) -> bool:
        """A fault in a gateway, or in its connection to Redis, needs another one at which clients
        continue.
        """
        return bool(self.kinds and GATEWAY in self.roles) or FaultKind.PARTITION in self.redis_kinds

    @property
    def has_silent_gateways(self) -> bool:
        """Return True if a gateway may send nothing without breaking its connections."""
        return (
            bool(FaultKind.STOP in self.kinds and GATEWAY in self.roles)
            or FaultKind.PARTITION in self.redis_kinds
        )

    @property
    def may_forget(self) -> bool:
        """Return True if Redis may lose ended requests, or delete their audio early for lack of
        memory.
        """
        return any(
            kind in self.redis_kinds for kind in (FaultKind.OOM, FaultKind.TAIL, FaultKind.FAILOVER)
        )

    def schedule(self) -> list[Fault]:
        """Draw the faults from the seed."""
        seed, spacing_s = self.options.seed, self.options.spacing_s
        in_processes = (
            draw_faults(seed, self.num_faults, self.roles, self.kinds, spacing_s, self.moments)
            if self.kinds
            else []
        )
        return mix(
            seed,
            in_processes,
            draw_redis_faults(seed, self.num_redis_faults, self.redis_kinds, spacing_s),
        )


def chaos_overrides(
    config: FleetConfig, overrides: Sequence[str], *, voice: bool = False
) -> tuple[str, ...]:
    """Put the overrides of chaos before those of the user, which win.

    `voice`: those of voice sessions too: short answers, and their audio as it is in the log.
    """
    replicas = (f"stages.{key}.replicas={DEFAULT_REPLICAS}" for key in _replica_keys(config))
    training = TRAINING if config.training.enabled else ()
    return (
        "numerics=invariant",
        *replicas,
        *training,
        *(_voice_overrides(config) if voice else ()),
        *overrides,
    )


def _voice_overrides(config: FleetConfig) -> tuple[str, ...]:
    sampled = (stage for stage in config.graph_declaration().stages if stage.default_sampling)
    rows = ((stage.name, VOICE_TOKENS if stage.main else VOICE_FRAMES) for stage in sampled)
    return (
        "web.max_leading_silence_ms=null",
        *(f"stages.{name}.sampling.max_tokens={count}" for name, count in rows),
    )


def _replica_keys(config: FleetConfig) -> list[str]:
    """Return where a deployment counts its workers: of a stage, or of each half of a split one.
    Span workers follow from it.
    """
    roles = [role for role in config.roles() if not role.hosts_spans]
    return [
        str(role.name).replace(".", ".split.") if _is_half(config, role) else str(role.name)
        for role in roles
    ]


def _is_half(config: FleetConfig, role: Role) -> bool:
    return config.stage(role.stage).split is not None


def make_plan(options: ChaosOptions, config: FleetConfig) -> ChaosPlan:
    """Check the options. Raises: ChaosError, BadInput naming the option and the fix."""
    _check_numbers(options, config)
    check_report_folders(json=options.json, png=options.png)
    roles = _parse_list(
        "--roles", options.roles, [*(str(role.name) for role in config.roles()), CONDUCTOR, GATEWAY]
    )
    kinds, redis_kinds = _parse_kinds(options.how)
    num_faults, num_redis_faults = _count_faults(options, len(roles), len(kinds), len(redis_kinds))
    saved_stages = _saved_stages(config)
    num_saved = _count_saved(options, config, saved_stages)
    return ChaosPlan(
        options=replace(
            options, overrides=chaos_overrides(config, options.overrides, voice=options.voice > 0)
        ),
        num_faults=num_faults,
        num_redis_faults=num_redis_faults,
        roles=roles,
        moments=_moments(config, roles, saved_stages if num_saved else ()),
        kinds=kinds,
        redis_kinds=redis_kinds,
        num_saved=num_saved,
        saved_stages=saved_stages if num_saved else (),
    )


def _moments(
    config: FleetConfig, roles: Sequence[str], saved_stages: Sequence[str]
) -> dict[str, Moment]:
    own = [role for role in config.roles() if role.name in roles]
    halves = {str(role.name): Moment.HAND_OFF for role in own if _is_half(config, role)}
    return halves | {str(role.name): Moment.SAVE for role in own if role.stage in saved_stages}


def _saved_stages(config: FleetConfig) -> tuple[str, ...]:
    """Return the stages of which conversations can be saved: of the divided ones, if there are
    any.
    """
    caching = [stage.name for stage in config.graph_declaration().stages if stage.default_sampling]
    able = [
        name
        for name in caching
        if config.stage(name).split is None and config.engine_of(name) == "torch"
    ]
    return tuple([name for name in able if _is_divided(config, name)] or able)


def _is_divided(config: FleetConfig, stage: StageName) -> bool:
    return any(role.hosts_spans for role in config.roles_of(stage))


def _count_saved(options: ChaosOptions, config: FleetConfig, stages: Sequence[str]) -> int:
    """Return the number of conversations to save: by default some where layers are divided."""
    keeps = (
        bool(stages)
        and config.limits.max_cached_conversations > 0
        and config.lease.prefix_cache_s > 0
    )
    if options.saves is None:
        return (
            DEFAULT_SAVES
            if keeps and any(_is_divided(config, StageName(stage)) for stage in stages)
            else 0
        )
    if options.saves and not keeps:
        raise ChaosError(
            f"--saves {options.saves}: no stage of this fleet has conversations that can be "
            "saved; that needs a stage without "
            "split on the engine torch, lease.prefix_cache_s and limits.max_cached_conversations",
            param="--saves",
        )
    return options.saves


def _parse_kinds(how: str) -> tuple[tuple[FaultKind, ...], tuple[FaultKind, ...]]:
    """Return the kinds of faults in processes, and those in Redis; only the former for an empty
    text.
    """
    names = _parse_list("--how", how, [*FaultKind, REDIS]) if how else tuple(KINDS)
    chosen = [
        *(kind for kind in FaultKind if kind in names),
        *(REDIS_KINDS if REDIS in names else ()),
    ]
    return tuple(kind for kind in KINDS if kind in chosen), tuple(
        kind for kind in REDIS_KINDS if kind in chosen
    )


def _count_faults(
    options: ChaosOptions, num_roles: int, num_kinds: int, num_redis_kinds: int
) -> tuple[int, int]:
    """Return the numbers of faults in processes and in Redis: --kills in all, or so many per role
    and per kind of Redis's.
    """
    in_processes = num_roles * num_kinds
    if options.kills:
        num_redis = round(options.kills * num_redis_kinds / (in_processes + num_redis_kinds))
        return options.kills - num_redis, num_redis
    per_role = (options.kills_per_role or num_kinds) if num_kinds else 0
    return num_roles * per_role, num_redis_kinds * (options.kills_per_role or 1)


def _check_numbers(options: ChaosOptions, config: FleetConfig) -> None:
    counts = {
        "--requests": options.requests,
        "--concurrency": options.concurrency,
        "--kills": options.kills,
    }
    for name, value in (counts | {"--kills-per-role": options.kills_per_role}).items():
        if value is not None and value < 1:
            raise ChaosError(f"{name} {value}: give a whole number of at least 1", param=name)
    if options.saves is not None and options.saves < 0:
        raise ChaosError(
            f"--saves {options.saves}: give a number of conversations, 0 or more", param="--saves"
        )
    if options.voice < 0:
        raise ChaosError(
            f"--voice {options.voice}: give a number of voice sessions, 0 or more", param="--voice"
        )
    if not 0 <= options.spacing_s < float("inf"):
        raise ChaosError(
            f"--spacing {options.spacing_s:g}: give seconds, 0 or more", param="--spacing"
        )
    if options.concurrency > config.limits.max_requests:
        raise ChaosError(
            f"--concurrency {options.concurrency}: this fleet admits "
            f"{config.limits.max_requests} requests at a time; "
            f"add --set limits.max_requests={options.concurrency}",
            param="--concurrency",
        )
    if options.kills is not None and options.kills_per_role is not None:
        raise ChaosError(
            "--kills-per-role sets the number of faults; leave out --kills",
            param="--kills-per-role",
        )


def _parse_list(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse a list with commas, each name once; all of `known` for an empty text."""
    names = (
        tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if text
        else tuple(known)
    )
    for name in names:
        if name not in known:
            raise ChaosError(
                f"{option} {text}: {name!r} is unknown; use one or more of {', '.join(known)}",
                param=option,
            )
    if not names:
        raise ChaosError(
            f"{option} {text!r}: the list is empty; use one or more of {', '.join(known)}",
            param=option,
        )
    return names
