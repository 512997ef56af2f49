"""The lines printed at start: the gateway's address, and how browsers on other machines reach it.
Knows no route.
"""

import getpass
import os
from collections.abc import Callable, Mapping

from fleet.config.safety import is_loopback
from fleet.config.schema import WebConfig
from fleet.process.lan_address import EVERYWHERE, lan_address


def startup_lines(
    web: WebConfig,
    port: int,
    env: Mapping[str, str] = os.environ,
    *,
    find_address: Callable[[], str | None] = lan_address,
) -> list[str]:
    """Return the address, and a way to get microphone access from another machine where the address
    does not allow it.

    `env`: SSH_CONNECTION is set if the user is on another machine, and has the address by which
    that reaches this one.
    `find_address`: finds this machine's address for other devices, such as phones.
    """
    scheme = web.scheme
    shown = "localhost" if web.host in EVERYWHERE or is_loopback(web.host) else web.host
    shown = f"[{shown}]" if ":" in shown else shown
    lines = [f"console {scheme}://{shown}:{port}/  API {scheme}://{shown}:{port}/v1"]
    elsewhere = find_address() if web.host in EVERYWHERE else None
    if elsewhere is not None:
        lines[0] += f"  from other devices {scheme}://{elsewhere}:{port}/"
    if is_loopback(web.host):
        ssh = _ssh_line(port, env.get("SSH_CONNECTION", ""))
        if ssh is not None:
            lines.append(
                f"to talk from your own machine run there:  {ssh}  and open "
                f"{scheme}://localhost:{port}/"
            )
    elif scheme == "http":
        ssh = (
            _ssh_line(port, env.get("SSH_CONNECTION", ""))
            or f"ssh -L {port}:127.0.0.1:{port} USER@HOST"
        )
        lines.append(
            "browsers give sound and microphone only to localhost and https; from another "
            "machine use "
            f"{ssh}  or serve https: --set web.tls=self-signed"
        )
    return lines


def _ssh_line(port: int, connection: str) -> str | None:
    """`connection`: value of SSH_CONNECTION, that is address and port of the client, then of this
    machine.
    """
    words = connection.split()
    if len(words) != 4:
        return None
    host, ssh_port = words[2], words[3]
    extra = "" if ssh_port == "22" else f"-p {ssh_port} "
    return f"ssh {extra}-L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}"
