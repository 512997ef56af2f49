"""Options of `fleet chaos`, checked before anything is started. Starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path

from fleet.config import FleetConfig
from fleet.config.roles import Role
from fleet.core.ids import StageName
from fleet.graphs.training import TRAINER
from fleet.lab.faults.errors import ChaosError
from fleet.lab.faults.schedule import (
    ALL,
    CONDUCTOR,
    FORGETTING_KINDS,
    GATEWAY,
    KINDS,
    PROCESS_KINDS,
    REDIS,
    REDIS_KINDS,
    Fault,
    FaultKind,
    Moment,
    draw_faults,
    draw_redis_faults,
    draw_slow_readers,
    mix,
)
from fleet.lab.report.files import check_report_folders

DEFAULT_REPLICAS, DEFAULT_SAVES = 2, 2
MIN_SOAK_REQUESTS = 100
TRAINING = (f"stages.{TRAINER}.replicas=1", f"stages.{TRAINER}.standby=1", "training.passes=1")
"""Settings for a deployment that trains draft heads: an active trainer, a standby to replace it,
and on average one training pass per sample.
"""
SHORT_CREDIT = "limits.max_unread_bytes=16384"
SHORT_WAIT = "limits.max_wait_s=2"
"""Setting for the longest wait of a request for a place. A gateway sends nothing during the wait,
which must be shorter than the silence after which a client takes its gateway for frozen.
"""
LONG_SESSIONS = "voice.max_session_s=86400"
"""Setting for the longest voice session, longer than any run: a session that the gateway ended for
its age would count as lost.
"""
VOICE_TOKENS, VOICE_FRAMES = 24, 60
"""Length limits of a spoken answer: about five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Options of `fleet chaos` as typed; None and "" stand for their defaults.

    `soak`: number of requests of a soak, which loads the fleet evenly over `minutes` and injects no
    planned faults; None for a run with planned faults. Without a soak, `minutes` limits the time in
    which faults are injected. `check`: whether a failed soak exits with status 1.
    """

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    seed: int
    requests: int
    concurrency: int
    kills: int | None = None
    kills_per_role: int | None = None
    roles: str = ""
    how: str = ""
    spacing_s: float
    voice: int = 0
    saves: int | None = None
    soak: int | None = None
    minutes: float | None = None
    check: bool = False
    json: Path | None = None
    png: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The checked options of a chaos run, with the overrides of chaos added, and what follows from
    them for a deployment.

    Invariants: `roles` are roles of the deployment, the conductor or the gateway, each once;
    `kinds` are kinds of faults in processes of these roles, `redis_kinds` kinds of faults in Redis,
    each once. `moments`: event by role, for which every other fault in the role waits.
    `num_faults`, `num_redis_faults`: numbers of faults in processes and in Redis. `num_slow`:
    number of disturbances by slow readers, each with `num_readers` clients. `num_saved`: number of
    conversations that are saved, at each of `saved_stages`.
    """

    options: ChaosOptions
    num_faults: int
    num_redis_faults: int
    roles: tuple[str, ...]
    moments: Mapping[str, Moment]
    kinds: tuple[FaultKind, ...]
    redis_kinds: tuple[FaultKind, ...]
    num_slow: int = 0
    num_readers: int = 0
    num_saved: int = 0
    saved_stages: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float | None:
        """Time in which faults are injected; None for all faults, however long they take."""
        return self.options.minutes * 60 if self.options.minutes is not None else None

    @property
    def total_faults(self) -> int:
        return self.num_faults + self.num_redis_faults + self.num_slow

    @property
    def has_second_gateway(self) -> bool:
        """Return True if the plan has faults in a gateway, or in a gateway's connection to Redis:
        clients then need a second gateway to resume at.
        """
        return bool(self.kinds and GATEWAY in self.roles) or FaultKind.PARTITION in self.redis_kinds

    @property
    def has_silent_gateways(self) -> bool:
        """Return True if the plan has faults in which a gateway stops sending without breaking its
        connections.
        """
        silencing = {FaultKind.STOP, FaultKind.PAUSE, FaultKind.HANG}
        return FaultKind.PARTITION in self.redis_kinds or (
            not silencing.isdisjoint(self.kinds) and GATEWAY in self.roles
        )

    @property
    def may_forget(self) -> bool:
        """Return True if the plan has faults in which Redis may lose ended requests, or delete
        their audio early.
        """
        return not FORGETTING_KINDS.isdisjoint(self.redis_kinds)

    def schedule(self) -> list[Fault]:
        """Generate the list of faults from the seed."""
        seed, spacing_s = self.options.seed, self.options.spacing_s
        return mix(
            seed,
            draw_faults(seed, self.num_faults, self.roles, self.kinds, spacing_s, self.moments),
            draw_redis_faults(seed, self.num_redis_faults, self.redis_kinds, spacing_s),
            draw_slow_readers(seed, self.num_slow, spacing_s),
        )


