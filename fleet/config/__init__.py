"""A frozen configuration, read from YAML and the environment. Errors name the field and the remedy.
Knows no process.
"""

from fleet.config.load import apply_overrides, load_config
from fleet.config.schema import FleetConfig
from fleet.config.stage_schema import StageConfig

__all__ = ["FleetConfig", "StageConfig", "apply_overrides", "load_config"]
