"""Connections to a Redis whose primary may change: before it connects, the client asks Sentinel, or
the nodes of a cluster, which server is the primary now.

`redis+sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST...]/SERVICE[/DATABASE][?OPTIONS]`: user and
password are for the servers; the options `sentinel_username` and `sentinel_password` are for the
sentinels.
`redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST...][?OPTIONS]`: all keys of a fleet have one hash
tag (`keys.PREFIX`), hence one slot, and one server owns it.
With `rediss+...`, TLS protects all connections. Other options are redis-py's, for example
`ssl_ca_certs`. Source: Redis cluster specification.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
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
from fleet.core.errors import ConfigError

SENTINEL_PORT, NODE_PORT, ASK_TIMEOUT_S = 26379, 6379, 1.0
SLOT = key_slot(keys.NONE.encode())
POOL_OPTIONS = ("max_connections", "timeout")
MOVED = "another server owns the slot of the fleet's keys now"
Node = tuple[str, int]
Slots = Sequence[Sequence[Any]]
"""Reply of CLUSTER SLOTS, one element per slot range: first slot, last slot, then each server of
the range, the primary first, as host, port, id and more.
"""


class _Address(NamedTuple):
    """Parsed `redis+sentinel` or `redis+cluster` address. `hosts`: sentinels or nodes to ask.
    `service`: name of the primary, for sentinels and in errors. `server`: options of connections to
    the primary. `asked`: options of connections to `hosts`.
    """

    hosts: list[Node]
    service: str
    server: dict[str, Any]
    asked: dict[str, Any]


def primary_pool(url: str, **options: object) -> redis.ConnectionPool:
    """Return a pool of connections to the primary. `options`: keyword arguments of `redis.Redis`.
    Raises: ValueError, TypeError for bad options in `url`.
    """
    at = _parse(url, options)
    asked = {**at.asked, "retry": Retry(NoBackoff(), 0)}
    manager = (
        _Nodes(at.hosts, asked) if is_cluster(url) else _Sentinel(at.hosts, sentinel_kwargs=asked)
    )
    kind = _TlsConnection if at.server.pop("ssl", False) else _Connection
    return _Pool(at.service, manager, connection_class=kind, **at.server)


def primary_pool_async(url: str, **options: object) -> redis.asyncio.ConnectionPool:
    """Return an asyncio pool of connections to the primary, as `primary_pool` does. A call waits
    while all connections are busy.
    """
    at = _parse(url, options)
    asked = {**at.asked, "retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
    manager = (
        _AsyncNodes(at.hosts, asked)
        if is_cluster(url)
        else _AsyncSentinel(at.hosts, sentinel_kwargs=asked)
    )
    kind = _AsyncTlsConnection if at.server.pop("ssl", False) else _AsyncConnection
    return _AsyncPool(at.service, manager, connection_class=kind, **at.server)


def _parse(url: str, options: Mapping[str, object]) -> _Address:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if is_cluster(url):
        service, port = f"slot {SLOT}", NODE_PORT
        server = {**_server_options(parts, "0", query), **options}
        asked = {name: value for name, value in server.items() if name not in POOL_OPTIONS}
    else:
        login = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        service, _, database = parts.path.strip("/").partition("/")
        port = SENTINEL_PORT
        server = _server_options(parts, database, query)
        tls = {name: value for name, value in server.items() if name.partition("_")[0] == "ssl"}
        asked = {**tls, **login, "protocol": 2}
        server |= options
    quickly = {"socket_timeout": ASK_TIMEOUT_S, "socket_connect_timeout": ASK_TIMEOUT_S}
    hosts = [(host, own_port or port) for host, own_port in hosts_of(url)]
    return _Address(hosts, service, server, {**asked, **quickly})


def _server_options(parts: SplitResult, database: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return redis-py's connection options from an address, without host and port."""
    scheme, user = parts.scheme.partition("+")[0], parts.netloc.rpartition("@")[0]
    read = dict(
        parse_url(f"{scheme}://{user}{'@' if user else ''}server/{database}?{urlencode(query)}")
    )
    tls = {"ssl": True} if scheme == "rediss" else {}
    left_out = ("host", "port", "connection_class")
    return tls | {name: value for name, value in read.items() if name not in left_out}


