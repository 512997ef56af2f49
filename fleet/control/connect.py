"""Connections to Redis, opened within a time limit and with the scripts loaded, and the calls over
them. Knows no request.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from fleet.config.settings import has_password, is_cluster, is_sentinel
from fleet.control import keys
from fleet.control.embedded import read_password
from fleet.control.outage import cause_of, code_of
from fleet.control.primary import primary_pool, primary_pool_async
from fleet.control.scripts import SCRIPTS, Arg, Call, sha, source
from fleet.control.tls_refusals import client_certificate_hint, tls_refusal
from fleet.control.undeclared_keys import find_script_refusal
from fleet.core.errors import ConfigError, RedisUnreachable
from fleet.core.ids import WorkerId

log = logging.getLogger(__name__)

Reply = object
T = TypeVar("T")
SOCKET_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32


def connect(url: str, *, patience_s: float = 10.0, one_connection: bool = False) -> redis.Redis:
    """Return a client of a Redis that has answered and has Fleet's scripts loaded. Waits up to
    `patience_s` seconds for Redis, and longer while Redis loads its data.

    `one_connection`: use a single connection, for a thread that keeps a copy of Redis's state. A
    pool silently replaces a broken idle connection, although the Redis behind the new connection
    may have lost its last writes; with a single connection the next call raises a ConnectionError.
    Raises: RedisUnreachable after `patience_s`; ConfigError immediately if Redis refuses access or
    refuses scripts with undeclared keys, or if its certificate is refused.
    """
    deadline = time.monotonic() + patience_s
    logged = ""
    while True:
        try:
            return _ready(url, one_connection)
        except BusyLoadingError:
            logged = _log_once(logged, f"waiting for redis at {safe_url(url)} to load its data")
        except (AuthenticationError, NoPermissionError) as error:
            raise ConfigError(describe_failure(url, error), param="REDIS_URL") from error
        except (TypeError, ValueError) as error:
            wrong = f"REDIS_URL: its options cannot be read ({error}); correct what follows the `?`"
            raise ConfigError(wrong, param="REDIS_URL") from error
        except RedisError as error:
            if refusal := tls_refusal(url, error):
                raise ConfigError(refusal, param="REDIS_URL") from error
            if time.monotonic() > deadline:
                raise RedisUnreachable(describe_failure(url, error)) from error
            logged = _log_once(logged, f"waiting for redis at {safe_url(url)}")
        time.sleep(0.1)


def _ready(url: str, one_connection: bool) -> redis.Redis:
    # No silent retry: a read of notices or a claim has another answer the second time.
    client = _client(
        url, SOCKET_TIMEOUT_S, socket_connect_timeout=2.0, one_connection=one_connection
    )
    try:
        load_scripts(client)  # unlike PING, this is answered while Redis refuses writes
        if refusal := find_script_refusal(client):
            raise ConfigError(refusal, param="REDIS_URL")
    except BaseException:
        client.close()
        raise
    return client


def connect_for_a_call(url: str, timeout_s: float) -> redis.Redis:
    """Return a client for one or two urgent calls, which sends no command of its own before
    the calls and retries nothing. `timeout_s`: time limit of connecting and of each call.

    Over TLS the client announces itself first, as other clients do. After the handshake the server
    sends session tickets, which redis-py mistakes for data of an earlier call ("Connection not
    ready") unless a reply was read after the tickets.
    """
    options: dict[str, Any] = (
        {} if urlsplit(url).scheme.startswith("rediss") else {"driver_info": None}
    )
    return _client(url, timeout_s, socket_connect_timeout=timeout_s, **options)


def _client(
    url: str, socket_timeout: float, *, one_connection: bool = False, **options: Any
) -> redis.Redis:
    options |= {"socket_timeout": socket_timeout, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
    if is_sentinel(url) or is_cluster(url):
        pool = primary_pool(url, **options)
        client = redis.Redis(connection_pool=pool, single_connection_client=one_connection)
        client.auto_close_connection_pool = True
        return client
    credentials = _credentials(url)
    return redis.Redis.from_url(
        url, single_connection_client=one_connection, credential_provider=credentials, **options
    )


class _PasswordFile(CredentialProvider):
    """Credentials from the password file beside a Unix socket. The file is read for each new
    connection, since the server writes it before it listens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = read_password(self._folder)
        return (password,) if password else cast("tuple[str]", ())

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _credentials(url: str) -> CredentialProvider | None:
    """Return the reader of the password file if `url` is a Unix socket without a password; else
    None.
    """
    parts = urlsplit(url)
    if parts.scheme != "unix" or parts.username or "username=" in parts.query or has_password(url):
        return None
    return _PasswordFile(Path(unquote(parts.path)).parent)


def _log_once(logged: str, line: str) -> str:
    if line != logged:
        log.info("%s", line)
    return line


def connect_async(url: str) -> redis.asyncio.Redis:
    """Return an asyncio client, without connecting. A call waits while all connections of the pool
    are busy.
    """
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": SOCKET_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": 2.0,
        "protocol": 2,
    }
    if is_sentinel(url) or is_cluster(url):
        return redis.asyncio.Redis.from_pool(primary_pool_async(url, **options))
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, credential_provider=_credentials(url), **options
    )
    return redis.asyncio.Redis.from_pool(pool)


