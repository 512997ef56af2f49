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
ReadOnly = Annotated[
    bool,
    typer.Option("--read-only", help="Let people look and talk, but change nothing of the fleet: --set web.read_only=true."),
]


def with_read_only(overrides: list[str] | None, read_only: bool) -> list[str] | None:
    """The overrides, the switch among them where it was given."""
    return [*(overrides or ()), "web.read_only=true"] if read_only else overrides


def passed_on(config_file: Path | None, overrides: list[str] | None) -> list[str]:
    """The shared options as words of a command line."""
    words = ["--config", str(config_file)] if config_file else []
    for override in overrides or ():
        words += ["--set", override]
    return words
