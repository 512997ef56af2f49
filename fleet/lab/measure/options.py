"""Command-line parser of `fleet bench`, built from the declarations of all measurements. Measures
nothing.
"""

import argparse
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from fleet.lab.measure.measurement import (
    Argument,
    BenchOptions,
    Measurement,
    argument,
    whole_number,
)

PACKAGES = ("fleet.lab.measure", "fleet.lab.studies")
DECLARATION = re.compile(r"^MEASUREMENT = ", re.MULTILINE)
COLUMNS, INDENT = 100, 15
SPLIT = """\
  --hand-off, --interference and --engines start fleets of their own. For the first two, a
  deployment without split stages is split wherever it can be; the checkpoint is a tiny random one
  unless one is named.

Examples
  fleet bench                                       the fleet at http://127.0.0.1:8000
  fleet bench --up --baseline transformers          start a fleet, measure it, compare it, stop it
  fleet bench --up --set checkpoint=/models/x --requests 32 --concurrency 16 --json out.json \
--png out.png
  fleet bench --url http://gpu-box:8000 --max-tokens 200 --frames 400
  fleet bench --voice --up                          latency of spoken turns
  fleet bench --voice --sessions 50 --engine fake --requests 4
                                                    fifty voice sessions on one gateway
  fleet bench --hop --transfer                      no fleet is needed
  fleet bench --gpu --json gpu.json --check         this machine's GPU; needs neither Redis nor NIXL
  fleet bench --scale --streams 10,300 --check      the control plane alone
  fleet bench --hand-off --interference --png x.png cost and benefit of splitting
  fleet bench --engines --set graph=text            engines compared, where vLLM is installed
  fleet bench --spans --check                       cost and benefit of dividing a model's layers
  fleet bench --links --check                       a divided model over slow links
  fleet bench --hand-off --config configs/thinker_pd.yaml --set checkpoint=/models/x \
--set device=cuda

Numbers from a busy machine mean little: the report gives the background load.
Exit status: 0 measured, 1 the measurement failed (one line gives the cause) or, with --check, a
target was missed, 2 invalid arguments.
"""
FLEET = (
    argument(
        "--url", help="gateway of a running fleet (default: 127.0.0.1 at the deployment's web.port)"
    ),
    argument(
        "--up", action="store_true", help="start a fleet on free ports, and stop it afterwards"
    ),
    argument("--config", type=Path, metavar="FILE", help="deployment file, as for `fleet up`"),
    argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one of its keys; repeatable",
    ),
)
_positive = whole_number()
# Two or more: the reference implementation cannot speak an answer of one token or one frame.
_pair = whole_number(2)
LOAD = (
    argument("--requests", type=_positive, default=16, metavar="N", help="requests per phase (16)"),
    argument(
        "--concurrency",
        type=_positive,
        default=8,
        metavar="C",
        help="requests at a time in the second phase (8)",
    ),
    argument(
        "--max-tokens", type=_pair, default=24, metavar="T", help="maximum answer tokens (24)"
    ),
    argument(
        "--frames",
        type=_pair,
        default=60,
        metavar="F",
        help="maximum rows of later sampling stages (60)",
    ),
    argument(
        "--warm-up",
        type=whole_number(0),
        default=3,
        metavar="N",
        help="requests before the measurement (3)",
    ),
)
REPORT = (
    argument("--json", type=Path, metavar="FILE", help="every number, and the machine"),
    argument("--png", type=Path, metavar="FILE", help="a picture of the numbers"),
    argument("--check", action="store_true", help="exit with status 1 if a target is missed"),
)


@cache
def measurements() -> tuple[Measurement, ...]:
    """Return all declared measurements, ordered by `place`.

    A measurement is left out if a library that its module imports is not installed.
    """
    found = [each for name in _modules() for each in _declared(name)]
    return tuple(sorted(found, key=lambda each: each.place))


def _modules() -> Iterator[str]:
    """Yield the names of modules that declare a measurement, found by their text, without importing
    them.
    """
    for package in PACKAGES:
        folders = map(Path, import_module(package).__path__)
        for file in (file for folder in folders for file in folder.glob("*.py")):
            if DECLARATION.search(file.read_text()):
                yield f"{package}.{file.stem}"


def _declared(module: str) -> list[Measurement]:
    try:
        return [import_module(module).MEASUREMENT]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "fleet":
            raise
        return []


def parse(args: list[str]) -> BenchOptions:
    """Parse the arguments of `fleet bench`. Raises: SystemExit with status 0 after `--help`, 2 for
    invalid arguments.
    """
    every = measurements()
    parser = _parser(every)
    options = parser.parse_args(args, BenchOptions())
    if options.url and options.up:
        parser.error("--url measures a running fleet, --up starts one: give one of them")
    chosen = [each for each in every if each.is_chosen(options)]
    of_gateway = any(each.of_gateway for each in chosen)
    if not chosen or ((options.url or options.up) and not of_gateway):
        chosen += [each for each in every if each.is_default]
    options.chosen = tuple(sorted(chosen, key=lambda each: each.place))
    small = [each.option for each in every if each.has_small]
    if options.small and not any(each.has_small for each in chosen):
        parser.error(f"--small is the small size of {', '.join(small)}: give one of them")
    for each in every:
        if error := each.conflict(options):
            parser.error(error)
    return options


def _parser(every: tuple[Measurement, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet bench",
        description="Measure a fleet through its API, and compare it with the reference "
        "implementation.",
        epilog=_epilog(every),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    small = ", ".join(each.option for each in every if each.has_small)
    others: list[Argument] = []
    for each in every:
        if each.option:
            others.append(argument(each.option, action="store_true", help=each.help))
        others += each.arguments
    others.append(argument("--small", action="store_true", help=f"for {small}: a small size"))
    groups = {"fleet": FLEET, "load": LOAD, "other measurements": others, "report": REPORT}
    for title, arguments in groups.items():
        group = parser.add_argument_group(title)
        for each in arguments:
            group.add_argument(each.name, **each.settings)
    return parser


def _epilog(every: tuple[Measurement, ...]) -> str:
    """Return the end of the help text: a description of each measurement, then examples and exit
    status.
    """
    lines = ["What is measured"]
    for label, text in ((label, text) for each in every for label, text in each.about.items()):
        first = f"  {label}".ljust(INDENT)
        if first[-1] != " ":
            lines.append(first)
            first = " " * INDENT
        indent = " " * INDENT
        lines += textwrap.wrap(text, COLUMNS, initial_indent=first, subsequent_indent=indent)
    return "\n".join(lines) + "\n" + SPLIT