def safe_url(url: str) -> str:
    """Return the address without user, password and query."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{'***@' if at else ''}{host}{parts.path}"


def describe_failure(url: str, error: RedisError) -> str:
    """Return a message that says why Redis at `url` cannot be used, with the remedy and without the
    password.
    """
    if isinstance(error, AuthenticationError | NoPermissionError):
        return _refused(url, error)
    if refusal := tls_refusal(url, error):
        return refusal
    if code_of(error):
        return f"{cause_of(error)} (at {safe_url(url)})"
    hint = client_certificate_hint(url, error)
    return f"no Redis answers at {safe_url(url)} ({error}); {_how_to_find(url)}{hint}"


def _how_to_find(url: str) -> str:
    if urlsplit(url).scheme != "unix":
        return "start one with `fleet redis`, or name the fleet's own by REDIS_URL"
    folder = os.path.realpath(Path(unquote(urlsplit(url).path)).parent)
    return (
        f"looked for in {folder}; start one with `fleet up` or `fleet redis`, or, if one runs, "
        "use this command in the "
        "folder where it was started, pass its --set data_dir=DIR, or set REDIS_URL"
    )


def _refused(url: str, error: RedisError) -> str:
    """Return the message for a Redis that refuses access: which part of `url` is wrong, and the
    correct form.
    """
    local = urlsplit(url).scheme == "unix"
    scheme, where = ("unix", "/PATH") if local else ("redis", "HOST:PORT")
    if is_sentinel(url):
        scheme, where = urlsplit(url).scheme, "HOST:PORT,HOST:PORT/SERVICE"
    elif is_cluster(url):
        scheme, where = urlsplit(url).scheme, "HOST:PORT,HOST:PORT"
    write = f"write REDIS_URL as {scheme}://:PASSWORD@{where}, or {scheme}://USER:PASSWORD@{where}"
    if isinstance(error, NoPermissionError):
        return (
            f"Redis at {safe_url(url)} answers, but its user may not do what Fleet needs "
            f"({error}); grant it, or {write}"
        )
    if not has_password(url):
        beside = (
            " and the file `password` beside its socket is missing, another user's or not the "
            "server's"
            if local
            else ""
        )
        return (
            f"Redis at {safe_url(url)} answers, but asks for a password and REDIS_URL has "
            f"none{beside}; {write}"
        )
    if "without any password" in str(error):
        return (
            f"Redis at {safe_url(url)} answers, but has no password set and REDIS_URL gives "
            "one; leave it out: redis://HOST:PORT"
        )
    return (
        f"Redis at {safe_url(url)} answers, but refuses the password in REDIS_URL ({error}); "
        f"correct it: {write}"
    )


def load_scripts(client: redis.Redis) -> None:
    pipe = client.pipeline(transaction=False)
    for name in SCRIPTS:
        pipe.script_load(source(name))
    pipe.execute()


def exchange(client: redis.Redis, calls: Sequence[Call], *commands: Sequence[Arg]) -> list[Reply]:
    """Send script calls, and after them raw commands, in one pipelined round trip; return the
    replies in order.

    A script that Redis does not have, because it restarted, is loaded and sent again. Such a script
    did not run, so nothing happens twice.
    Raises: redis errors of the connection, and the first error among the replies.
    """
    replies = exchange_each(client, calls, *commands)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def exchange_each(
    client: redis.Redis, calls: Sequence[Call], *commands: Sequence[Arg]
) -> list[Reply]:
    """Do as `exchange`, but return an error reply in its place among the replies. Raises: redis
    errors of the connection.
    """
    sent = [("EVALSHA", sha(call.script), *keys.DECLARED, *call.args) for call in calls] + [
        tuple(command) for command in commands
    ]
    replies = _pipelined(client, sent)
    for position, reply in enumerate(replies):
        if isinstance(reply, NoScriptError):
            load_scripts(client)
            replies[position] = _pipelined(client, [sent[position]])[0]
    return replies


def _pipelined(client: redis.Redis, commands: Sequence[tuple[Arg, ...]]) -> list[Reply]:
    """Send commands in one round trip; return their replies, with an exception for each error
    reply.

    Bypasses `client.pipeline()`, which costs 70 us more of CPU time, twice for every chunk.
    """
    connection = client.connection or client.connection_pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(commands))
        return [_reply(connection) for _ in commands]
    except BaseException:
        # Replies may still be in transit; a later call on this connection must not read them.
        connection.disconnect()
        raise
    finally:
        if client.connection is None:
            client.connection_pool.release(connection)


def _reply(connection: AbstractConnection) -> Reply:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Divide `items` into slices of at most `size`, so that one call occupies neither Redis nor an
    event loop for long.
    """
    return (items[first : first + size] for first in range(0, len(items), size))


