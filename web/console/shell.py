"""The frame around every page: navigation, logout, the token for changes. Knows no page's
content.
"""

from dataclasses import dataclass

from starlette.requests import Request

from fleet.core.clock import now_us
from web.gateway.gateway import Gateway
from web.http.callers import current_caller


@dataclass(frozen=True, slots=True, kw_only=True)
class NavigationRoom:
    """An item of the navigation. `pages` are the key, path and label of each of its pages; the
    first page is the one that the room's own link opens. A room with one page has no second row.
    """

    label: str
    pages: tuple[tuple[str, str, str], ...]

    @property
    def path(self) -> str:
        return self.pages[0][1]

    def has(self, key: str) -> bool:
        """Return True if the page `key` is in this room."""
        return any(page == key for page, _, _ in self.pages)


ROOMS = (
    NavigationRoom(label="Talk", pages=(("talk", "/", "Talk"),)),
    NavigationRoom(
        label="Now",
        pages=(
            ("now", "/now", "Now"),
            ("incidents", "/incidents", "Incidents"),
            ("orders", "/orders", "Actions"),
        ),
    ),
    NavigationRoom(
        label="Answers",
        pages=(
            ("requests", "/requests", "Answers"),
            ("sessions", "/sessions", "Sessions"),
            ("kept", "/kept", "Kept answers"),
        ),
    ),
    NavigationRoom(
        label="Fleet",
        pages=(
            ("fleet", "/fleet", "Fleet"),
            ("workers", "/workers", "Workers"),
            ("queues", "/queues", "Queues"),
            ("transfers", "/transfers", "Transfers"),
            ("training", "/training", "Training"),
            ("jobs", "/jobs", "Jobs"),
        ),
    ),
    NavigationRoom(label="Logs", pages=(("logs", "/logs", "Logs"),)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """Data of the frame around a page. `active` is the key of the page in the navigation, "" for a
    page outside it. `csrf` is the value of the header `x-csrf-token` that buttons send.

    `why_read_only` is why this browser cannot change the fleet, "" if it can. `locked` is True if
    the browser is logged in with the API key named `key`, and shows the logout. `now_us` is this
    server's time, for the ages that a page shows. `origin` is the address by which the browser
    reaches this server, such as `http://localhost:8001`.
    """

    model: str
    active: str
    csrf: str
    why_read_only: str
    locked: bool
    key: str
    now_us: int
    origin: str
    rooms: tuple[NavigationRoom, ...] = ROOMS

    @property
    def room(self) -> NavigationRoom | None:
        """The room of the page, None for a page outside the navigation."""
        return next((room for room in self.rooms if room.has(self.active)), None)

    @property
    def read_only(self) -> bool:
        """True to hide the buttons that change the fleet."""
        return bool(self.why_read_only)


def build_shell(gateway: Gateway, csrf: str, active: str, origin: str) -> Shell:
    """Return the data of a page's frame. `csrf` is the CSRF token of the browser's login, ""
    without a login; `active` and `origin` are the fields of `Shell`.
    """
    caller = current_caller()
    no_scope = "" if caller.may("operate") else f"the key {caller.name} has no scope operate"
    return Shell(
        model=gateway.model,
        active=active,
        csrf=csrf,
        why_read_only="web.read_only" if gateway.config.web.read_only else no_scope,
        locked=bool(csrf),
        key=caller.name,
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
    """Return the first value of a header to which several proxies may have appended values."""
    return values.partition(",")[0].strip()
