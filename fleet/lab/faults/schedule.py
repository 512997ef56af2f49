"""Schedule of the faults of a run, generated from a seed so that a run can be repeated. Pure."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

CONDUCTOR, GATEWAY, REDIS, CLIENTS = "conductor", "web", "redis", "clients"
"""Values of `Fault.role` besides the roles of workers."""


class FaultKind(StrEnum):
    """Kind of a fault. KILL: SIGKILL. STOP: SIGSTOP until the lease has lapsed and other workers
    have the tasks, then SIGCONT. TERM: SIGTERM. PAUSE: SIGSTOP for a part of a lease or for longer
    than one, then SIGCONT. HANG: SIGSTOP that nobody continues, so that the process's keeper must
    end it. SLOW: clients read a few bytes a second for a while, and then the rest of their answers;
    see `slow`.

    All other kinds are faults in Redis or in connections to it; see `redis_faults`.
    """

    KILL = "kill"
    STOP = "stop"
    TERM = "term"
    PAUSE = "pause"
    HANG = "hang"
    OOM = "oom"
    READONLY = "readonly"
    NOREPLICAS = "noreplicas"
    MISCONF = "misconf"
    TAIL = "tail"
    PARTITION = "partition"
    CLOCK = "clock"
    FAILOVER = "failover"
    SLOW = "slow"


SIGNALS = {
    FaultKind.KILL: "SIGKILL",
    FaultKind.STOP: "SIGSTOP",
    FaultKind.TERM: "SIGTERM",
    FaultKind.PAUSE: "SIGSTOP",
    FaultKind.HANG: "SIGSTOP",
}
"""Signal with which each kind of process fault begins."""
KINDS = (FaultKind.KILL, FaultKind.STOP, FaultKind.TERM)
"""Kinds of faults in processes that a run has by default."""
PROCESS_KINDS = tuple(SIGNALS)
ALL = "all"
"""Name of every kind of fault together."""
SHORT_LEASES, LONG_LEASES = (0.2, 0.8), (1.2, 1.8)
"""Ranges of the durations of pauses, in leases: below a lease, and above one but below the two
after which a keeper ends a stopped process.
"""
REDIS_KINDS = tuple(
    kind for kind in FaultKind if kind not in SIGNALS and kind is not FaultKind.SLOW
)
FORGETTING_KINDS = {FaultKind.OOM, FaultKind.TAIL, FaultKind.FAILOVER}
"""Faults after which Redis may lack ended requests, or audio deleted early for lack of memory."""


class Moment(StrEnum):
    """Event for which a fault waits. ANY: none. HAND_OFF: a task is in transfer between the halves
    of the role's stage. SAVE: the KV blocks of a conversation are being copied from a worker of the
    role's stage.
    """

    ANY = "any"
    HAND_OFF = "hand-off"
    SAVE = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject into a process of `role`, into Redis or into clients, `pause_s` seconds
    after the fleet has recovered from the previous fault.

    `moment`: event to wait for. `severity`, from 0 to 1: size of a Redis fault, for example the
    part of its log that is cut off; for a fault during a save, the share of the save's usual
    duration after which it is injected. `leases`: duration of a PAUSE, in leases;
    `in_all_workers`: whether it stops every worker of this host instead of one process.
    """

    role: str
    kind: FaultKind
    pause_s: float
    moment: Moment = Moment.ANY
    severity: float = 0.0
    leases: float = 0.0
    in_all_workers: bool = False


def name_of(kind: FaultKind) -> str:
    """Return the name of a fault in reports: the signal for KILL, STOP and TERM, else the kind."""
    return SIGNALS[kind] if kind in KINDS else kind.value


