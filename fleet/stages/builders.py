"""The builders that a graph names, imported when they are needed."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from fleet.core.ids import StageName
from fleet.graphs import Graph
from fleet.stages.base import Builder, SpanBuilder


def stage_builder(graph: Graph, stage: StageName) -> Builder:
    return cast(Builder, _named(graph.stage(stage).builder))


def span_builder(graph: Graph, stage: StageName) -> SpanBuilder:
    """Return what loads a part of a stage's layers, for a stage whose layers can be divided."""
    return cast(SpanBuilder, _named(graph.stage(stage).span_builder))


def layer_counter(graph: Graph, stage: StageName) -> Callable[[Path], int]:
    """Return the function that counts the layers of a checkpoint, for a stage whose layers can be
    divided.
    """
    return cast("Callable[[Path], int]", _named(graph.stage(stage).layer_counter))


def _named(name: str) -> object:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
