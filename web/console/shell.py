"""The frame around every page: navigation, logout, the token for changes. Knows no page's
content.
"""

from dataclasses import dataclass

from starlette.requests import Request

from fleet.core.clock import now_us
from web.gateway.gateway import Gateway

NAV = (
    ("voice", "/", "Voice"),
    ("overview", "/overview", "Overview"),
    ("requests", "/requests", "Requests"),
    ("workers", "/workers", "Workers"),
    ("queues", "/queues", "Queues"),
    ("transfers", "/transfers", "Transfers"),
    ("training", "/training", "Training"),
    ("sessions", "/sessions", "Sessions"),
    ("jobs", "/jobs", "Jobs"),
    ("logs", "/logs", "Logs"),
    ("docs", "/docs", "API"),
)
"""Key, path and label of each page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """Data of the frame. `active`: key of the selected navigation item. `csrf`: value of the header
    `x-csrf-token` of changes.

    `read_only`: buttons that change the fleet are left out. `locked`: the browser can log out.
    `now_us`: this server's clock, for the ages that a page shows. `origin`: the address by which
    the browser reaches this server, such as `http://localhost:8001`.
    """

    model: str
    active: str
    csrf: str
    read_only: bool
    locked: bool
    now_us: int
    origin: str
    nav: tuple[tuple[str, str, str], ...] = NAV


def build_shell(gateway: Gateway, csrf: str, active: str, origin: str) -> Shell:
    """Return the frame of a page. `csrf`: the token of the browser's login, "" without one."""
    return Shell(
        model=gateway.model,
        active=active,
        csrf=csrf,
        read_only=gateway.config.web.read_only,
        locked=bool(csrf),
        now_us=now_us(),
        origin=origin,
    )


def find_origin(request: Request) -> str:
    """Return scheme, host and port as the browser's address bar has them.

    Behind a proxy they are what its X-Forwarded-Proto and X-Forwarded-Host name. The result is only
    shown to the sender of these headers, so they need no trust.
    """
    scheme = _first(request.headers.get("x-forwarded-proto", ""))
    host = _first(request.headers.get("x-forwarded-host", "")) or request.url.netloc
    return f"{scheme if scheme in ('http', 'https') else request.url.scheme}://{host}"


def _first(values: str) -> str:
    """Return the value that the first of several proxies set."""
    return values.partition(",")[0].strip()