def chaos_overrides(
    config: FleetConfig, overrides: Sequence[str], *, voice: bool = False, slow: bool = False
) -> tuple[str, ...]:
    """Return the overrides for a chaos run, followed by the user's `overrides`, which take
    precedence.

    `voice`: whether to add overrides for voice sessions: short answers, sent exactly as logged.
    `slow`: whether to limit the unread bytes of a client so far that even short answers reach the
    limit.
    """
    return (
        "numerics=invariant",
        SHORT_WAIT,
        *((SHORT_CREDIT,) if slow else ()),
        *(f"stages.{key}.replicas={DEFAULT_REPLICAS}" for key in _replica_keys(config)),
        *(TRAINING if config.training.enabled else ()),
        *(_voice_overrides(config) if voice else ()),
        *overrides,
    )


def _voice_overrides(config: FleetConfig) -> tuple[str, ...]:
    lengths = {
        stage.name: VOICE_TOKENS if stage.main else VOICE_FRAMES
        for stage in config.graph_declaration().stages
        if stage.default_sampling
    }
    return (
        "web.max_leading_silence_ms=null",
        LONG_SESSIONS,
        *(f"stages.{name}.sampling.max_tokens={length}" for name, length in lengths.items()),
    )


def _replica_keys(config: FleetConfig) -> list[str]:
    """Return the configuration keys of worker counts: one per stage, or one for each half of a
    split stage. Span workers have no key, since their number follows from the stage's replicas.
    """
    return [
        str(role.name).replace(".", ".split.") if _is_half(config, role) else str(role.name)
        for role in config.roles()
        if not role.hosts_spans
    ]


def _is_half(config: FleetConfig, role: Role) -> bool:
    return config.stage(role.stage).split is not None


def check_soak(options: ChaosOptions) -> None:
    """Check the options of a soak. Raises: ChaosError, BadInput naming the option and the fix."""
    check_report_folders(json=options.json, png=options.png)
    soak = options.soak or 0
    _require(
        soak >= MIN_SOAK_REQUESTS, "--soak", soak, f"give at least {MIN_SOAK_REQUESTS} requests"
    )
    _check_minutes(options)
    _require_positive("--concurrency", options.concurrency)


def _check_minutes(options: ChaosOptions) -> None:
    minutes = options.minutes
    _require(
        minutes is None or (isfinite(minutes) and minutes > 0),
        "--minutes",
        minutes,
        "give minutes, more than 0",
    )


def make_plan(options: ChaosOptions, config: FleetConfig) -> ChaosPlan:
    """Check the options against the deployment and return the plan. Raises: ChaosError, BadInput
    naming the option and the fix.
    """
    _check_numbers(options, config)
    check_report_folders(json=options.json, png=options.png)
    roles = _parse_list(
        "--roles", options.roles, [*(str(role.name) for role in config.roles()), CONDUCTOR, GATEWAY]
    )
    chosen = _parse_list("--how", options.how, [*FaultKind, REDIS, ALL]) if options.how else KINDS
    kinds = tuple(kind for kind in PROCESS_KINDS if kind in chosen or ALL in chosen)
    with_redis = REDIS in chosen or ALL in chosen
    redis_kinds = tuple(kind for kind in REDIS_KINDS if kind in chosen or with_redis)
    _require(
        config.lease.end_hung_processes or FaultKind.HANG not in kinds,
        "--how",
        options.how,
        "nothing ends a hung process in this fleet; add --set lease.end_hung_processes=true",
    )
    is_slow = FaultKind.SLOW in chosen or ALL in chosen
    num_faults, num_redis_faults, num_slow = _count_faults(
        options, (len(roles), len(kinds)), len(redis_kinds), int(is_slow)
    )
    savable = _savable_stages(config)
    num_saved = _count_saved(options, config, savable)
    saved_stages = savable if num_saved else ()
    return ChaosPlan(
        options=replace(
            options,
            overrides=chaos_overrides(
                config, options.overrides, voice=options.voice > 0, slow=is_slow
            ),
        ),
        num_faults=num_faults,
        num_redis_faults=num_redis_faults,
        roles=roles,
        moments=_moments(config, roles, saved_stages),
        kinds=kinds,
        redis_kinds=redis_kinds,
        num_slow=num_slow,
        num_readers=_num_readers(config, options.concurrency),
        num_saved=num_saved,
        saved_stages=saved_stages,
    )


def _moments(
    config: FleetConfig, roles: Sequence[str], saved_stages: Sequence[str]
) -> dict[str, Moment]:
    own = [role for role in config.roles() if role.name in roles]
    halves = {str(role.name): Moment.HAND_OFF for role in own if _is_half(config, role)}
    return halves | {str(role.name): Moment.SAVE for role in own if role.stage in saved_stages}


