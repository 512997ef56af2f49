"""A Redis that Sentinel fails over: connections ask the sentinels of the address which server is
the primary now.

`redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST...]/SERVICE[/DATABASE][?OPTIONS]`, with
`rediss+sentinel` for TLS to servers and sentinels. User and password are for the servers; the
options `sentinel_username` and `sentinel_password` are for the sentinels. Other options are
redis-py's, for example `ssl_ca_certs`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry

from fleet.config.settings import hosts_of, is_sentinel

__all__ = [
    "AsyncPrimaryPool",
    "PrimaryConnection",
    "PrimaryPool",
    "TlsPrimaryConnection",
    "is_sentinel",
    "sentinel_pool",
    "sentinel_pool_async",
    "server_options",
]

SENTINEL_PORT, SENTINEL_TIMEOUT_S = 26379, 1.0


class _Address(NamedTuple):
    """Parsed address. `server`: options of connections to the primary. `sentinel`: options of
    connections to the sentinels.
    """

    sentinels: list[tuple[str, int]]
    service: str
    server: dict[str, Any]
    sentinel: dict[str, Any]


def sentinel_pool(url: str, **options: object) -> redis.ConnectionPool:
    """Return connections to the primary. `options`: options of `redis.Redis`. Raises: ValueError,
    TypeError for bad options in `url`.
    """
    at = _parse(url, options)
    sentinel = _Sentinel(
        at.sentinels, sentinel_kwargs={**at.sentinel, "retry": Retry(NoBackoff(), 0)}
    )
    tls = at.server.pop("ssl", False)
    return PrimaryPool(
        at.service,
        sentinel,
        connection_class=TlsPrimaryConnection if tls else PrimaryConnection,
        **at.server,
    )


def sentinel_pool_async(url: str, **options: object) -> redis.asyncio.ConnectionPool:
    """As `sentinel_pool`, for asyncio; a call waits while all connections are busy."""
    at = _parse(url, options)
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    sentinel = _AsyncSentinel(at.sentinels, sentinel_kwargs={**at.sentinel, "retry": retry})
    return AsyncPrimaryPool(at.service, sentinel, **at.server)


def _parse(url: str, options: Mapping[str, object]) -> _Address:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    login = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    service, _, database = parts.path.strip("/").partition("/")
    server = server_options(parts, database, query)
    shared = {
        name: value for name, value in server.items() if name == "ssl" or name.startswith("ssl_")
    }
    return _Address(
        sentinels=[(host, port or SENTINEL_PORT) for host, port in hosts_of(url)],
        service=service,
        server={**server, **options},
        sentinel={
            **shared,
            **login,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "protocol": 2,
        },
    )


def server_options(parts: SplitResult, database: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return redis-py's options of connections to the server of an address, without its host and
    port.
    """
    scheme, user = parts.scheme.partition("+")[0], parts.netloc.rpartition("@")[0]
    read = dict(
        parse_url(f"{scheme}://{user}{'@' if user else ''}server/{database}?{urlencode(query)}")
    )
    tls = {"ssl": True} if scheme == "rediss" else {}
    return tls | {
        name: value
        for name, value in read.items()
        if name not in ("host", "port", "connection_class")
    }


def _unknown(service: str) -> redis.sentinel.MasterNotFoundError:
    """Return the error in place of redis-py's, which shows the options of every sentinel's
    connections.
    """
    return redis.sentinel.MasterNotFoundError(
        f"no sentinel of the address knows a live primary of {service!r}"
    )


class _Sentinel(redis.sentinel.Sentinel):
    def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return super().discover_master(service_name)
        except redis.sentinel.MasterNotFoundError:
            raise _unknown(service_name) from None


class _AsyncSentinel(redis.asyncio.sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError:
            raise _unknown(service_name) from None


class PrimaryConnection(redis.sentinel.SentinelManagedConnection):
    def send_packed_command(self, command: object, check_health: bool = True) -> None:
        """Ask for the primary before the connection is opened again, also for a client that has no
        pool to do it.
        """
        if self._sock is None:
            self.connect()
        super().send_packed_command(command, check_health)


class TlsPrimaryConnection(PrimaryConnection, SSLConnection):
    pass


class PrimaryPool(redis.sentinel.SentinelConnectionPool):
    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.close()


class AsyncPrimaryPool(
    redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool
):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()