def run(client: redis.Redis, call: Call) -> Reply:
    return exchange(client, (call,))[0]


async def run_async(client: redis.asyncio.Redis, call: Call) -> Reply:
    with cancellation_kept():
        try:
            return await client.execute_command(
                "EVALSHA", sha(call.script), *keys.DECLARED, *call.args
            )
        except NoScriptError:
            return await client.execute_command(
                "EVAL", source(call.script), *keys.DECLARED, *call.args
            )


async def run_each_async(client: redis.asyncio.Redis, calls: Sequence[Call]) -> list[Reply]:
    """Run scripts in order, in one round trip (two if Redis does not have them). Return the
    replies, with a RedisError for each call that failed. Raises: redis errors of the connection.
    """
    if not calls:
        return []
    replies = await _evaluated(client, [("EVALSHA", sha(call.script), call) for call in calls])
    unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if unknown:
        again = [("EVAL", source(calls[n].script), calls[n]) for n in unknown]
        for n, reply in zip(unknown, await _evaluated(client, again), strict=True):
            replies[n] = reply
    return replies


async def _evaluated(
    client: redis.asyncio.Redis, evaluations: Sequence[tuple[str, str, Call]]
) -> list[Reply]:
    pipe = client.pipeline(transaction=False)
    for command, script, call in evaluations:
        pipe.execute_command(command, script, *keys.DECLARED, *call.args)
    with cancellation_kept():
        return cast("list[Reply]", await pipe.execute(raise_on_error=False))


