"""`fleet jobs`: the worker of background jobs, and the commands that submit and list jobs."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from fleet.cli.deployment import (
    Deployment,
    open_deployment,
    open_serving_deployment,
    secure_data_dir,
)
from fleet.cli.options import ConfigFile, Keep, Overrides, passed_on
from fleet.cli.serve import idle
from fleet.cli.up import reachable
from fleet.config.settings import is_cluster
from fleet.core.errors import BadInput, ConfigError
from fleet.core.jobs import LISTS, NO_JOBS
from fleet.core.log_labels import Labels

if TYPE_CHECKING:
    from redis import Redis

app = typer.Typer(name="jobs", invoke_without_command=True)
DEFAULT_PORT = 8000
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The gateway that jobs measure. Default: the deployment's gateway on this machine.",
    ),
]


@app.callback()
def jobs(
    context: typer.Context,
    config: ConfigFile = None,
    set_: Overrides = None,
    kept: Keep = False,
    url: Url = None,
) -> None:
    """Run a worker of background jobs until it is stopped; `submit` submits a job, `list` lists all
    jobs.

    Jobs are stored in Redis and survive restarts. Stopping the worker ends the running job, which
    then counts as failed; a batch (POST /v1/batches) continues at the next start. Each job writes
    to its own folder under `data_dir`, which is removed with the job.

    Examples:

      fleet jobs

      fleet jobs submit bench requests=20

      fleet jobs list
    """
    if context.invoked_subcommand:
        return
    deployment = open_serving_deployment(config, set_)
    if kept:
        from fleet.cli.supervise import Surroundings, keep

        named = ["--url", url] if url else []
        around = Surroundings(redis_url=None, lease=deployment.config.lease)
        raise typer.Exit(asyncio.run(keep(["jobs", *passed_on(config, set_), *named], around)))
    if is_cluster(deployment.redis_url):
        idle(f"jobs: {NO_JOBS}")
    from fleet.control.log_stream import shipping
    from fleet.jobs.measured import Measured
    from fleet.jobs.worker import run_jobs

    connection = deployment.connect(patience_s=10.0)
    if deployment.config.data_dir.exists():
        secure_data_dir(deployment.config)
    os.umask(0o077)  # files that a job writes are private to this user
    with shipping(deployment.redis_url, Labels("jobs")):
        run_jobs(connection, Measured(config=deployment.config, url=url or gateway_url(deployment)))


@app.command()
def submit(
    kind: Annotated[str, typer.Argument(help="The kind of job: bench or train.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="The arguments of the job."),
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Submit a job and print its id.

    A bench job measures this deployment and writes to its own folder; the command `fleet bench` has
    more options. The job takes measure (serving, voice, barge-in, scale, hop or transfer),
    requests, concurrency, max_tokens, frames, warm_up, sessions, streams, scale_seconds, hops and
    check, which mean what the options of `fleet bench` mean. A train job takes samples and name,
    and does what `fleet train --corpus` does.

    Examples:

      fleet jobs submit bench requests=20

      fleet jobs submit bench measure=scale streams=10,300

      fleet jobs submit train samples=500
    """
    from fleet.control.jobs import submit as submit_job

    parsed = dict(map(_parse_argument, arguments or ()))
    print(submit_job(_connect(config, set_), kind, parsed).id)


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the jobs, newest first: id, kind, state, and the last line of an error.

    Example: fleet jobs list
    """
    from fleet.control.jobs import jobs as all_jobs

    for job in all_jobs(_connect(config, set_)):
        print(f"{job.id}  {job.kind:8} {job.state:9} {job.error}".rstrip())


def _connect(config: Path | None, set_: list[str] | None) -> "Redis":
    deployment = open_deployment(config, set_)
    if is_cluster(deployment.redis_url):
        raise ConfigError(f"REDIS_URL: {NO_JOBS}", param="REDIS_URL")
    return deployment.connect()


def _parse_argument(argument: str) -> tuple[str, object]:
    """Parse `NAME=VALUE` to the name and its YAML value; commas separate the values of a list.
    Raises: BadInput.
    """
    name, equals, value = argument.partition("=")
    if not equals or not name.isidentifier():
        raise BadInput(
            f"{argument[:80]!r} is not NAME=VALUE; write arguments as in `fleet jobs submit "
            "bench requests=20`",
            param="arguments",
        )
    return name, [
        _parse_value(part) for part in value.split(",")
    ] if name in LISTS else _parse_value(value)


def _parse_value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def gateway_url(deployment: Deployment) -> str:
    web = deployment.config.web
    return f"{web.scheme}://{reachable(web.host)}:{web.port or DEFAULT_PORT}"
