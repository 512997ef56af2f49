"""`fleet draft`: the drafters of a running fleet, and how many of their guesses are accepted."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet.cli.deployment import Deployment, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import BadInput
from fleet.drafts.figures.speculation import ORDERS, SpeculationFigures, StageDrafts
from fleet.drafts.figures.training import DraftVersion, TrainingState
from fleet.graphs import Graph

if TYPE_CHECKING:
    from fleet.control.client import FleetClient

app = typer.Typer(name="draft", no_args_is_help=True)


@app.callback()
def draft() -> None:
    """Speculation: a drafter guesses the next tokens of answers, and a worker verifies several of
    them in one pass.

    Answers do not depend on the drafter; only their speed does. `ngram` guesses from the request
    itself, `suffix` also from answers that the worker has served, `eagle3` with a draft head
    (`stages.NAME.speculation.head`), which `fleet train` trains. `auto` measures and uses the
    fastest of suffix, eagle3 and off.
    """


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List each stage's drafter, and for each of its workers the tokens per pass and the share of
    accepted guesses by position.

    The last column is, for each drafter, the speed of answers with its drafts relative to the speed
    without drafts, from the first token on. Only `auto` measures it; until its first comparison the
    column is empty.

    Example: fleet draft list
    """
    from rich.console import Console
    from rich.table import Table

    stages = asyncio.run(_read(open_deployment(config, set_)))
    table = Table()
    for heading in (
        "stage",
        "configured",
        "chosen",
        "worker",
        "drafter",
        "tokens per pass",
        "accepted by position",
        "relative speed",
    ):
        table.add_column(heading, overflow="fold")
    for row in (row for stage in stages for row in _rows(stage)):
        table.add_row(*row)
    Console().print(table)


