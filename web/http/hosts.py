"""Check of the Host header, against DNS rebinding.

A gateway on loopback without a key trusts every client. A site whose name resolves to this machine
could make a browser send requests here as to its own origin; their Host header has the site's name.
Knows no route.
"""

from urllib.parse import urlsplit

from fleet.config.safety import is_loopback
from fleet.config.schema import WebConfig


class AllowedHosts:
    """Host names under which the gateway may be called: `web.host`, the names in
    `web.allowed_hosts` and names of loopback. Any name is allowed if `web.allowed_hosts` is empty
    and the gateway has a key or listens beyond loopback.
    """

    def __init__(self, web: WebConfig, *, has_key: bool) -> None:
        self._known = {name.lower() for name in (web.host, *web.allowed_hosts)}
        self._checked = bool(web.allowed_hosts) or (not has_key and is_loopback(web.host))

    def find_refusal(self, host: str | None) -> str | None:
        """Return why requests with this Host header are refused, or None. Requests without the
        header are accepted, since browsers always send it.
        """
        if not self._checked or host is None:
            return None
        name = _name(host)
        if is_loopback(name) or name in self._known:
            return None
        return (
            f"host: {host[:80]!r} is not a name of this gateway; open it as localhost, list the "
            "name in web.allowed_hosts, "
            "or set FLEET_API_KEY"
        )


def _name(host: str) -> str:
    """Return the host name in a Host header, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
