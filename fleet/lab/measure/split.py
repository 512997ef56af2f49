"""Two deployments of one model to compare: prefill and decode in one worker, and split. Pure.

Knows stages only as declared: a stage with more than one walk can be split.
"""

from collections.abc import Sequence

from fleet.config import FleetConfig
from fleet.core.ids import StageName

TINY = "checkpoint=tiny"


def with_checkpoint(config: FleetConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Add random weights where no checkpoint is named: they are as fast as trained weights of
    the same size.
    """
    return (*overrides, TINY) if config.checkpoint == "auto" else tuple(overrides)


def split_stages(config: FleetConfig) -> tuple[StageName, ...]:
    return tuple(
        stage.name
        for stage in config.graph_declaration().stages
        if len(config.roles_of(stage.name)) > 1
    )


def splitting_overrides(config: FleetConfig) -> tuple[str, ...]:
    """Return the overrides that split every stage that can be; none for a deployment that already
    splits one.
    """
    if split_stages(config):
        return ()
    halves = [stage.name for stage in config.graph_declaration().stages if len(stage.walks) > 1]
    return tuple(
        f"stages.{name}.split.{half}.replicas=1"
        for name in halves
        for half in ("prefill", "decode")
    )


def joining_overrides(config: FleetConfig) -> tuple[str, ...]:
    """Return the overrides that replace the halves of each split stage by as many workers of the
    whole stage.
    """
    overrides: list[str] = []
    for name in split_stages(config):
        workers = sum(role.replicas for role in config.roles_of(name))
        overrides += [f"stages.{name}.split=null", f"stages.{name}.replicas={workers}"]
    return tuple(overrides)


def num_workers(config: FleetConfig) -> int:
    return sum(role.replicas for role in config.roles())