@app.command()
def use(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER", help=f"{', '.join(ORDERS)}, which is: as the configuration says."
        ),
    ],
    stage: Annotated[
        str | None, typer.Option(help="The stage. Default: the one whose drafts can be verified.")
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Let the workers of a stage use another drafter, within a second and between two steps. No
    answer changes.

    Example: fleet draft use suffix
    """
    deployment = open_deployment(config, set_)
    chosen = _stage_of(deployment.config.graph_declaration(), stage)
    num_workers = asyncio.run(_choose(deployment, chosen, drafter))
    print(
        f"{chosen}: {drafter}"
        + ("" if num_workers else f"; no worker of {chosen} that verifies drafts has joined yet")
    )


@app.command()
def versions(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the versions of the draft head that training runs made: windows, samples, acceptance on
    held-out samples, size.

    `*` marks the one in use. Acceptance is the mean number of guesses in a row that are right, on
    samples that were not trained on.

    Example: fleet draft versions
    """
    from rich.console import Console
    from rich.table import Table

    state = asyncio.run(_read_training(open_deployment(config, set_)))
    table = Table()
    for heading in (
        "version",
        "in use",
        "windows",
        "samples",
        "acceptance",
        "MiB",
        "source",
        "note",
        "sha256",
    ):
        table.add_column(heading, overflow="fold")
    for each in state.versions:
        acceptance = "" if each.acceptance is None else f"{each.acceptance:.2f}"
        in_use = "*" if each.number == state.version else ""
        counts = str(each.windows), str(each.samples), acceptance, f"{each.num_bytes / 2**20:.1f}"
        table.add_row(str(each.number), in_use, *counts, each.source, each.note, each.sha256[:12])
    Console().print(table)


@app.command()
def promote(
    number: Annotated[
        int,
        typer.Argument(
            metavar="VERSION", min=0, help="Its number; 0: the head of the workers' start."
        ),
    ],
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Let all workers draft with a version of the draft head, between two passes and without a
    restart; no answer changes.

    Workers copy the version from any worker that has it. A worker uses the head only while its
    drafter is `eagle3`, or `auto` has chosen it (`fleet draft use`).

    Example: fleet draft promote 3
    """
    deployment = open_deployment(config, set_)

    async def run() -> None:
        async with _client(deployment) as client:
            await client.training.promote(number)

    asyncio.run(run())
    print(f"version {number}")


@app.command()
def rollback(config: ConfigFile = None, set_: Overrides = None) -> None:
    """Return to the version of the draft head that was in use before the present one.

    Example: fleet draft rollback
    """
    deployment = open_deployment(config, set_)

    async def run() -> int:
        async with _client(deployment) as client:
            return await client.training.roll_back()

    print(f"version {asyncio.run(run())}")


HeadFormat = Annotated[
    Literal["speculators", "sglang"],
    typer.Option("--format", help="speculators: also read by vLLM; sglang: also of SpecForge."),
]


@app.command()
def export(
    head: Annotated[
        str,
        typer.Argument(
            metavar="VERSION|FOLDER", help="A version's number, or a folder of Fleet's own files."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    kind: HeadFormat = "speculators",
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write a draft head in the format of another program. Layer ids are converted: Fleet's tap i
    is the input of layer i.

    Examples:

      fleet draft export 3 head-for-vllm

      fleet draft export 3 head-for-sglang --format sglang
    """
    from fleet.cli.draft_files import export_head, folder_of_version

    deployment = open_deployment(config, set_)
    folder = Path(head)
    if head.isdigit():
        found = {
            version.number: version for version in asyncio.run(_read_training(deployment)).versions
        }
        if int(head) not in found:
            raise BadInput(
                f"version {head}: there is none; `fleet draft versions` lists them", param="version"
            )
        folder = folder_of_version(deployment.config, found[int(head)])
    export_head(deployment.config, folder, out, kind)
    print(out)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A head of another program.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    kind: HeadFormat = "speculators",
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write a draft head of another program in Fleet's own format, for the deployment's checkpoint.

    If a field or weight is missing or unknown, the command fails and names it. To use the written
    folder, run `fleet draft add OUT`, or set `stages.NAME.speculation.head: OUT`.

    Example: fleet draft import head-of-specforge head --format sglang
    """
    from fleet.cli.draft_files import import_head

    import_head(open_deployment(config, set_).config, folder, out, kind)
    print(out)


@app.command()
def add(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of Fleet's own files.")
    ],
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Add a draft head as a version of a running fleet, and print its number. A head of another
    checkpoint is refused.

    Example: fleet draft add head
    """
    from fleet.cli.draft_files import newest_stored, record_version, store_version

    deployment = open_deployment(config, set_)
    version = store_version(deployment.config, folder)

    async def run() -> DraftVersion:
        async with _client(deployment) as client:
            return await client.training.add(version, newest_stored(deployment.config))

    added = asyncio.run(run())
    record_version(deployment.config, added)
    print(f"version {added.number}")


async def _read_training(deployment: Deployment) -> TrainingState:
    async with _client(deployment) as client:
        return await client.training.state()


async def _read(deployment: Deployment) -> list[StageDrafts]:
    async with _client(deployment) as client:
        return await client.telemetry.drafts()


async def _choose(deployment: Deployment, stage: str, drafter: str) -> int:
    """Order a stage's workers to use `drafter`, and return the number of workers that will use
    it.
    """
    async with _client(deployment) as client:
        await client.operations.choose_drafter(stage, drafter)
        return next(
            len(found.workers) for found in await client.telemetry.drafts() if found.stage == stage
        )


@asynccontextmanager
async def _client(deployment: Deployment) -> AsyncGenerator["FleetClient"]:
    from fleet.control.client import FleetClient

    deployment.connect().close()
    client = await FleetClient.connect(deployment.redis_url, deployment.config)
    try:
        yield client
    finally:
        await client.stop()


def _rows(stage: StageDrafts) -> list[tuple[str, ...]]:
    """Return the table rows of a stage's speculation statistics, one row per worker."""
    if not stage.workers:
        return [(stage.stage, stage.configured, stage.chosen, "no worker", "", "", "", "")]
    return [
        (
            stage.stage,
            stage.configured,
            stage.chosen,
            worker.worker,
            _in_use(worker.figures),
            "" if worker.acceptance_length is None else f"{worker.acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in worker.figures.shares),
            " ".join(f"{name} {gain:.2f}" for name, gain in worker.figures.gains.items()),
        )
        for worker in stage.workers
    ]


def _in_use(figures: SpeculationFigures) -> str:
    """Return the name of a worker's active drafter, followed by the drafter that failed, if any."""
    return (
        f"{figures.drafter}; {figures.failed} failed: {figures.failure}"
        if figures.failed
        else figures.drafter
    )


def _stage_of(graph: Graph, given: str | None) -> str:
    """Return the stage name: `given`, or the only stage that can verify drafts. Raises: BadInput if
    none is given and the number of such stages is not one.
    """
    stages = [stage.name for stage in graph.stages if stage.verifies_drafts]
    if given is not None or len(stages) == 1:
        return given or stages[0]
    which = (
        f"several stages can verify drafts; give one of {', '.join(stages)}"
        if stages
        else "no stage can verify drafts"
    )
    raise BadInput(f"--stage: {which}", param="--stage")
