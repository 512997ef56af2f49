"""The deployment that a command works on, read from the configuration file, `--set` options and
environment. Connects to Redis only when asked to.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.config import FleetConfig
from fleet.config.deployment import open_config
from fleet.config.settings import (
    EnvironmentSettings,
    check_redis_password,
    check_redis_placeholder,
    read_settings,
)
from fleet.control.embedded import embedded_url
from fleet.core.errors import ConfigError
from fleet.process.private import close_to_others, make_private_folder, others_may_replace

if TYPE_CHECKING:
    from redis import Redis

CONNECT_TIMEOUT_S = 2.0
_OWN = re.compile(
    r"redis|jobs|batches|history|sockets|checkpoints|drafts|tls|resolved\.yaml(\.\d+)?|bench-.*"
    r"|chaos-.*\.log|preload.*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Configuration of a deployment, its environment settings, and the address of its Redis.

    Invariants: `settings.port` is `config.web.port`; `embedded_redis` is True exactly when
    REDIS_URL is not set.
    """

    config: FleetConfig
    settings: EnvironmentSettings
    redis_url: str

    @property
    def embedded_redis(self) -> bool:
        return self.settings.redis_url is None

    def connect(self, patience_s: float = CONNECT_TIMEOUT_S) -> "Redis":
        """Connect to the fleet's Redis. Raises: RedisUnreachable after `patience_s`."""
        from fleet.control.connect import connect

        return connect(self.redis_url, patience_s=patience_s)


def open_deployment(config_file: Path | None, overrides: list[str] | None) -> Deployment:
    """Read the deployment of a command: `--set` overrides the environment, which overrides the
    configuration file.

    Raises: ConfigError naming the file or variable, the field and the remedy.
    """
    settings = read_settings()
    path, config = open_config(config_file, overrides, settings)
    return Deployment(
        config=config,
        settings=dataclasses.replace(settings, port=config.web.port, config_path=path),
        redis_url=settings.redis_url or embedded_url(config.redis_data_dir),
    )


def open_serving_deployment(config_file: Path | None, overrides: list[str] | None) -> Deployment:
    """Open the deployment for a command that starts serving processes. Raises: ConfigError for an
    invalid configuration, or an unsafe Redis connection that no setting permits.
    """
    deployment = open_deployment(config_file, overrides)
    check_redis_placeholder(deployment.settings.redis_url)
    if not deployment.config.security.allow_redis_without_password:
        check_redis_password(deployment.settings.redis_url)
    return deployment


def secure_data_dir(config: FleetConfig) -> Path:
    """Return the deployment's data folder; create it with access for this user alone if it is
    missing.

    If Fleet created every entry of an existing folder, other users' access is removed. Otherwise
    the folder's mode is unchanged, since the entries that Fleet creates are private themselves.
    """
    folder = config.data_dir.absolute()
    make_private_folder(folder)
    close_to_others(folder, is_own=is_made_by_fleet)
    return folder


def is_made_by_fleet(name: str) -> bool:
    """Return True if Fleet creates an entry of this name in a data folder."""
    return _OWN.fullmatch(name) is not None


def check_data_dir(folder: Path) -> None:
    """Check that no other user can replace entries in the data folder of an embedded Redis, and so
    take over the server. Raises: ConfigError if others can.
    """
    if others_may_replace(folder, is_own=is_made_by_fleet):
        raise ConfigError(
            f"data_dir: other users can replace the entries of {folder}; choose a folder of "
            "this user with --set data_dir=DIR, "
            f"or `chmod go-w {folder}`",
            param="data_dir",
        )
