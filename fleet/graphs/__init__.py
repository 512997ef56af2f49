"""The graphs (composite models) that Fleet ships, by name. Declarations only: knows no runtime."""

from fleet.core.errors import ConfigError
from fleet.graphs.base import (
    ALL,
    EACH,
    TOKENS,
    ChunkPolicy,
    Edge,
    Graph,
    RequestInput,
    Stage,
    Transition,
)
from fleet.graphs.cascade import CASCADE
from fleet.graphs.qwen3_omni import QWEN3_OMNI
from fleet.graphs.text import TEXT

GRAPHS: dict[str, Graph] = {graph.name: graph for graph in (QWEN3_OMNI, TEXT, CASCADE)}
DEFAULT_GRAPH = QWEN3_OMNI.name

__all__ = [
    "ALL",
    "DEFAULT_GRAPH",
    "EACH",
    "GRAPHS",
    "TOKENS",
    "ChunkPolicy",
    "Edge",
    "Graph",
    "RequestInput",
    "Stage",
    "Transition",
    "get_graph",
]


def get_graph(name: str) -> Graph:
    """Return the graph with this name. Raises: ConfigError naming the graphs that exist."""
    if name not in GRAPHS:
        raise ConfigError(
            f"graph: unknown graph {name!r}; use one of {', '.join(sorted(GRAPHS))}", param="graph"
        )
    return GRAPHS[name]
