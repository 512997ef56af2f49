"""The environment: where things are, and secrets; nothing else is read from it."""

import os
from dataclasses import dataclass
from pathlib import Path

from fleet.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`redis_url` None means the embedded server; `api_key` None means no key is asked for."""

    redis_url: str | None
    config_path: Path | None
    api_key: str | None
    port: int | None


def read_settings(env: dict[str, str] | None = None) -> Settings:
    """Raises: ConfigError if FLEET_PORT is not a port."""
    env = dict(os.environ) if env is None else env
    port = env.get("FLEET_PORT") or None
    if port is not None and not (port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"FLEET_PORT: {port!r} is not a port; use a number from 0 to 65535", param="FLEET_PORT")
    config = env.get("FLEET_CONFIG")
    return Settings(
        redis_url=env.get("REDIS_URL") or None,
        config_path=Path(config) if config else None,
        api_key=env.get("FLEET_API_KEY") or None,
        port=int(port) if port else None,
    )
