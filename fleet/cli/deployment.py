"""Files, options and environment -> the one deployment a command works on. Connects to nothing."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from fleet.config import FleetConfig, load_config
from fleet.config.settings import Settings, read_settings
from fleet.graphs import DEFAULT_GRAPH


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Invariants: `settings.port` is `config.web.port`; `embedded_redis` exactly when REDIS_URL is not set."""

    config: FleetConfig
    settings: Settings
    redis_url: str

    @property
    def embedded_redis(self) -> bool:
        return self.settings.redis_url is None


def open_deployment(config_file: Path | None, overrides: list[str] | None) -> Deployment:
    """Resolve where things are: --set wins over the environment, the environment over the file.

    Raises: ConfigError naming the file or variable, the field and the fix.
    """
    settings = read_settings()
    given = tuple(overrides or ())
    path = config_file or settings.config_path or _default_file(given)
    from_env = (f"web.port={settings.port}",) if settings.port is not None else ()
    config = load_config(path, from_env + given)
    return Deployment(
        config=config,
        settings=dataclasses.replace(settings, port=config.web.port, config_path=path),
        redis_url=settings.redis_url or f"redis://127.0.0.1:{config.redis.port}",
    )


def _default_file(overrides: tuple[str, ...]) -> Path | None:
    """The file of the graph that `--set graph=NAME` names, so that another graph does not meet this one's stages."""
    named = [text.removeprefix("graph=").strip() for text in overrides if text.startswith("graph=")]
    path = Path("configs") / f"{named[-1] if named else DEFAULT_GRAPH}.yaml"
    return path if path.is_file() else None
