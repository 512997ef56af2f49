"""Run `fleet bench` in tests, and read its JSON and terminal reports."""

import io
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from fleet.lab.measure.main import run
from fleet.lab.report.result import Report, Result

PNG = b"\x89PNG"
ResultT = TypeVar("ResultT", bound=Result)


def run_bench(folder: Path, kind: type[ResultT], key: str, *arguments: str) -> ResultT:
    """Run `fleet bench`, which must succeed, and return one result from its JSON file."""
    path = folder / "out.json"
    assert run([*arguments, "--json", str(path)]) == 0
    return read_result(path, kind, key)


def read_result(path: Path, kind: type[ResultT], key: str) -> ResultT:
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["report"][key], kind)


def report_of(**results: Result) -> Report:
    return Report(command=("--up",), results=dict(results))


def shown(report: Report) -> str:
    """Return a benchmark report as the terminal shows it."""
    console = Console(width=160, record=True, file=io.StringIO())
    report.show(console)
    return console.export_text()


def missed(result: Result) -> list[str]:
    """Return the names of the targets that a benchmark result misses."""
    return [ratio.name for ratio in result.targets() if not ratio.met]
