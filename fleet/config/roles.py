"""Roles of a deployment's workers: a role serves a whole stage, one half of a split stage, or spans
of a divided stage's layers.
"""

from dataclasses import dataclass
from typing import Final

from fleet.core.ids import RoleName, StageName, Walk

PREFILL_HALF: Final = "prefill"
DECODE_HALF: Final = "decode"
SPAN: Final = "span"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role of workers: the stage, and the walks of a task that its workers serve. After the last
    walk the task is handed off to role `next`, if set.

    `replicas`: workers that receive tasks. `standby`: additional loaded workers, which replace lost
    workers. `hosts_spans`: workers own no task, and compute layers for the stage's anchors.
    `optional`: no answer needs the role; a single worker of it is active at a time, and all others
    stand by.
    """

    name: RoleName
    stage: StageName
    walks: tuple[Walk, ...]
    replicas: int
    standby: int = 0
    next: RoleName | None = None
    hosts_spans: bool = False
    optional: bool = False


def part_role_name(stage: StageName, which: str) -> RoleName:
    return RoleName(f"{stage}.{which}")
