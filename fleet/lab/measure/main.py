"""`fleet bench`: parses its arguments, runs the measurements that they request, and reports."""

import sys

from rich.console import Console

from fleet.core.errors import FleetError
from fleet.lab.measure.measurement import BenchOptions, Context
from fleet.lab.measure.options import measurements, parse
from fleet.lab.report.files import check_report_folders
from fleet.lab.report.progress import meter
from fleet.lab.report.result import Report
from fleet.process.interrupts import interrupted_by_sigterm

INTERRUPTED = 130


def run(args: list[str]) -> int:
    """Run the command and return its exit status; an error is one line on stderr."""
    try:
        options = parse(args)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 2
    try:
        check_report_folders(json=options.json, png=options.png)
        with interrupted_by_sigterm():
            met = _perform(options, args)
    except (FleetError, OSError) as error:
        print(f"fleet bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fleet bench: stopped before the end", file=sys.stderr)
        return INTERRUPTED
    return 1 if options.check and not met else 0


def _perform(options: BenchOptions, args: list[str]) -> bool:
    """Run the requested measurements, show and write the report; return True if no target was
    missed.
    """
    report = Report(command=tuple(args))
    with meter("fleet bench") as progress:
        context = Context(options, progress)
        for measurement in options.chosen:
            report.results[measurement.key] = measurement.measure(context)
    report.show(Console())
    if options.json:
        report.write(options.json, [each.key for each in measurements()])
    if options.png:
        report.draw(options.png)
    return not report.missed
