"""Settings from environment variables: addresses, paths and secrets. Nothing else is read from the
environment.
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from fleet.config.values import MAX_PORT
from fleet.core.errors import ConfigError

_OF_EXAMPLES = ("changeme", "replaceme")
"""Parts of the placeholder secrets in `deploy/`, as `normalize_secret` returns them."""
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
_SERVER_SCHEMES = ("redis", "rediss", *_SENTINEL_SCHEMES, *_CLUSTER_SCHEMES)
_PORT = re.compile(r"[0-9]{1,5}")
_DATABASE = re.compile(r"/?[0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """Settings read from the environment. Without `redis_url`, the embedded Redis server is used;
    without `api_key`, the gateway requires no key.
    """

    redis_url: str | None
    config_path: Path | None
    api_key: str | None
    port: int | None


def read_settings(env: dict[str, str] | None = None) -> EnvironmentSettings:
    """Read the settings from the environment. Raises: ConfigError if FLEET_PORT is not a port, or
    REDIS_URL is not an address.
    """
    env = dict(os.environ) if env is None else env
    port = env.get("FLEET_PORT") or None
    if port is not None and not (_PORT.fullmatch(port) and int(port) <= MAX_PORT):
        fix = f"use a number from 1 to {MAX_PORT}, or 0 for a free one"
        raise ConfigError(f"FLEET_PORT: {port!r} is not a port; {fix}", param="FLEET_PORT")
    config = env.get("FLEET_CONFIG")
    return EnvironmentSettings(
        redis_url=_redis_url(env.get("REDIS_URL")),
        config_path=Path(config) if config else None,
        api_key=_api_key(env.get("FLEET_API_KEY")),
        port=int(port) if port else None,
    )


def _api_key(given: str | None) -> str | None:
    """Return the API key without the line end that files and `echo` add. A blank key is kept, so
    that it is refused later instead of disabling the check.
    """
    return (given.strip() or given) if given else None


def _redis_url(url: str | None) -> str | None:
    """Return a Redis address if it is valid; None for an empty or missing one. Raises: ConfigError,
    without the address, since an address may contain a password.
    """
    if not url:
        return None
    reason = _find_fault(url)
    if reason:
        raise ConfigError(
            f"REDIS_URL: not a Redis address ({reason}); write redis://HOST:PORT", param="REDIS_URL"
        )
    return url


def has_password(url: str) -> bool:
    """Return True if a Redis address has a password, before the host or, as redis-py accepts it, in
    the query.
    """
    parts = urlsplit(url)
    return bool(parts.password or parse_qs(parts.query).get("password"))


def is_sentinel(url: str) -> bool:
    """Return True if a Redis address names Redis Sentinels, from which the server's address is
    obtained.
    """
    return urlsplit(url).scheme in _SENTINEL_SCHEMES


def is_cluster(url: str) -> bool:
    """Return True if a Redis address names nodes of a Redis Cluster, from which the address of the
    server that has the fleet's keys is obtained.
    """
    return urlsplit(url).scheme in _CLUSTER_SCHEMES


def hosts_of(url: str) -> list[tuple[str, int | None]]:
    """Return the (host, port) pairs in a Redis address; a port of None is the default. Only
    addresses of sentinels and of cluster nodes have several.

    Raises: ValueError for an invalid address.
    """
    parts = urlsplit(url)
    are_several = is_sentinel(url) or is_cluster(url)
    places = parts.netloc.rpartition("@")[2].split(",") if are_several else [parts.netloc]
    found = [urlsplit(f"//{place}") for place in places]
    return [(each.hostname or "", each.port) for each in found]


def network_host(url: str | None) -> str | None:
    """Return the host of a Redis server on another machine; None for a server on this machine, and
    for the embedded server.
    """
    hosts = [host for host, _ in hosts_of(url) if host] if url else []
    return next((host for host in hosts if not _is_local(host)), None)


def check_redis_placeholder(url: str | None) -> None:
    """Check that the password of a Redis server on a network is not an example from `deploy/`.
    Raises: ConfigError, which no setting permits.
    """
    if url is None or network_host(url) is None:
        return
    parts = urlsplit(url)
    given = unquote(parts.password or parse_qs(parts.query).get("password", [""])[0])
    if is_example(given):
        raise ConfigError(
            "REDIS_URL: the password is a placeholder; set another one in Redis and here, such "
            "as `openssl rand -hex 32` prints",
            param="REDIS_URL",
        )


def is_example(secret: str) -> bool:
    """Return True if a secret is a placeholder from the examples in `deploy/`, in any spelling."""
    core = normalize_secret(secret)
    return any(part in core for part in _OF_EXAMPLES)


def normalize_secret(secret: str) -> str:
    """Return a secret in lower case without its punctuation: `<Change-Me>` is `changeme`."""
    return "".join(char for char in secret.casefold() if char.isalnum())


def check_redis_password(url: str | None) -> None:
    """Check that a Redis server on a network has a password, with or without TLS. A Unix socket is
    not a network.

    Raises: ConfigError, which names the setting that permits a server without a password.
    """
    host = network_host(url)
    if url is None or host is None or has_password(url):
        return
    raise ConfigError(
        f"REDIS_URL: the Redis at {host} is on a network and REDIS_URL has no password; any "
        "client that reaches it controls "
        "the fleet and reads every request. Give Redis a password and write "
        "redis://:PASSWORD@HOST:PORT, or permit it with "
        "--set security.allow_redis_without_password=true",
        param="REDIS_URL",
    )


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".") == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _find_fault(url: str) -> str | None:
    try:
        parts, hosts = urlsplit(url), hosts_of(url)
    except ValueError:
        return f"its port is not a number from 1 to {MAX_PORT}"
    if parts.scheme == "unix":
        return None if parts.path else "it names no socket"
    if parts.scheme not in _SERVER_SCHEMES:
        return (
            "it begins with neither redis:// nor rediss:// nor redis+sentinel:// nor "
            "redis+cluster:// nor unix://"
        )
    if not all(host for host, _ in hosts):
        return "it names no host"
    if any(port == 0 for _, port in hosts):
        return f"its port is not a number from 1 to {MAX_PORT}"
    database = parts.path
    if is_sentinel(url):
        service, _, database = parts.path.removeprefix("/").partition("/")
        if not service:
            return (
                "it names no service after the sentinels: "
                "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"
            )
    if is_cluster(url) and database.strip("/") not in ("", "0"):
        return "a cluster has only database 0"
    return (
        None
        if _DATABASE.fullmatch(database)
        else "the part after the port is not a database number"
    )
