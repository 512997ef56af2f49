"""`fleet bench`: passes its arguments to the benchmark, which parses its own options."""

import typer

PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}


def bench(context: typer.Context) -> None:
    """Measure a running fleet: latency, throughput, and its answers compared with the reference
    implementation.

    `fleet bench --help` lists the benchmark's own options.

    Example: fleet bench --help
    """
    from fleet.lab.measure.main import run

    status = run(context.args)
    raise typer.Exit(status or 0)
