"""Rules of HTTP/1.1 for the head of a request: version, Host, target, transfer coding, upgrade.

Knows no socket.

Source: RFC 9112 sections 2.3, 3.2 and 6.1; RFC 9110 section 7.8.
"""

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address

from web.http.protocol import refusal
from web.http.protocol.refusal import ConnectionRefusal

Fields = list[tuple[bytes, bytes]]

HOST = re.compile(
    rb"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]"
    rb"|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)"
    rb"(?::[0-9]{0,5})?"
)
"""Pattern of a Host field: `uri-host [":" port]`. Source: RFC 3986 section 3.2, without IP literals
of future versions.
"""
ABSOLUTE = re.compile(
    rb"(?:http|ws)s?://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL
)


@dataclass(slots=True)
class RequestHead:
    """Head of an HTTP request, parsed. `target` is the request target; `version` is "1.1" or the
    like; names in `fields` are in lower case.
    """

    method: bytes
    target: bytes
    version: str
    fields: Fields

    def find_fault(self) -> ConnectionRefusal | None:
        """Return the refusal of an invalid head, or None for a valid head."""
        if self.version not in ("1.0", "1.1"):
            return refusal.VERSION
        if self.method == b"CONNECT":
            return refusal.NO_PROXY
        hosts = self._values(b"host")
        if len(hosts) > 1 or (self.version == "1.1" and not hosts):
            return refusal.NOT_ONE_HOST
        if not all(map(_is_host, hosts)):
            return refusal.INVALID_HOST
        if not self._has_valid_target():
            return refusal.INVALID_TARGET
        if self._listed(b"transfer-encoding") not in ([], [b"chunked"]):
            return refusal.UNKNOWN_CODING
        return None

    def use_origin_form(self) -> None:
        """Replace an absolute target by its path and query, and the Host field by the target's
        host. Source: RFC 9112 section 3.2.2.
        """
        absolute = ABSOLUTE.fullmatch(self.target)
        if absolute is None:
            return
        rest = absolute["rest"]
        self.target = rest if rest.startswith(b"/") else b"/" + rest
        others = [field for field in self.fields if field[0] != b"host"]
        self.fields[:] = [(b"host", absolute["authority"]), *others]

    def wants_websocket(self) -> bool:
        """Return True if the client offers an upgrade to WebSocket, alone or among other
        protocols.
        """
        if self.method != b"GET" or self.version != "1.1":
            return False
        asks = b"upgrade" in self._listed(b"connection")
        return asks and b"websocket" in self._listed(b"upgrade")

    def choose_websocket(self) -> None:
        """Remove all protocols but WebSocket from the Upgrade field, as the WebSocket library
        requires.
        """
        self.fields[:] = [*self._without_upgrade(), (b"upgrade", b"websocket")]

    def without_upgrade(self) -> bytes:
        """Return the head as bytes without its Upgrade field, so that the parser does not skip the
        body.
        """
        lines = [b"%s %s HTTP/%s" % (self.method, self.target, self.version.encode())]
        lines += [name + b": " + value for name, value in self._without_upgrade()]
        return b"\r\n".join([*lines, b"", b""])

    def _has_valid_target(self) -> bool:
        if self.target[:1] in (b"/", b"*"):
            return True
        absolute = ABSOLUTE.fullmatch(self.target)
        return (
            absolute is not None
            and absolute["authority"] != b""
            and _is_host(absolute["authority"])
        )

    def _without_upgrade(self) -> Fields:
        return [field for field in self.fields if field[0] != b"upgrade"]

    def _values(self, name: bytes) -> list[bytes]:
        return [value for field, value in self.fields if field == name]

    def _listed(self, name: bytes) -> list[bytes]:
        """Return the members of a comma-separated header field, which may be repeated, in lower
        case.
        """
        members = b",".join(self._values(name)).lower().split(b",")
        return [member.strip(b" \t") for member in members if member.strip(b" \t")]


def _is_host(value: bytes) -> bool:
    found = HOST.fullmatch(value)
    if found is None or found["ipv6"] is None:
        return found is not None
    try:
        IPv6Address(found["ipv6"].decode())
    except AddressValueError:
        return False
    return True
