"""Roles of a deployment's workers: a whole stage, one half of one whose prefill and decode are
split, or spans of its layers.
"""

from dataclasses import dataclass
from typing import Final

from fleet.core.ids import RoleName, StageName, Walk

PREFILL_HALF: Final = "prefill"
DECODE_HALF: Final = "decode"
SPAN: Final = "span"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role: the walks of a stage that it serves. After the last of them a task is handed off to
    role `next`, if there is one.

    `replicas` workers receive tasks; `standby` more are loaded, and each replaces a worker that is
    lost. `hosts_spans`: workers of the role own no task, and compute layers for the stage's other
    role. `optional`: no answer needs it; one worker of it is active at a time, and all others stand
    by.
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
