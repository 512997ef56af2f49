"""Command-line options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The deployment file. Default: FLEET_CONFIG, else configs/GRAPH.yaml in this "
        "folder, else built-in defaults.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, such as --set web.port=8001. Can be repeated. --set checkpoint=X "
        "also replaces the checkpoints of single stages that the file names.",
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep", help="Restart the process when it crashes or is killed; end when it cannot start."
    ),
]
ReadOnly = Annotated[
    bool,
    typer.Option(
        "--read-only",
        help="Serve requests and pages, but refuse changes to the fleet: --set web.read_only=true.",
    ),
]


def with_read_only(overrides: list[str] | None, read_only: bool) -> list[str] | None:
    """Return the `--set` overrides, with one added for `--read-only` if that option is given."""
    return [*(overrides or ()), "web.read_only=true"] if read_only else overrides


def passed_on(config_file: Path | None, overrides: list[str] | None) -> list[str]:
    """Return `--config` and `--set` arguments for a child command line."""
    arguments = ["--config", str(config_file)] if config_file else []
    for override in overrides or ():
        arguments += ["--set", override]
    return arguments
