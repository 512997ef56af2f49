"""Entry point of the `fleet` command and its list of subcommands. Prints each known error as one
line on stderr.
"""

import logging
import sys

import typer

from fleet.cli import (
    batch,
    bench,
    cert,
    dead_letters,
    draft,
    inspect,
    jobs,
    keys,
    models,
    pocket,
    scale,
    serve,
    session,
    spans,
    train,
)
from fleet.cli.chaos import HELP as CHAOS_HELP
from fleet.cli.chaos import chaos
from fleet.cli.doctor import doctor
from fleet.cli.up import up
from fleet.core.errors import FleetError

app = typer.Typer(
    name="fleet",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve composite speech models with a fleet of ordinary processes.\n\n"
    "`fleet up` starts all processes on this machine; the other commands run one process each, "
    "or inspect the fleet.",
)
app.command()(up)
app.command()(serve.redis)
app.command()(serve.conductor)
app.command()(serve.worker)
app.command()(serve.web)
app.add_typer(jobs.app)
app.add_typer(keys.app)
app.command()(batch.batch)
app.command()(inspect.status)
app.command()(inspect.config)
app.command()(scale.scale)
app.command()(doctor)
app.command()(cert.cert)
app.add_typer(dead_letters.app)
app.add_typer(session.app)
app.add_typer(inspect.checkpoint_app)
app.add_typer(models.app)
app.add_typer(spans.app)
app.add_typer(draft.app)
app.add_typer(train.app)
app.add_typer(pocket.app)
app.command(context_settings=bench.PASS_THROUGH)(bench.bench)
app.command(help=CHAOS_HELP)(chaos)


def main() -> None:
    """Run the command. Exit status: 0 done, 1 a known error, printed as one line, 2 a usage
    mistake.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # logs each request of a download
    logging.getLogger("aioice").setLevel(logging.WARNING)  # logs each pair of addresses of a call
    try:
        app(prog_name="fleet")
    except FleetError as error:
        print(f"fleet: {error.message}", file=sys.stderr, flush=True)
        sys.exit(1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"fleet:{where}: {error.strerror or error}", file=sys.stderr, flush=True)
        sys.exit(1)
