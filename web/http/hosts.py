"""By which names a gateway may be asked for: a page that gives its own name this machine's address must not reach it.

A gateway on loopback without a key trusts whoever reaches it. A browser reaches it for any site whose name is made to lead here
(DNS rebinding), and then counts it as that site's own. The name is in the Host header. Knows no route.
"""

from urllib.parse import urlsplit

from fleet.config.safety import is_loopback
from fleet.config.schema import WebConfig


class Hosts:
    """With a key any name will do, for other sites have none; so it will beyond loopback. Listed names allow no others."""

    def __init__(self, web: WebConfig, *, has_key: bool) -> None:
        self._known = {name.lower() for name in (web.host, *web.allowed_hosts)}
        self._checked = bool(web.allowed_hosts) or (not has_key and is_loopback(web.host))

    def refusal(self, host: str | None) -> str | None:
        """Why not, and what to do; None where it may. Programs that name no host are no browsers."""
        if not self._checked or host is None:
            return None
        name = _name(host)
        if is_loopback(name) or name in self._known:
            return None
        return (
            f"host: this gateway is not asked for as {host[:80]!r}; open it as localhost, list the name in web.allowed_hosts, "
            "or set FLEET_API_KEY"
        )


def _name(host: str) -> str:
    """Without the port, and an address of IPv6 without its brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
