"""Checkpoint folder of one stage of a deployment. Reads no file."""

from pathlib import Path

from fleet.config.schema import FleetConfig
from fleet.core.ids import StageName


def checkpoint_of(config: FleetConfig, stage: StageName, checkpoint: Path) -> Path:
    """Return the folder with a stage's weights: `stages.NAME.checkpoint` if it is set, else the
    stage's sub-folder of `checkpoint`, the deployment's folder.

    `stages.NAME.checkpoint` must be a path here; `fleet.cli.checkpoint` replaces hub names by
    paths.
    """
    own = config.stage(stage).checkpoint
    if own is not None:
        return Path(own).expanduser()
    return checkpoint / config.graph_declaration().stage(stage).checkpoint_folder
