"""`fleet session`: the cached keys and values of a conversation as one file, and back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet.cli.deployment import Deployment, open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import BadInput, NotFound
from fleet.core.ids import StageName
from fleet.core.request import session_name

if TYPE_CHECKING:
    from fleet.worker.sessions.client import SessionClient

app = typer.Typer(name="session", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The conversation's `prompt_cache_key`.")]
File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The file, in the format of safetensors.")
]
OfStage = Annotated[
    str | None, typer.Option("--stage", help="The stage, where more than one caches conversations.")
]


@app.callback()
def session() -> None:
    """Save and load the KV cache of a conversation, so that its next turn computes only what is
    new.

    A file is for one checkpoint and one stage. How the stage's layers are divided makes no
    difference.
    """


@app.command()
def save(
    name: Name, file: File, stage: OfStage = None, config: ConfigFile = None, set_: Overrides = None
) -> None:
    """Write the cached keys and values of a conversation to a file. The conversation must be
    between two turns; answers of others continue meanwhile.

    Example: fleet session save my-conversation conversation.safetensors
    """
    deployment = open_deployment(config, set_)
    own_stage, key = _stage_of(deployment, stage), session_name(name)
    began_s = time.monotonic()
    with _client(deployment) as client:
        saved = client.save(own_stage, key, name)
    saved.write(file)
    _print("saved", saved.info.num_rows, file, began_s)


@app.command()
def load(
    name: Name, file: File, stage: OfStage = None, config: ConfigFile = None, set_: Overrides = None
) -> None:
    """Load a conversation's keys and values from a file into a worker's cache, where the next turn
    finds them for `lease.prefix_cache_s` seconds.

    Example: fleet session load my-conversation conversation.safetensors
    """
    from fleet.worker.sessions.client import SessionFile

    deployment = open_deployment(config, set_)
    given = SessionFile.read(file)
    began_s = time.monotonic()
    with _client(deployment) as client:
        client.load(_stage_of(deployment, stage), session_name(name), given)
    _print("loaded", given.info.num_rows, file, began_s)


def _print(done: str, num_rows: int, file: Path, began_s: float) -> None:
    size_mb = file.stat().st_size / 1e6
    print(f"{done}: {num_rows} rows, {size_mb:.1f} MB, {time.monotonic() - began_s:.2f} s ({file})")


def _stage_of(deployment: Deployment, given: str | None) -> StageName:
    """Return the language stage of the conversation: `given`, or the only one. Raises: NotFound if
    `given` is no language stage; BadInput if `given` is None and the graph has several.
    """
    stages = [
        stage.name
        for stage in deployment.config.graph_declaration().stages
        if stage.default_sampling
    ]
    if given is None and len(stages) > 1:
        raise BadInput(
            f"--stage: several stages cache conversations; give one of {', '.join(stages)}",
            param="--stage",
        )
    if given is not None and given not in stages:
        raise NotFound(
            f"--stage: no stage {given!r} caches conversations; give one of {', '.join(stages)}",
            param="--stage",
        )
    return StageName(given) if given is not None else stages[0]


@contextmanager
def _client(deployment: Deployment) -> Iterator["SessionClient"]:
    from fleet.worker.process.peers import read_peer_access
    from fleet.worker.sessions.client import SessionClient

    with deployment.connect() as client:
        yield SessionClient(client, deployment.config, read_peer_access(deployment.config).secret)
