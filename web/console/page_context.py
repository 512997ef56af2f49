"""Base classes of the live pages and of their contexts. Knows no single page."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlencode

from web.gateway.gateway import Gateway

LIVE = "/console/live/"

Query = Mapping[str, str]
"""A page's path and query parameters, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """Data that the template of every live page needs.

    `stream_query` has the parameters of the page's event stream. `trouble` is the problem to show
    first, and `remedy` the command that solves it; both are empty without a problem. `known` is
    False until the fleet could be read, so that an empty list is not shown as "none".
    `status` is the HTTP status.
    """

    stream_query: Query = field(default_factory=dict[str, str])
    trouble: str = ""
    remedy: str = ""
    known: bool = True
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterLink:
    """A link that filters a list by a state or role, "" for all. `count` is the number of matching
    rows in the unfiltered list.
    """

    name: str
    count: int
    path: str
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredContext(PageContext):
    """Data of a filtered list in pages. `wanted` is the value of every filter, "" if unset. `older`
    and `newest` are paths, "" without such a page.
    """

    wanted: dict[str, str]
    older: str = ""
    newest: str = ""

    @property
    def filtered(self) -> bool:
        return any(self.wanted.values())


class LivePage(ABC):
    """A page with the template `KEY.html` at `path`, shown in the navigation under `active`.

    `live` names the blocks that are sent again when they change; each is one element whose id is
    the block's name. `context` is the class of the page's context, shown with its defaults when the
    fleet cannot be read.
    """

    key: ClassVar[str]
    active: ClassVar[str]
    path: ClassVar[str]
    live: ClassVar[tuple[str, ...]]
    context: ClassVar[type[PageContext]]

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    async def read(self, query: Query) -> PageContext:
        """Raises: FleetError, which the page then shows."""

    def empty(self, query: Query) -> PageContext:
        """Return the context to show when the fleet cannot be read."""
        return self.context()


def read_filters(query: Query, names: Sequence[str]) -> dict[str, str]:
    return {name: query.get(name, "").strip() for name in names}


def build_path(path: str, query: Query) -> str:
    """Return `path` with the parameters that are not empty."""
    used = {name: value for name, value in query.items() if value}
    return path + (f"?{urlencode(used)}" if used else "")
