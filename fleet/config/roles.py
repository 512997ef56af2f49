"""What workers of a deployment can serve: a whole stage, or one half of a stage whose prefill and decode are split."""

from dataclasses import dataclass

from fleet.core.ids import RoleName, StageName, Walk

PREFILL_HALF, DECODE_HALF = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """`walks` are those it serves; after the last of them a task goes on in role `next`, if there is one.

    `replicas` workers take tasks; `standby` more are loaded, and each takes the place of one that is lost.
    """

    name: RoleName
    stage: StageName
    walks: tuple[Walk, ...]
    replicas: int
    standby: int = 0
    next: RoleName | None = None


def half_role_name(stage: StageName, which: str) -> RoleName:
    return RoleName(f"{stage}.{which}")
