"""A Redis cluster: connections ask its nodes which server owns the slot of the fleet's keys now.

`redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST...][?OPTIONS]`, with `rediss+cluster` for TLS.
All keys of a fleet have one hash tag (`keys.PREFIX`), hence one slot, and one server owns it.
Source: Redis cluster specification.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from fleet.config.settings import hosts_of, is_cluster
from fleet.control import keys
from fleet.control.sentinel import AsyncPrimaryPool, PrimaryConnection, PrimaryPool, server_options
from fleet.core.errors import ConfigError

__all__ = ["cluster_pool", "cluster_pool_async", "is_cluster"]

NODE_PORT, NODE_TIMEOUT_S = 6379, 1.0
SLOT = key_slot(keys.NONE.encode())
NAME = f"slot {SLOT}"
_QUICKLY = {"socket_timeout": NODE_TIMEOUT_S, "socket_connect_timeout": NODE_TIMEOUT_S}
Node = tuple[str, int]
Slots = Sequence[Sequence[Any]]
"""The reply of CLUSTER SLOTS: first slot, last slot, then each server of the range, the primary
first, as host, port, id ...
"""


def cluster_pool(url: str, **options: object) -> redis.ConnectionPool:
    """Return connections to the owner. `options`: options of `redis.Redis`. Raises: ValueError,
    TypeError for bad options in `url`.
    """
    server = _options(url) | options
    nodes = _Nodes(url, {**server, **_QUICKLY, "retry": Retry(NoBackoff(), 0)})
    tls = server.pop("ssl", False)
    return PrimaryPool(
        NAME, nodes, connection_class=_TlsConnection if tls else _Connection, **server
    )


def cluster_pool_async(url: str, **options: object) -> redis.asyncio.ConnectionPool:
    """As `cluster_pool`, for asyncio; a call waits while all connections are busy."""
    server = _options(url) | options
    own = {
        name: value for name, value in server.items() if name not in ("max_connections", "timeout")
    }
    nodes = _AsyncNodes(
        url, {**own, **_QUICKLY, "retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
    )
    tls = server.pop("ssl", False)
    return AsyncPrimaryPool(
        NAME, nodes, connection_class=_AsyncTlsConnection if tls else _AsyncConnection, **server
    )


def _options(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return server_options(
        parts, "0", {name: values[-1] for name, values in parse_qs(parts.query).items()}
    )


class _KnownNodes:
    """Nodes of the cluster: first the nodes in the address, then the nodes that they named.
    `sentinels` is empty and exists for redis-py's pools.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._nodes: list[Node] = [(host, port or NODE_PORT) for host, port in hosts_of(url)]
        self._options = options
        self.sentinels: tuple[redis.Redis, ...] = ()

    def _owner(self, slots: Slots, asked: Node) -> Node | None:
        """Return the server of the fleet's slot, None if it has none; note the nodes that the reply
        names.
        """
        owner: Node | None = None
        for first, last, *servers in slots:
            found = [_address(server, asked) for server in servers]
            self._nodes += [node for node in found if node not in self._nodes]
            if first <= SLOT <= last:
                owner = found[0]
        return owner

    def _unknown(self) -> MasterNotFoundError:
        asked = ", ".join(f"{host}:{port}" for host, port in self._nodes)
        return MasterNotFoundError(
            f"no node of the cluster knows the server of {NAME}; asked: {asked}"
        )


def _address(server: Sequence[Any], asked: Node) -> Node:
    """Return a server's address. A node that does not know its own host leaves it out: it is the
    one that was asked.
    """
    host, port = server[0], int(server[1])
    name = host.decode() if isinstance(host, bytes) else host
    return (name if name and name != "?" else asked[0]), port


class _Nodes(_KnownNodes):
    def discover_master(self, service_name: str) -> Node:
        """Return the owner's address, in the method that redis-py's pools call. Raises:
        MasterNotFoundError; ConfigError.
        """
        errors: list[RedisError] = []
        for node in tuple(self._nodes):
            slots: Slots = ()
            with (
                redis.Redis(host=node[0], port=node[1], **self._options) as client,
                _asked(node, errors),
            ):
                slots = cast(Slots, client.execute_command("CLUSTER SLOTS"))
            if owner := self._owner(slots, node):
                return owner
        raise self._unknown() from next(iter(errors), None)


class _AsyncNodes(_KnownNodes):
    async def discover_master(self, service_name: str) -> Node:
        """As `_Nodes.discover_master`."""
        errors: list[RedisError] = []
        for node in tuple(self._nodes):
            async with redis.asyncio.Redis(host=node[0], port=node[1], **self._options) as client:
                slots: Slots = ()
                with _asked(node, errors):
                    slots = cast(Slots, await client.execute_command("CLUSTER SLOTS"))
            if owner := self._owner(slots, node):
                return owner
        raise self._unknown() from next(iter(errors), None)

    async def aclose(self) -> None:
        """Nothing stays open between two questions; redis-py's pools call this."""


@contextmanager
def _asked(node: Node, errors: list[RedisError]) -> Generator[None]:
    """Ask a node within the block; note the error if it does not answer. Raises: ConfigError;
    errors of a refused user.
    """
    try:
        yield
    except (AuthenticationError, NoPermissionError):
        raise
    except (RedisConnectionError, RedisTimeoutError) as error:
        errors.append(error)
    except ResponseError as error:
        wrong = (
            f"REDIS_URL: {node[0]}:{node[1]} is no node of a cluster ({error}); write "
            "redis://HOST:PORT"
        )
        raise ConfigError(wrong, param="REDIS_URL") from None


MOVED = "another server owns the slot of the fleet's keys now"


class _Connection(PrimaryConnection):
    def read_response(self, *args: Any, **options: Any) -> Any:
        """Close the connection after a redirection, so that it asks for the owner when it is opened
        again.
        """
        try:
            return super().read_response(*args, **options)
        except AskError as error:
            self.disconnect()
            raise RedisConnectionError(MOVED) from error


class _TlsConnection(_Connection, SSLConnection):
    pass


class _AsyncConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    async def read_response(self, *args: Any, **options: Any) -> Any:
        """As `_Connection.read_response`."""
        try:
            return await super().read_response(*args, **options)
        except AskError as error:
            await self.disconnect()
            raise RedisConnectionError(MOVED) from error


class _AsyncTlsConnection(_AsyncConnection, redis.asyncio.SSLConnection):
    pass
