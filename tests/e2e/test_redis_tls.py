"""Redis over TLS with the operator's certificate authority and client certificates, for every
process of a fleet; refusals are clear.
"""

import os
import re
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from redis.connection import Connection

from fleet.control.connect import connect, connect_async, connect_for_a_call
from fleet.core.errors import ConfigError, RedisUnreachable
from tests.certificates import DAY, Authority
from tests.e2e.gateways import Switch
from tests.support import RedisProcess, call_cli, set_options, start_cli

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("engine=fake", "device=cpu", "web.port=0", "transfer.kind=redis")
CERTIFICATE = "?ssl_ca_certs={0}/ca.crt&ssl_certfile={0}/client.crt"
COMPLETE = CERTIFICATE + "&ssl_keyfile={0}/client.key"


@contextmanager
def tls_port(folder: Path, server: RedisProcess, certificate: tuple[Path, Path]) -> Iterator[str]:
    """Serve TLS in front of a Redis server that is built without TLS, and require client
    certificates; yield the `rediss://` URL.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with Switch.to(server.port, context) as switch:
        yield f"rediss://localhost:{switch.port}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path)
    authority.issue("client", 90 * DAY)
    return authority


@pytest.fixture
def address(own_redis: RedisProcess, authority: Authority, tmp_path: Path) -> Iterator[str]:
    with tls_port(tmp_path, own_redis, authority.issue("server", 90 * DAY)) as address:
        yield address


def test_every_process_of_a_fleet_uses_redis_over_tls(address: str, tmp_path: Path) -> None:
    """Every process of a fleet uses Redis over TLS, also the keeper, which fences a worker that
    dies.
    """
    env = {"REDIS_URL": address + COMPLETE.format(tmp_path)}
    with start_cli("up", *set_options(*SETTINGS), cwd=tmp_path, env=env) as fleet:
        fleet.wait_for("fleet: ready at", timeout_s=120)
        worker = fleet.wait_for(r"worker (thinker@\S+:(\d+):\S+) is ready")
        os.kill(int(worker[2]), signal.SIGKILL)
        fleet.wait_for(
            rf"(?s)was killed by SIGKILL.*worker thinker@(?!\S+:{worker[2]}:)\S+ is ready",
            timeout_s=120,
        )
        logged = call_cli("status", cwd=tmp_path, env=env)
        assert (
            logged.returncode == 0
            and call_cli("jobs", "list", cwd=tmp_path, env=env).returncode == 0
        )
        checked = call_cli("doctor", *set_options(*SETTINGS), cwd=tmp_path, env=env)
        assert re.search(r"(?m)^OK +Redis server ", checked.stdout) and re.search(
            r"(?m)^OK +Redis client ", checked.stdout
        )
        assert fleet.stop() == 0


async def test_asynchronous_connection_uses_the_authority_and_the_certificate(
    address: str, tmp_path: Path
) -> None:
    client = connect_async(address + COMPLETE.format(tmp_path))
    assert await client.ping()
    await client.aclose()


def test_session_tickets_are_not_taken_for_a_reply(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS session tickets are not taken for a reply. The server sends them after the handshake;
    they may arrive before or after the first call.
    """
    connect_socket = Connection.connect

    def connect_and_wait(self: Connection) -> None:
        connect_socket(self)
        connected = cast("socket.socket", self._sock)  # pyright: ignore[reportPrivateUsage]
        select.select([connected], [], [], 1)

    monkeypatch.setattr(Connection, "connect", connect_and_wait)
    with connect_for_a_call(address + COMPLETE.format(tmp_path), 10) as client:
        assert client.ping()


@pytest.mark.parametrize(
    ("options", "host", "message"),
    [
        (
            "",
            "localhost",
            r"certificate of Redis is refused \(.*\): name the authority that signed it: add "
            r"\?ssl_ca_certs=FILE",
        ),
        (COMPLETE, "127.0.0.1", "write the address with a name that is in the certificate"),
        (
            "?ssl_ca_certs={0}/none.crt",
            "localhost",
            r"a file after the `\?` .* cannot be read \(No such file or directory\)",
        ),
        (
            CERTIFICATE + "&ssl_keyfile={0}/server.key",
            "localhost",
            "is not the key of ssl_certfile",
        ),
    ],
)
def test_refused_certificate_is_an_error_with_the_remedy_without_waiting(
    options: str, host: str, message: str, address: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^REDIS_URL: .*{message}"):
        connect(address.replace("localhost", host) + options.format(tmp_path), patience_s=600)


def test_expired_certificate_of_redis_is_named(
    own_redis: RedisProcess, authority: Authority, tmp_path: Path
) -> None:
    with tls_port(tmp_path, own_redis, authority.issue("old", -2 * DAY)) as address:
        url = address + COMPLETE.format(tmp_path)
        with pytest.raises(
            ConfigError, match="certificate has expired.*: renew it, and restart Redis"
        ):
            connect(url, patience_s=600)
        done = call_cli("doctor", *set_options(*SETTINGS), cwd=tmp_path, env={"REDIS_URL": url})
    assert done.returncode == 1
    assert re.search(
        r"(?m)^REFUSED +Redis server +REDIS_URL: the certificate of Redis .* expired", done.stdout
    )


def test_missing_certificate_of_the_client_is_named(address: str, tmp_path: Path) -> None:
    """A missing client certificate is named in the error. Redis then ends the connection, as a
    restarting server does, so commands wait before they report it (here 0 s).
    """
    with pytest.raises(RedisUnreachable, match="if Redis requires certificates of clients"):
        connect(f"{address}?ssl_ca_certs={tmp_path}/ca.crt", patience_s=0)
