"""Rendering of templates, and addresses of static files that change with their content. Knows no
page.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fleet.core.ids import stage_of
from fleet.graphs import Graph
from web.console import formats
from web.console.hour import describe, link_of
from web.console.session_verdict import TROUBLE_NAMES

HERE = Path(__file__).parent
STATIC = HERE / "static"
NUM_COLOURS = 6


class Templates:
    """Renders pages and single blocks of them. A name missing from the context is an error."""

    def __init__(self, graph: Graph) -> None:
        self._colours = {
            stage.name: number % NUM_COLOURS for number, stage in enumerate(graph.stages)
        }
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters = cast("dict[str, object]", self._environment.filters)
        filters.update({form.__name__: form for form in formats.FILTERS})
        filters["colour"] = self._colour_of
        filters["event_text"], filters["event_link"] = describe, link_of
        filters["trouble"] = TROUBLE_NAMES.__getitem__
        globals_ = cast("dict[str, object]", self._environment.globals)
        globals_["static"] = static_url
        # globals, since a block rendered by itself does not see the imports of its template
        for name, part in (("ui", "parts/ui.html"), ("lane_parts", "parts/lanes.html")):
            globals_[name] = self._environment.get_template(part).module

    def _colour_of(self, role: str) -> int:
        """Return the colour number of a stage or role, which is the stage's position in the graph;
        -1 for other names.
        """
        return self._colours.get(stage_of(role), -1)

    def render(self, name: str, **values: object) -> str:
        return self._environment.get_template(name).render(**values)

    def render_block(self, name: str, block: str, **values: object) -> str:
        """Render the template block `block` of the live page `name`; the block may be defined in
        the base template.
        """
        context = self._environment.get_template(name).new_context(values)
        for inherited, render in self._environment.get_template("live.html").blocks.items():
            context.blocks.setdefault(inherited, []).append(render)
        return "".join(context.blocks[block][0](context))


@cache
def static_url(name: str) -> str:
    return f"/static/{name}?v={compute_digest(STATIC / name)}"


def compute_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
