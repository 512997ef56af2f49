"""Templates, and static files under addresses that change with their content. Knows no page."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from web.console import formats

HERE = Path(__file__).parent
STATIC = HERE / "static"


class Templates:
    """Renders whole pages, and single blocks of them. A name that a context lacks is an error, never an empty string."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(formats.FILTERS)
        names = cast("dict[str, object]", self._environment.globals)
        names["static"] = static_url
        # as a global, since a block that is rendered alone does not see what its template imports
        names["ui"] = self._environment.get_template("parts/ui.html").module

    def render(self, name: str, **values: object) -> str:
        return self._environment.get_template(name).render(**values)

    def render_block(self, name: str, block: str, **values: object) -> str:
        """One `{% block %}` of a template, as it would stand in the whole page."""
        template = self._environment.get_template(name)
        return "".join(_pieces(template, block, values))


def _pieces(template: Template, block: str, values: dict[str, object]) -> Iterator[str]:
    return template.blocks[block](template.new_context(values))


@cache
def static_url(name: str) -> str:
    return f"/static/{name}?v={compute_digest(STATIC / name)}"


def compute_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
