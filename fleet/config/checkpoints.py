"""Checkpoint folder of one stage of a deployment. Reads no file."""

from pathlib import Path

from fleet.config.schema import FleetConfig
from fleet.core.ids import StageName


def checkpoint_of(config: FleetConfig, stage: StageName, checkpoint: Path) -> Path:
    """Return the folder with a stage's weights: its own one, or the graph's place for it in the
    deployment's folder `checkpoint`.

    A hub name in `stages.NAME.checkpoint` must be resolved before (`fleet.cli.checkpoint`).
    """
    own = config.stage(stage).checkpoint
    if own is not None:
        return Path(own).expanduser()
    return checkpoint / config.graph_declaration().stage(stage).checkpoint_folder
