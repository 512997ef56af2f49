"""Base classes of the live pages and of their contexts. Knows no single page."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlencode

from web.gateway.gateway import Gateway

LIVE = "/console/live/"

Query = Mapping[str, str]
"""Path and query parameters of a page, in one mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """Base of the data that a live page's template renders.

    `stream_query` contains the parameters of the page's event stream. `trouble` is the problem to
    show first, and `remedy` the command that solves it; both are "" without a problem. `known` is
    False until the fleet could be read, so that an empty list is not shown as "none". `status` is
    the HTTP status.
    """

    stream_query: Query = field(default_factory=dict[str, str])
    trouble: str = ""
    remedy: str = ""
    known: bool = True
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterLink:
    """A link that filters a list by state or role. `name` is the state or role, "" for all; `count`
    is the number of its rows with the other filters, `is_least` True if there may be more; `chosen`
    is True for the current filter.
    """

    name: str
    count: int
    path: str
    chosen: bool
    is_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredContext(PageContext):
    """Data of a page with a filtered list. `wanted` maps the name of every filter to its value, ""
    if unset. `older` and `newest` are the paths of other pages of the list, "" if there is no such
    page.
    """

    wanted: dict[str, str]
    older: str = ""
    newest: str = ""

    @property
    def filtered(self) -> bool:
        return any(self.wanted.values())


class LivePage(ABC):
    """Base of the live pages: a page with the template `KEY.html` at `path`, which the navigation
    shows as `active`.

    `title` is its heading, by default the key; the page of one object has the object's id.
    `live` names the template blocks that are sent again when they change; a block is one element
    whose id is the block's name. `context` is the class of the page's data, shown with its defaults
    when the fleet cannot be read.
    """

    key: ClassVar[str]
    title: ClassVar[str] = ""
    active: ClassVar[str]
    path: ClassVar[str]
    live: ClassVar[tuple[str, ...]]
    context: ClassVar[type[PageContext]]

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    async def read(self, query: Query) -> PageContext:
        """Read the fleet and return the page's data. Raises: FleetError, which the page then
        shows.
        """

    def empty(self, query: Query) -> PageContext:
        """Return the page's data without any data of the fleet, for when it cannot be read."""
        return self.context()


def read_filters(query: Query, names: Sequence[str]) -> dict[str, str]:
    return {name: query.get(name, "").strip() for name in names}


def build_path(path: str, query: Query) -> str:
    """Return `path` with the parameters that are not empty."""
    used = {name: value for name, value in query.items() if value}
    return path + (f"?{urlencode(used)}" if used else "")
