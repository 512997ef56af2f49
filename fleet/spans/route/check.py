"""Check of a stage's spans against its checkpoint, before a worker loads anything."""

from pathlib import Path

from fleet.config import FleetConfig
from fleet.config.span_rules import problems_of_spans
from fleet.core.errors import ConfigError
from fleet.core.ids import StageName
from fleet.stages.builders import layer_counter


def check_spans(config: FleetConfig, stage: StageName, checkpoint: Path) -> None:
    """Raises: ConfigError if the configured spans do not divide the layers of the checkpoint's
    model.
    """
    spans = config.stage(stage).spans
    if spans is None:
        return
    num_layers = layer_counter(config.graph_declaration(), stage)(checkpoint)
    problem = next(problems_of_spans(stage, spans, num_layers), None)
    if problem is not None:
        raise ConfigError(
            f"{problem.field}: {problem.message} (checkpoint {checkpoint})", param=problem.field
        )
