"""The report as a table for the terminal."""

from rich.console import Console
from rich.table import Table

from fleet.lab.pocket.judge.report import Figure, JudgeReport
from fleet.lab.report.tables import NONE, table_of, target_cells

_TITLES = {
    "typed": "typed questions",
    "speech_out": "speech out",
    "speech_in": "speech in",
    "speed": "speed",
}


def show(report: JudgeReport, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{report.model} at {report.url}, {report.sampling}; {machine.processor}, "
        f"{machine.cores} cores, "
        f"load {machine.load_1min} before",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    missed = len(report.missed)
    targets = sum(figure.target is not None for figure in report.figures)
    console.print(
        f"{targets - missed} of {targets} targets met",
        style="red" if missed else "green",
        highlight=False,
    )


def _table(report: JudgeReport) -> Table:
    table = table_of("", "measured", "of", "target", "")
    parts = list(dict.fromkeys(figure.part for figure in report.figures))
    for part in parts:
        took_s = report.took_s.get(part)
        table.add_row(
            f"[bold]{_TITLES[part]}[/]" + (f" [dim]{took_s:.0f} s[/]" if took_s is not None else "")
        )
        for figure in report.figures:
            if figure.part == part:
                table.add_row(*_cells(figure))
        table.add_section()
    return table


def _cells(figure: Figure) -> tuple[str, str, str, str, str]:
    if figure.target is None:
        return f"  [dim]{figure.name}[/]", _number(figure), f"{figure.count}", "", ""
    target, verdict = target_cells(
        figure.target, _unit(figure), at_most=figure.at_most, met=figure.met
    )
    return figure.name, _number(figure), f"{figure.count}", target, verdict


def _number(figure: Figure) -> str:
    if figure.value is None:
        return NONE
    digits = 0 if figure.unit in ("", "ms") else 1 if figure.unit == "%" else 2
    return f"{figure.value:.{digits}f}{_unit(figure)}"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""
