"""Overrides for two comparable deployments of one model: prefill and decode in one worker (joined),
and split. Pure.

Takes the stages from the graph: a stage with more than one walk can be split.
"""

from collections.abc import Sequence

from fleet.config import FleetConfig
from fleet.core.ids import StageName

TINY = "checkpoint=tiny"


def with_checkpoint(config: FleetConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides, with random weights added if the configuration names no checkpoint:
    random weights are as fast as trained ones.
    """
    return (*overrides, TINY) if config.checkpoint == "auto" else tuple(overrides)


def split_stages(config: FleetConfig) -> tuple[StageName, ...]:
    return tuple(
        stage.name
        for stage in config.graph_declaration().stages
        if len(config.roles_of(stage.name)) > 1
    )


def splitting_overrides(config: FleetConfig) -> tuple[str, ...]:
    """Return the overrides that split every stage that can be split; none if the deployment already
    splits a stage.
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
    """Return the overrides that replace the two halves of each split stage by equally many workers
    of the whole stage.
    """
    overrides: list[str] = []
    for name in split_stages(config):
        workers = sum(role.replicas for role in config.roles_of(name))
        overrides += [f"stages.{name}.split=null", f"stages.{name}.replicas={workers}"]
    return tuple(overrides)


def num_workers(config: FleetConfig) -> int:
    return sum(role.replicas for role in config.roles())
