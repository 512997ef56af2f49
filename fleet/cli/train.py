"""`fleet train`: train a draft head of a running fleet on a pool of prompts, and make a version of
it.
"""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.checkpoint import resolve_checkpoints
from fleet.cli.deployment import Deployment, open_deployment, open_serving_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import BadInput, ConfigError
from fleet.core.ids import new_request_id

if TYPE_CHECKING:
    from fleet.core.request import RequestSpec
    from fleet.drafts.capture.run import RunProgress
    from fleet.processing import Frontend

DEFAULT_SAMPLES = 256
OFF_HINT = (
    "training.enabled is false: set it to true in the deployment file, restart the "
    "fleet, and start `fleet worker trainer`"
)


app = typer.Typer(name="train", invoke_without_command=True)


@app.callback()
def train(
    context: typer.Context,
    pool: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lines of JSON: prompt or messages, and answer unless the fleet is to be asked.",
        ),
    ] = None,
    corpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1_000_000,
            help="N questions of Pocket's corpus instead, answered by the fleet.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, as the source of its version.")
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Train the draft head on a pool of prompts, while the fleet serves, and make a numbered
    version of it at the end.

    Each prompt and its answer are computed once more in the background, and sent to the trainer,
    which `fleet up` starts where `training.enabled` is true, and `fleet worker trainer` anywhere. A
    line shows the progress. Ctrl-C stops the run, which then makes no version; the next run
    continues with the head as trained so far.

    `fleet train forget` lets the trainer forget every sample that it holds.

    Exit status: 0 the run finished; 1 it failed, or was stopped.

    Examples:

      fleet train --pool prompts.jsonl

      fleet train --corpus 500 --name weekly
    """
    if context.invoked_subcommand:
        return
    deployment = open_serving_deployment(config, set_)
    if not deployment.config.training.enabled:
        raise ConfigError(OFF_HINT, param="training.enabled")
    if (pool is None) == (corpus is None):
        raise BadInput("--pool: give either --pool FILE or --corpus N", param="--pool")
    deployment.connect().close()
    progress = asyncio.run(_run(deployment, pool, corpus, name or f"run {new_request_id()[-8:]}"))
    if progress.state != "finished":
        raise typer.Exit(1)


@app.command()
def forget(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Let the trainer forget every sample that it holds, within a second. Checkpoints and versions
    contain none.

    Example: fleet train forget
    """
    deployment = open_deployment(config, set_)
    deployment.connect().close()

    async def run() -> None:
        from fleet.control.client import FleetClient

        client = await FleetClient.connect(deployment.redis_url, deployment.config)
        try:
            await client.training.forget_samples()
        finally:
            await client.stop()

    asyncio.run(run())
    print("the trainer forgets its samples")


async def _run(
    deployment: Deployment, pool: Path | None, corpus: int | None, name: str
) -> "RunProgress":
    from fleet.control.client import FleetClient
    from fleet.drafts.capture.pool import answered
    from fleet.drafts.capture.run import CapturedRun
    from fleet.drafts.capture.source import CaptureSource
    from fleet.processing import open_frontend

    config = deployment.config
    resolved = resolve_checkpoints(config)
    frontend = open_frontend(resolved, Path(resolved.checkpoint))
    client = await FleetClient.connect(deployment.redis_url, config)
    await client.start()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    try:
        specs = _specs(deployment, frontend, pool, corpus)
        run = CapturedRun(
            source=CaptureSource(client, config),
            pool=answered(specs, client),
            name=name,
            num_at_once=config.training.max_in_flight,
            on_progress=_shown,
        )
        return await run.run(stop)
    finally:
        await client.stop()


def _specs(
    deployment: Deployment, frontend: "Frontend", pool: Path | None, corpus: int | None
) -> "Iterator[RequestSpec]":
    from fleet.drafts.capture.pool import prepare, read_pool
    from fleet.lab.pocket.corpus.generate import dialogues
    from fleet.processing import Message, TextPart

    if pool is not None:
        yield from read_pool(pool, deployment.config, frontend)
        return
    for dialogue in itertools.islice(dialogues("train", corpus or DEFAULT_SAMPLES, 1), corpus):
        messages = tuple(
            Message(role=turn.role, content=TextPart(text=turn.text, where="messages"))
            for turn in dialogue.turns[:-1]
        )
        yield prepare(messages, deployment.config, frontend)


def _shown(progress: "RunProgress") -> None:
    print(f"fleet train: {progress}", flush=True)
