"""The configuration that a command works on: its file, its options and FLEET_PORT. Connects to
nothing.
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
    """Return the file and the configuration: --set wins over FLEET_PORT, FLEET_PORT over the file.

    Raises: ConfigError naming the file or variable, the field and the fix.
    """
    settings = settings or read_settings()
    overrides = tuple(overrides or ())
    path = config_file or settings.config_path or _default_file(overrides)
    port = (f"web.port={settings.port}",) if settings.port is not None else ()
    return path, load_config(path, port + overrides)


def _default_file(overrides: Sequence[str]) -> Path | None:
    """Return the file of the graph that `--set graph=NAME` names, so that its stages match that
    graph.
    """
    graphs = [
        text.removeprefix("graph=").strip() for text in overrides if text.startswith("graph=")
    ]
    path = Path("configs") / f"{graphs[-1] if graphs else DEFAULT_GRAPH}.yaml"
    return path if path.is_file() else None
