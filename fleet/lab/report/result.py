"""Results of measurements, and a report of several results: on the terminal, as a picture, and as
JSON. Measures nothing.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType

from fleet.lab.report.files import write_json
from fleet.lab.report.machine import Machine, describe_machine
from fleet.lab.report.plot import Panel, draw_panels
from fleet.lab.report.stats import Ratio
from fleet.lab.report.tables import print_line, ratio_table

MS = 1e3
FLEET, MANY, OTHER, TWIN, PLAYED = "#2563eb", "#0d9488", "#b45309", "#7c3aed", "#6b7280"
"""Colours in the pictures: Fleet, many concurrent requests, another system, the slow twin, and
audio as it is played. Pictures without these subjects use the colours for other lines.
"""
P95_ALPHA = 0.4
NOISY_CORES = 0.2
PANEL_INCHES = (6.0, 3.8)


class Result(msgspec.Struct, frozen=True):
    """Outcome of one measurement. Its methods give the report its tables, panels and targets.

    A result may have a field `others_cores`, the background load in cores: a number, or a tuple
    with a number for each part of the measurement; None where the load is unknown.
    """

    def tables(self) -> Iterable[RenderableType]:
        """Return the tables for the terminal, in order."""
        return ()

    def panels(self) -> Sequence[Panel]:
        """Return the panels for the picture, in order."""
        return ()

    def targets(self) -> Sequence[Ratio]:
        """Return the measured numbers that have a target."""
        return ()

    def background_loads(self) -> Sequence[float | None]:
        """Return the background load of each part of the measurement, in cores."""
        loads: float | Sequence[float | None] | None = getattr(self, "others_cores", None)
        return loads if isinstance(loads, Sequence) else (loads,)

    def percentiles(self) -> dict[str, msgspec.Struct]:
        """Return summaries by name; the JSON file has them before the raw numbers."""
        return {}


class Report(msgspec.Struct, kw_only=True):
    """Results of one run of a command, by key, with a description of the machine.

    `command`: arguments of the run. `began`: local time, ISO 8601. `subject`: beginning of the
    picture's title.
    """

    command: tuple[str, ...]
    began: str = msgspec.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    machine: Machine = msgspec.field(default_factory=describe_machine)
    results: dict[str, Result] = {}
    subject: str = ""

    @property
    def ratios(self) -> list[Ratio]:
        return [ratio for result in self.results.values() for ratio in result.targets()]

    @property
    def missed(self) -> list[Ratio]:
        return [ratio for ratio in self.ratios if not ratio.met]

    def show(self, console: Console) -> None:
        """Print the machine, the tables, the targets and a warning about background load."""
        print_line(console, machine_line(self.machine))
        for result in self.results.values():
            console.print(*result.tables(), highlight=False)
        if self.ratios:
            console.print(ratio_table(self.ratios))
        loads = [load for result in self.results.values() for load in result.background_loads()]
        others_cores = max((load or 0.0 for load in loads), default=0.0)
        if others_cores > NOISY_CORES:
            line = f"background load of up to {others_cores:.1f} cores: measure again on a quiet "
            print_line(console, f"{line}machine", style="yellow")

    def draw(self, path: Path) -> None:
        """Write the picture of all panels to `path`; nothing is written if no result has panels."""
        panels = [panel for result in self.results.values() for panel in result.panels()]
        machine = self.machine
        title = (
            f"{self.subject}{machine.processor}, {machine.cores} cores, load {machine.load_1min} "
            f"before, {self.began}"
        )
        draw_panels(panels, path, title, PANEL_INCHES)

    def write(self, path: Path, keys: Iterable[str] = ()) -> None:
        """Write the JSON file. `keys`: keys that the file must have; a key without a result is
        null.
        """
        found: dict[str, object] = {}
        found.update(dict.fromkeys(keys))
        for key, result in self.results.items():
            found |= parts if (parts := parts_of(result)) else {key: result}
        percentiles: dict[str, msgspec.Struct] = {}
        for result in self.results.values():
            percentiles |= result.percentiles()
        head = {"began": self.began, "command": self.command, "machine": self.machine}
        file = {
            "percentiles": percentiles,
            "met": {ratio.name: ratio.met for ratio in self.ratios},
            "report": {**head, **found, "ratios": self.ratios},
        }
        write_json(file, path)


class NamedParts(Result, frozen=True):
    """Result of several parts: each field is a separate entry of the JSON report, under the field's
    name.
    """


def parts_of(result: Result) -> dict[str, object]:
    """Return the fields of a `NamedParts` result by name; {} for any other result."""
    return msgspec.structs.asdict(result) if isinstance(result, NamedParts) else {}


def machine_line(machine: Machine) -> str:
    """Describe the machine in one line."""
    libraries = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, load "
        f"{machine.load_1min} before; Python {machine.python}, {libraries}"
    )