@contextmanager
def cancellation_kept() -> Iterator[None]:
    """Raise CancelledError at the end of the block if the task was cancelled within it.

    redis-py sends by `asyncio.wait_for`, which before Python 3.12 discards a cancellation that
    arrives as its call completes: a time-out around a loop of calls would then never end the loop.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


async def run_with(client: redis.asyncio.Redis, call: Call, *command: Arg) -> tuple[Reply, Reply]:
    """Run a script as `run_async` does, and after it `command` on the same connection, in one round
    trip.

    Returns the replies of the script and of the command; the latter may be an error. Raises: redis
    errors of the connection and the script.
    """
    commands = ("EVALSHA", sha(call.script)), ("EVAL", source(call.script))
    reply: Reply = None
    other: Reply = None
    for evaluation in commands:
        pipe = client.pipeline(transaction=False)
        pipe.execute_command(*evaluation, *keys.DECLARED, *call.args)
        pipe.execute_command(*command)
        reply, other = cast("list[Reply]", await pipe.execute(raise_on_error=False))
        if not isinstance(reply, NoScriptError):
            break
    if isinstance(reply, Exception):
        raise reply
    return reply, other


async def run_and_read(
    client: redis.asyncio.Redis, call: Call, *reads: Sequence[Arg]
) -> list[Reply]:
    """Run a script and then commands that read its results, as one transaction, so that Redis
    cannot lose the writes in between. Return the replies in order. Raises: the first redis error
    among the replies.
    """
    replies: list[Reply] = []
    for evaluation in (("EVALSHA", sha(call.script)), ("EVAL", source(call.script))):
        pipe = client.pipeline(transaction=True)
        pipe.execute_command(*evaluation, *keys.DECLARED, *call.args)
        for read in reads:
            pipe.execute_command(*read)
        with cancellation_kept():
            replies = cast("list[Reply]", await pipe.execute(raise_on_error=False))
        if not isinstance(replies[0], NoScriptError):
            break
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


async def answer_of(call: Awaitable[T]) -> T:
    """Return the result of an awaited Redis call. Raises: RedisUnreachable in place of redis-py's
    errors.
    """
    try:
        return await call
    except RedisError as error:
        raise unreachable(error) from error


def unreachable(error: RedisError) -> RedisUnreachable:
    return RedisUnreachable(cause_of(error))


def text(value: Reply) -> str:
    """Return a Redis reply as text; "" for None."""
    return value.decode() if isinstance(value, bytes) else "" if value is None else str(value)


def first_text(value: Reply) -> str:
    """Return the first element of a list reply as text, or another reply as text."""
    return text(cast("list[Reply]", value)[0] if isinstance(value, list) else value)


def texts(value: Reply) -> list[str]:
    """Return the elements of a list reply as text; another reply becomes a list of one text."""
    return [
        text(part) for part in cast("list[Reply]", value if isinstance(value, list) else [value])
    ]


def worker_ids(value: Reply) -> list[WorkerId]:
    """Return a list reply of worker and gateway ids."""
    return [WorkerId(name) for name in texts(value)]


def pairs(value: Reply) -> dict[str, bytes]:
    """Return a flat reply of alternating fields and values (HGETALL in a script, a stream entry) as
    a dict.
    """
    if isinstance(value, dict):
        return {
            text(field): cast(bytes, v) for field, v in cast("dict[object, object]", value).items()
        }
    flat = cast("list[bytes]", value or [])
    return {text(flat[i]): flat[i + 1] for i in range(0, len(flat), 2)}


def number(fields: Mapping[str, bytes], name: str) -> int:
    """Return the field `name` as an integer; 0 if it is missing or empty."""
    return int(fields.get(name) or 0)


def stream_entries(reply: Reply) -> list[tuple[str, dict[str, bytes]]]:
    """Return (id, fields) of each entry in a reply of XRANGE or XREVRANGE."""
    return [
        (text(entry), pairs(raw)) for entry, raw in cast("list[tuple[bytes, object]]", reply or [])
    ]


def entry_order(entry: str) -> tuple[int, int]:
    """Return the id of a stream entry in a form that sorts as Redis does: (time in milliseconds,
    sequence number).
    """
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
