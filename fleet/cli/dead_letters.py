"""`fleet dead-letters`: list the requests that killed workers, send one again, or drop them."""

import asyncio
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fleet.cli.deployment import Deployment, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.clock import now_us
from fleet.core.errors import BadInput, ConfigError, FleetError
from fleet.core.ids import new_request_id, request_id_of

if TYPE_CHECKING:
    from fleet.core.request import RequestSpec

app = typer.Typer(name="dead-letters", no_args_is_help=True)
UNITS = {"text": "text tokens", "audio": "audio samples"}
LetterId = Annotated[
    str, typer.Argument(metavar="ID", help="The request's id, as `list` shows it.")
]


@app.callback()
def dead_letters() -> None:
    """Manage dead letters: requests over which three workers died, the last one while it served
    nothing else.

    Such a request fails and is stored with its prompt, so that the cause can be found, and the
    request sent again afterwards.
    """


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the dead letters, oldest first: id, time, the stage whose workers died, and the cause.

    Example: fleet dead-letters list
    """
    from rich.console import Console
    from rich.table import Table

    from fleet.control.dead_letters import read_letters

    with open_deployment(config, set_).connect() as client:
        letters = read_letters(client)
    table = Table(title=f"{len(letters)} dead letters", title_justify="left")
    table.add_column("id", no_wrap=True)
    for heading in ("when", "stage", "why"):
        table.add_column(heading, overflow="fold")
    for letter in letters:
        table.add_row(letter.request, _time(letter.died_us), letter.stage, letter.why)
    Console().print(table)


@app.command()
def show(request: LetterId, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print one dead letter: the request, and when and why it was given up.

    Example: fleet dead-letters show req-0190d6c5e1a4f00ba7
    """
    from fleet.control.dead_letters import read_letter, spec_of

    with open_deployment(config, set_).connect() as client:
        letter = read_letter(client, request_id_of(request))
    spec = spec_of(letter)
    clips = ", ".join(f"{clip.num_samples / clip.rate_hz:.1f} s" for clip in spec.audio)
    rows = {
        "id": letter.request,
        "when": _time(letter.died_us),
        "stage": letter.stage,
        "why": letter.why,
        "graph": spec.graph,
        "outputs": ", ".join(spec.outputs),
        "prompt": f"{len(spec.prompt_ids)} tokens" + (f", audio of {clips}" if clips else ""),
        "size": f"{letter.size_bytes} bytes",
        **{f"sampling of {stage}": str(sampling) for stage, sampling in spec.sampling.items()},
        **spec.params,
    }
    for name, value in rows.items():
        print(f"{name}: {value}")


@app.command()
def retry(request: LetterId, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Send the request of a dead letter again under a new id, wait for its end, and report it.
    Success drops the letter.

    The answer is not stored. A request that kills workers again becomes a dead letter again, under
    its new id.

    Example: fleet dead-letters retry req-0190d6c5e1a4f00ba7
    """
    from fleet.control.dead_letters import drop_letters, read_blob, read_letter, spec_of

    deployment = open_deployment(config, set_)
    with deployment.connect() as client:
        letter = read_letter(client, request_id_of(request))
        spec = _renewed(spec_of(letter), deployment)
        print(f"{letter.request} is sent again as {spec.id}", flush=True)
        try:
            counts = asyncio.run(_answer(deployment, spec, read_blob(client, letter)))
        except FleetError as error:
            print(
                f"fleet: {spec.id} failed ({error.code}): {error.message}; the letter stays",
                file=sys.stderr,
                flush=True,
            )
            raise typer.Exit(1) from None
        drop_letters(client, [letter])
    print(
        f"{spec.id} finished: {', '.join(f'{count} {unit}' for unit, count in counts.items())}; "
        "the letter is dropped"
    )


@app.command()
def drop(
    request: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The request's id, as `list` shows it.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Drop every letter.")] = False,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Remove one dead letter, or all of them; their requests cannot be sent again.

    Examples:

      fleet dead-letters drop req-0190d6c5e1a4f00ba7

      fleet dead-letters drop --all
    """
    from fleet.control.dead_letters import drop_letters, read_letter, read_letters

    if (request is None) != all_:
        raise BadInput("set the ID of one letter, or --all", param="id")
    with open_deployment(config, set_).connect() as client:
        letters = (
            read_letters(client)
            if request is None
            else [read_letter(client, request_id_of(request))]
        )
        num_dropped = drop_letters(client, letters)
    print(f"dropped {num_dropped} dead letter{'' if num_dropped == 1 else 's'}")


def _renewed(spec: "RequestSpec", deployment: Deployment) -> "RequestSpec":
    """Return a copy of a dead letter's request under a new request id. Raises: ConfigError if this
    deployment serves another graph.
    """
    if spec.graph != deployment.config.graph:
        raise ConfigError(
            f"the letter is a request of graph {spec.graph}, and this deployment serves "
            f"{deployment.config.graph}; "
            f"set its file with --config, or --set graph={spec.graph}",
            param="graph",
        )
    return msgspec.structs.replace(spec, id=new_request_id(), created_us=now_us())


async def _answer(
    deployment: Deployment, spec: "RequestSpec", blob: bytes | None
) -> dict[str, int]:
    """Submit the request and wait for its end; return the number of answer items by unit, for
    example tokens or codec frames. Raises: the request's FleetError if it fails.
    """
    from fleet.control.client import FleetClient

    media = deployment.config.graph_declaration().media
    counts = {UNITS.get(media[edge], media[edge]): 0 for edge in spec.outputs}
    client = await FleetClient.connect(deployment.redis_url, deployment.config)
    try:
        await client.start()
        async for chunk in await client.requests.submit(spec, blob):
            # The final chunk may be empty.
            num_items = next((tensor.shape[0] for tensor in chunk.tensors.values()), 0)
            counts[UNITS.get(media[chunk.edge], media[chunk.edge])] += num_items
        return counts
    finally:
        await client.stop()


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6).astimezone().isoformat(sep=" ", timespec="seconds")
