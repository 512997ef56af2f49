"""`fleet jobs`: the worker of background jobs, and the two commands that submit jobs and list them."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.deployment import open_deployment
from fleet.cli.keep import keep
from fleet.cli.options import ConfigFile, Keep, Overrides, passed_on
from fleet.core.log_labels import Labels

if TYPE_CHECKING:
    from redis import Redis

app = typer.Typer(name="jobs", invoke_without_command=True)
LIST_PATIENCE_S = 2.0


@app.callback()
def jobs(context: typer.Context, config: ConfigFile = None, set_: Overrides = None, kept: Keep = False) -> None:
    """Run a worker of background jobs until it is stopped; `add` submits a job, `list` shows them all.

    Jobs survive restarts, since they lie in Redis. Stopping the worker ends the job under way, which then counts as failed.

    Examples:

      fleet jobs

      fleet jobs add bench -- --help

      fleet jobs list
    """
    if context.invoked_subcommand:
        return
    if kept:
        raise typer.Exit(asyncio.run(keep(["jobs", *passed_on(config, set_)])))
    from fleet.control.log_stream import shipping
    from fleet.jobs.worker import run_jobs

    connection = _connect(config, set_, patience_s=10.0)
    with shipping(open_deployment(config, set_).redis_url, Labels("jobs")):
        run_jobs(connection)


@app.command()
def add(
    kind: Annotated[str, typer.Argument(help="What to run: bench.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own words, after --.")] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Submit a job and print its id.

    Example: fleet jobs add bench -- --requests 20
    """
    from fleet.control.jobs import submit

    print(submit(_connect(config, set_), kind, arguments or []).id)


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the jobs, newest first: id, kind, state, and the last line of a failure.

    Example: fleet jobs list
    """
    from fleet.control.jobs import jobs as all_jobs

    for job in all_jobs(_connect(config, set_)):
        print(f"{job.id}  {job.kind:8} {job.state:9} {job.error}".rstrip())


def _connect(config: ConfigFile, overrides: Overrides, patience_s: float = LIST_PATIENCE_S) -> "Redis":
    from fleet.control.connect import connect

    return connect(open_deployment(config, overrides).redis_url, patience_s=patience_s)
