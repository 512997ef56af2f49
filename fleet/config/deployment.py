"""Choice of the configuration that a command works on: from its file, its `--set` options and
FLEET_PORT. Connects to nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from fleet.config.load import load_config
from fleet.config.schema import FleetConfig
from fleet.config.settings import EnvironmentSettings, read_settings
from fleet.graphs import DEFAULT_GRAPH


def open_config(
    config_file: Path | None,
    overrides: Sequence[str] | None,
    settings: EnvironmentSettings | None = None,
) -> tuple[Path | None, FleetConfig]:
    """Return the path of the deployment file and the configuration. Precedence: `--set` options,
    then FLEET_PORT, then the file.

    Raises: ConfigError naming the file or variable, the field and the fix.
    """
    settings = settings or read_settings()
    overrides = tuple(overrides or ())
    path = config_file or settings.config_path or _default_file(overrides)
    port = (f"web.port={settings.port}",) if settings.port is not None else ()
    return path, load_config(path, port + overrides)


def _default_file(overrides: Sequence[str]) -> Path | None:
    """Return the shipped deployment file of the graph that `--set graph=NAME` selects, so that the
    file's stages match the graph; None if there is no such file.
    """
    graphs = [
        text.removeprefix("graph=").strip() for text in overrides if text.startswith("graph=")
    ]
    path = Path("configs") / f"{graphs[-1] if graphs else DEFAULT_GRAPH}.yaml"
    return path if path.is_file() else None