def _unknown(service: str) -> MasterNotFoundError:
    """Return the error for a service without a primary. redis-py's own error shows the options,
    passwords included, of every sentinel's connections.
    """
    return MasterNotFoundError(f"no sentinel of the address knows a live primary of {service!r}")


class _Sentinel(redis.sentinel.Sentinel):
    def discover_master(self, service_name: str) -> Node:
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError:
            raise _unknown(service_name) from None


class _AsyncSentinel(redis.asyncio.sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> Node:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError:
            raise _unknown(service_name) from None


class _KnownNodes:
    """Known nodes of a cluster: first the nodes in the address, then nodes that they named.
    `sentinels` is empty and exists for redis-py's pools.
    """

    def __init__(self, nodes: list[Node], options: dict[str, Any]) -> None:
        self._nodes = nodes
        self._options = options
        self.sentinels: tuple[redis.Redis, ...] = ()

    def _owner(self, slots: Slots, asked: Node) -> Node | None:
        """Return the primary of the fleet's slot; None if the slot has no server. `slots`: reply of
        CLUSTER SLOTS from the node `asked`; nodes in it are added to the known nodes.
        """
        owner: Node | None = None
        for first, last, *servers in slots:
            found = [_address(server, asked) for server in servers]
            self._nodes += [node for node in found if node not in self._nodes]
            if first <= SLOT <= last:
                owner = found[0]
        return owner

    def _unknown(self, service: str) -> MasterNotFoundError:
        asked = ", ".join(f"{host}:{port}" for host, port in self._nodes)
        return MasterNotFoundError(
            f"no node of the cluster knows the server of {service}; asked: {asked}"
        )


def _address(server: Sequence[Any], asked: Node) -> Node:
    """Return the address of a server in a reply of CLUSTER SLOTS. A node that does not know its own
    host leaves the host out; the address is then the host of the node `asked`.
    """
    host, port = server[0], int(server[1])
    name = host.decode() if isinstance(host, bytes) else host
    return (name if name and name != "?" else asked[0]), port


class _Nodes(_KnownNodes):
    def discover_master(self, service_name: str) -> Node:
        """Return the address of the slot's primary. redis-py's pools call this method. Raises:
        MasterNotFoundError; ConfigError if an asked server is no node of a cluster.
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
        raise self._unknown(service_name) from next(iter(errors), None)


class _AsyncNodes(_KnownNodes):
    async def discover_master(self, service_name: str) -> Node:
        """Return the address of the slot's primary, as `_Nodes.discover_master` does."""
        errors: list[RedisError] = []
        for node in tuple(self._nodes):
            async with redis.asyncio.Redis(host=node[0], port=node[1], **self._options) as client:
                slots: Slots = ()
                with _asked(node, errors):
                    slots = cast(Slots, await client.execute_command("CLUSTER SLOTS"))
            if owner := self._owner(slots, node):
                return owner
        raise self._unknown(service_name) from next(iter(errors), None)

    async def aclose(self) -> None:
        """Do nothing, since no connection stays open between two questions. redis-py's pools call
        this method.
        """


@contextmanager
def _asked(node: Node, errors: list[RedisError]) -> Generator[None]:
    """Handle the errors of asking a node within the block. An error of the connection is added to
    `errors`. Raises: ConfigError if the server is no node of a cluster; errors of a refused user.
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


class _Connection(redis.sentinel.SentinelManagedConnection):
    def send_packed_command(self, command: object, check_health: bool = True) -> None:
        """Send a command. A closed connection first asks for the primary again; redis-py would do
        so only for a connection of a pool.
        """
        if self._sock is None:
            self.connect()
        super().send_packed_command(command, check_health)

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply. After a cluster's redirection, close the connection, so that it asks for
        the primary when it is opened again.
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
        """Read a reply, as `_Connection.read_response` does."""
        try:
            return await super().read_response(*args, **options)
        except AskError as error:
            await self.disconnect()
            raise RedisConnectionError(MOVED) from error


class _AsyncTlsConnection(_AsyncConnection, redis.asyncio.SSLConnection):
    pass


class _Pool(redis.sentinel.SentinelConnectionPool):
    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.close()


class _AsyncPool(
    redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool
):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()
