"""What every live page's context begins with. Knows no page's content."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from fleet.graphs import Graph

LIVE = "/console/live/"
NUM_COLOURS = 6

Query = Mapping[str, str]
"""A page's parameters: those of its path and those behind the `?`, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """`stream`: the address of the page's own stream. `trouble` is what the visitor must know first, `remedy` the command that
    mends it; both empty when all is well. `known`: the fleet could be read, now or before; else what is empty says nothing.
    `status` is HTTP's.
    """

    title: str
    stream: str
    trouble: str = ""
    remedy: str = ""
    known: bool = True
    status: int = 200


def stream_path(key: str, query: Query) -> str:
    return build_path(LIVE + key, query)


def build_path(path: str, query: Query) -> str:
    """`path` with what of `query` is not empty."""
    given = {name: value for name, value in query.items() if value}
    return path + (f"?{urlencode(given)}" if given else "")


def assign_colours(graph: Graph) -> dict[str, int]:
    """The fixed colour of each stage, by its place in the graph."""
    return {stage.name: number % NUM_COLOURS for number, stage in enumerate(graph.stages)}