def draw_faults(
    seed: int,
    count: int,
    roles: Sequence[str],
    kinds: Sequence[FaultKind],
    spacing_s: float,
    moments: Mapping[str, Moment] | None = None,
) -> list[Fault]:
    """Generate `count` process faults: rounds with every kind for every role, each round in random
    order, with pauses of 0.5 to 1.5 times `spacing_s`.

    `moments`: event by role; every other fault of such a role waits for the event. Invariants:
    `len(roles)` successive faults of a round hit every role once; a whole round has every kind for
    every role once. Successive PAUSE faults of a role are alternately short and long; in a worker
    role, two that stop one process alternate with two that stop all workers.
    """
    rng, moments = random.Random(seed), moments or {}
    pauses = {role: _draw_pauses(f"pauses {seed} {role}", role) for role in roles}
    waits = {role: rng.random() < 0.5 for role in roles if role in moments}
    faults: list[Fault] = []
    while kinds and len(faults) < count:
        for role, kind in _draw_round(rng, roles, kinds):
            pause_s = spacing_s * rng.uniform(0.5, 1.5)
            moment = moments[role] if waits.get(role) else Moment.ANY
            severity = rng.random() if moment is Moment.SAVE else 0.0
            fault = Fault(role=role, kind=kind, pause_s=pause_s, moment=moment, severity=severity)
            if kind is FaultKind.PAUSE:
                leases, in_all_workers = next(pauses[role])
                fault = replace(fault, leases=leases, in_all_workers=in_all_workers)
            faults.append(fault)
            if role in waits:
                waits[role] = not waits[role]
    return faults[:count]


def draw_redis_faults(
    seed: int, count: int, kinds: Sequence[FaultKind], spacing_s: float
) -> list[Fault]:
    """Generate `count` Redis faults: rounds of every kind, each in random order, with pauses as in
    `draw_faults`.
    """
    rng = random.Random(f"redis {seed}")
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in rng.sample(list(kinds), len(kinds)):
            pause_s = spacing_s * rng.uniform(0.5, 1.5)
            faults.append(Fault(role=REDIS, kind=kind, pause_s=pause_s, severity=rng.random()))
    return faults[:count]


def draw_slow_readers(seed: int, count: int, spacing_s: float) -> list[Fault]:
    """Generate `count` disturbances by slow readers, with pauses as in `draw_faults`."""
    rng = random.Random(f"slow {seed}")
    pauses = [spacing_s * rng.uniform(0.5, 1.5) for _ in range(count)]
    return [Fault(role=CLIENTS, kind=FaultKind.SLOW, pause_s=pause_s) for pause_s in pauses]


def mix(seed: int, *schedules: Sequence[Fault]) -> list[Fault]:
    """Interleave schedules at random; the order within each schedule stays."""
    turns = [turn for faults in schedules for turn in [iter(faults)] * len(faults)]
    random.Random(f"mix {seed}").shuffle(turns)
    return [next(schedule) for schedule in turns]


def _draw_pauses(seed: str, role: str) -> Iterator[tuple[float, bool]]:
    """Yield (duration in leases, whether all workers are stopped) for each PAUSE fault of a role.
    Short and long pauses alternate; in a worker role, two pauses of one process alternate with two
    pauses of all workers.
    """
    rng = random.Random(seed)
    is_long, in_all_workers = rng.random() < 0.5, rng.random() < 0.5
    while True:
        for _ in range(2):
            leases = rng.uniform(*(LONG_LEASES if is_long else SHORT_LEASES))
            yield leases, in_all_workers and role not in (CONDUCTOR, GATEWAY)
            is_long = not is_long
        in_all_workers = not in_all_workers


def _draw_round(
    rng: random.Random, roles: Sequence[str], kinds: Sequence[FaultKind]
) -> Iterator[tuple[str, FaultKind]]:
    """Yield (role, kind) pairs of one round. The roles repeat in cycles, so that a short run has a
    fault for each; the kinds rotate from role to role.
    """
    turns = rng.sample(range(len(kinds)), len(kinds))
    first = {role: rng.randrange(len(kinds)) for role in roles}
    for turn in turns:
        for role in rng.sample(list(roles), len(roles)):
            yield role, kinds[(first[role] + turn) % len(kinds)]
