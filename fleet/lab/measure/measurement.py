"""Declaration of a measurement of `fleet bench`, and the context that its function receives.
Measures nothing.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fleet.config import FleetConfig
from fleet.config.deployment import open_config
from fleet.lab.report.progress import Meter
from fleet.lab.report.result import Result

Advance = Callable[[], None]


class BenchOptions(argparse.Namespace):
    """Parsed arguments of `fleet bench`. Declared here are the arguments that all measurements
    share; arguments of one measurement (`Measurement.arguments`) are further, untyped attributes.

    `chosen`: measurements to run, in order. Invariants: at most one of `url` and `up` is set;
    counts are positive.
    """

    chosen: "tuple[Measurement, ...]"
    url: str | None
    up: bool
    config: Path | None
    overrides: list[str]
    requests: int
    concurrency: int
    max_tokens: int
    frames: int
    warm_up: int
    small: bool
    json: Path | None
    png: Path | None
    check: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """A command-line option: names and settings for `ArgumentParser.add_argument`."""

    name: str
    settings: Mapping[str, Any]


def argument(name: str, **settings: Any) -> Argument:
    return Argument(name, settings)


def whole_number(least: int = 1) -> Callable[[str], int]:
    """Return an argument parser for whole numbers not below `least`."""

    def parse_number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse_number


@dataclass(frozen=True, slots=True)
class Context:
    """What a measurement's function receives: the parsed options, and the progress display."""

    options: BenchOptions
    progress: Meter

    def steps(self, label: str, total: int = 1) -> Advance:
        """Begin a progress bar of `total` steps. The returned function advances the bar by one
        step.
        """
        return self.progress.steps(label, total)

    def resolve(self, *own: str) -> FleetConfig:
        """Return the deployment named by the options, with further overrides `own`, resolved as
        `fleet up` does.

        Raises: ConfigError naming the field and the fix.
        """
        overrides = (*self.options.overrides, *own)
        return open_config(self.options.config, overrides)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A measurement of `fleet bench`.

    `place`: position among all measurements. `key`: name in the JSON report. `run`: function that
    measures, or its name `module:function` where its module needs libraries that are slow to
    import. `option`: option that requests the measurement, with its `help`. `is_requested`: returns
    True if other options request the measurement too. `about`: entries under "What is measured" in
    `--help`, by label. `arguments`: further options. `has_small`: True if there is a small size
    (`--small`). `of_gateway`: True if the fleet of `--url` or `--up` is measured. `is_default`:
    True if the measurement runs when nothing is requested. `conflict`: function that returns an
    error message if options exclude each other, else ""; called even if the measurement does not
    run.
    """

    place: int
    key: str
    run: Callable[[Context], Result] | str
    option: str = ""
    help: str = ""
    about: Mapping[str, str]
    arguments: tuple[Argument, ...] = ()
    has_small: bool = False
    of_gateway: bool = False
    is_default: bool = False
    is_requested: Callable[[BenchOptions], bool] = lambda _options: False
    conflict: Callable[[BenchOptions], str] = lambda _options: ""

    def measure(self, context: Context) -> Result:
        """Run the measurement and return its result. Raises: FleetError, OSError."""
        if not isinstance(self.run, str):
            return self.run(context)
        module, _, name = self.run.partition(":")
        function: Callable[[Context], Result] = getattr(import_module(module), name)
        return function(context)

    def is_chosen(self, options: BenchOptions) -> bool:
        flag = self.option.removeprefix("--").replace("-", "_")
        return getattr(options, flag, False) is True or self.is_requested(options)
