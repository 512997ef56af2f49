"""How a person's browser reaches this gateway, in the lines printed at start. Knows no route and opens nothing."""

import getpass
import os
from collections.abc import Mapping

from fleet.config.safety import is_loopback
from fleet.config.schema import WebConfig

EVERYWHERE = ("0.0.0.0", "::")


def how_to_reach(web: WebConfig, port: int, env: Mapping[str, str] = os.environ) -> list[str]:
    """The address; and where a browser elsewhere would have no microphone at it, the way that gives it one.

    `env`: SSH_CONNECTION says that whoever reads this sits at another machine, and how that reaches this one.
    """
    scheme = web.scheme
    shown = "localhost" if web.host in EVERYWHERE or is_loopback(web.host) else web.host
    shown = f"[{shown}]" if ":" in shown else shown
    lines = [f"console {scheme}://{shown}:{port}/  API {scheme}://{shown}:{port}/v1"]
    if is_loopback(web.host):
        ssh = _ssh_line(port, env.get("SSH_CONNECTION", ""))
        if ssh is not None:
            lines.append(f"to talk from your own machine run there:  {ssh}  and open {scheme}://localhost:{port}/")
    elif scheme == "http":
        ssh = _ssh_line(port, env.get("SSH_CONNECTION", "")) or f"ssh -L {port}:127.0.0.1:{port} USER@HOST"
        lines.append(
            "browsers give sound and microphone only to localhost and https; from another machine use "
            f"{ssh}  or serve https: --set web.tls=self-signed"
        )
    return lines


def _ssh_line(port: int, connection: str) -> str | None:
    """`connection` as sshd gives it: the client's address and port, then those by which it reached this machine."""
    words = connection.split()
    if len(words) != 4:
        return None
    host, ssh_port = words[2], words[3]
    extra = "" if ssh_port == "22" else f"-p {ssh_port} "
    return f"ssh {extra}-L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}"
