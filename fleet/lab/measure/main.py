"""`fleet bench`: parses its arguments, and runs either the measurements of a fleet or that of this
machine's device.
"""

import sys

from fleet.core.errors import FleetError
from fleet.lab.measure.options import BenchOptions, parse
from fleet.lab.report.files import check_report_folders
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
    """Measure and report; return True if no target was missed.

    Each side is imported only when it is measured: a fleet needs Redis and NIXL, the device does
    not, but torch.
    """
    if options.gpu:
        from fleet.lab.measure import gpu

        return gpu.perform(options, args)
    from fleet.lab.measure import fleet_measures

    return fleet_measures.perform(options, args)
