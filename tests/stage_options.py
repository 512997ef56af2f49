"""Options for building a stage in tests."""

from pathlib import Path
from typing import Any

from fleet.config import FleetConfig
from fleet.core.ids import StageName
from fleet.graphs import GRAPHS
from fleet.stages.options import BuildOptions

CONTEXT = {"device", "dtype", "half", "anchor", "address", "progress"}
SMALL_POOL: dict[str, Any] = {"kv_pages": 512}


def stage_options(
    stage: StageName,
    checkpoint: Path,
    *,
    numerics: str = "fast",
    engine: str = "torch",
    stage_engine: str | None = None,
    min_positions: int = 2,
    capture_share: float | None = None,
    **settings: Any,
) -> BuildOptions:
    """Return the build options of a stage, in the first graph that has a stage of this name.

    `min_positions`: positions of the longest prompt that the deployment admits plus one answer
    token. `stage_engine`: engine of this stage alone. `settings`: fields of `BuildOptions`, or keys
    of the stage's configuration section.
    """
    graph = next(
        graph for graph in GRAPHS.values() if any(each.name == stage for each in graph.stages)
    )
    context = {name: settings.pop(name) for name in CONTEXT & settings.keys()}
    training = {} if capture_share is None else {"enabled": True, "compute_share": capture_share}
    config = FleetConfig.model_validate(
        {
            "graph": graph.name,
            "numerics": numerics,
            "engine": engine,
            "limits": {"max_prompt_tokens": min_positions - 1},
            "stages": {stage: SMALL_POOL | {"engine": stage_engine} | settings},
            "training": training,
        }
    )
    return BuildOptions(config=config, stage=stage, checkpoint=checkpoint, **context)
