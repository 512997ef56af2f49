"""The report as a table for the terminal. Measures nothing."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fleet.pocket.judge.report import Figure, JudgeReport

_TITLES = {"typed": "typed questions", "speech_out": "speech out", "speech_in": "speech in", "speed": "speed"}
_NOTHING = "-"


def show(report: JudgeReport, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{report.model} at {report.url}, {report.sampling}; {machine.processor}, {machine.cores} cores, "
        f"load {machine.load_1min} before",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    missed = len(report.missed)
    targets = sum(figure.target is not None for figure in report.figures)
    console.print(f"{targets - missed} of {targets} targets met", style="red" if missed else "green", highlight=False)


def _table(report: JudgeReport) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position, column in enumerate(("", "measured", "of", "target", "")):
        table.add_column(column, justify="right" if position else "left", no_wrap=True)
    parts = list(dict.fromkeys(figure.part for figure in report.figures))
    for part in parts:
        took_s = report.took_s.get(part)
        table.add_row(f"[bold]{_TITLES[part]}[/]" + (f" [dim]{took_s:.0f} s[/]" if took_s is not None else ""))
        for figure in report.figures:
            if figure.part == part:
                table.add_row(*_cells(figure))
        table.add_section()
    return table


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    name = figure.name if figure.target is not None else f"  [dim]{figure.name}[/]"
    if figure.target is None:
        return name, _number(figure), f"{figure.count}", "", ""
    sign = "<=" if figure.at_most else ">="
    verdict = "[green]met[/]" if figure.met else "[red]missed[/]"
    return name, _number(figure), f"{figure.count}", f"{sign} {figure.target:g}{_unit(figure)}", verdict


def _number(figure: Figure) -> str:
    if figure.value is None:
        return _NOTHING
    digits = 0 if figure.unit in ("", "ms") else 1 if figure.unit == "%" else 2
    return f"{figure.value:.{digits}f}{_unit(figure)}"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""
