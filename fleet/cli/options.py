"""The options every command shares."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The deployment file. Without it: FLEET_CONFIG, else configs/GRAPH.yaml in this folder, else the defaults.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as --set web.port=8001. May be given many times."),
]
Keep = Annotated[
    bool,
    typer.Option("--keep", help="Start it again when it crashes or is killed; give up when it cannot start."),
]


def passed_on(config_file: Path | None, overrides: list[str] | None) -> list[str]:
    """The shared options as words of a command line."""
    words = ["--config", str(config_file)] if config_file else []
    for override in overrides or ():
        words += ["--set", override]
    return words