def _savable_stages(config: FleetConfig) -> tuple[str, ...]:
    """Return the stages whose conversations can be saved. If any stage has divided layers, only
    stages with divided layers are returned.
    """
    able = [
        stage.name
        for stage in config.graph_declaration().stages
        if stage.default_sampling
        and config.stage(stage.name).split is None
        and config.engine_of(stage.name) == "torch"
    ]
    return tuple([name for name in able if _is_divided(config, name)] or able)


def _is_divided(config: FleetConfig, stage: StageName) -> bool:
    return any(role.hosts_spans for role in config.roles_of(stage))


def _count_saved(options: ChaosOptions, config: FleetConfig, stages: Sequence[str]) -> int:
    """Return the number of conversations to save per stage. By default a few are saved where layers
    are divided.
    """
    keeps = (
        bool(stages)
        and config.limits.max_cached_conversations > 0
        and config.lease.prefix_cache_s > 0
    )
    if options.saves is None:
        divided = any(_is_divided(config, StageName(stage)) for stage in stages)
        return DEFAULT_SAVES if keeps and divided else 0
    _require(
        keeps or not options.saves,
        "--saves",
        options.saves,
        "no stage of this fleet has conversations that can be saved; that needs a stage without "
        "split on the engine torch, lease.prefix_cache_s and limits.max_cached_conversations",
    )
    return options.saves


def _num_readers(config: FleetConfig, concurrency: int) -> int:
    """Return the number of slow readers: two more than the slots of the required role with the
    fewest slots, but at most the number of requests that the fleet admits beside `concurrency`
    others, and at least 1.
    """
    roles = [role for role in config.roles() if not (role.optional or role.hosts_spans)]
    slots = min(role.replicas * config.of_role(role).max_batch for role in roles)
    return max(1, min(slots + 2, config.limits.max_requests - concurrency))


def _count_faults(
    options: ChaosOptions, in_processes: tuple[int, int], num_redis_kinds: int, num_slow: int
) -> tuple[int, int, int]:
    """Return the numbers of faults in processes, in Redis, and in clients. `--kills` gives their
    total, `--kills-per-role` the number for each role and for each other kind of fault. By default
    each role has every kind of process fault once, and every other kind occurs once. With
    `--minutes` alone, the total is larger than fits. `in_processes`: numbers of roles and of kinds
    of process faults.
    """
    num_roles, num_kinds = in_processes
    kills = options.kills
    if options.minutes is not None and kills is None and options.kills_per_role is None:
        kills = ceil(options.minutes * 60)
    if kills:
        kinds = num_roles * num_kinds + num_redis_kinds + num_slow
        num_redis, num_slow = (
            round(kills * share / kinds) for share in (num_redis_kinds, num_slow)
        )
        return kills - num_redis - num_slow, num_redis, num_slow
    per_role, each = options.kills_per_role or num_kinds, options.kills_per_role or 1
    return num_roles * per_role if num_kinds else 0, num_redis_kinds * each, num_slow * each


def _require(valid: bool, option: str, value: object, advice: str) -> None:
    if not valid:
        raise ChaosError(f"{option} {value}: {advice}", param=option)


def _require_positive(option: str, value: int | None) -> None:
    _require(value is None or value >= 1, option, value, "give a whole number of at least 1")


def _check_numbers(options: ChaosOptions, config: FleetConfig) -> None:
    _require_positive("--requests", options.requests)
    _require_positive("--concurrency", options.concurrency)
    _require_positive("--kills", options.kills)
    _require_positive("--kills-per-role", options.kills_per_role)
    _check_minutes(options)
    saves, voice, spacing_s = options.saves or 0, options.voice, options.spacing_s
    _require(saves >= 0, "--saves", saves, "give a number of conversations, 0 or more")
    _require(voice >= 0, "--voice", voice, "give a number of voice sessions, 0 or more")
    _require(
        isfinite(spacing_s) and spacing_s >= 0,
        "--spacing",
        f"{spacing_s:g}",
        "give seconds, 0 or more",
    )
    _require(
        options.concurrency <= config.limits.max_requests,
        "--concurrency",
        options.concurrency,
        f"this fleet admits {config.limits.max_requests} requests at a time; "
        f"add --set limits.max_requests={options.concurrency}",
    )
    if options.kills is not None and options.kills_per_role is not None:
        raise ChaosError(
            "--kills-per-role sets the number of faults; leave out --kills",
            param="--kills-per-role",
        )


def _parse_list(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse comma-separated names, each allowed once; an empty text means all `known` names."""
    if not text:
        return tuple(known)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    choice = f"use one or more of {', '.join(known)}"
    for name in names:
        _require(name in known, option, text, f"{name!r} is unknown; {choice}")
    _require(bool(names), option, repr(text), f"the list is empty; {choice}")
    return names
