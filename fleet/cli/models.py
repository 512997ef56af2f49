"""`fleet models`: download and list the checkpoints that a deployment names on the model hub."""

import sys
from typing import Annotated

import typer

from fleet.cli.checkpoint import hub_names, hub_of
from fleet.cli.deployment import open_deployment
from fleet.cli.options import ConfigFile, Overrides
from fleet.core.errors import ConfigError

app = typer.Typer(name="models", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Download the checkpoints that a deployment names on a model hub.

    `checkpoint` and `stages.NAME.checkpoint` are folders, or names on the Hugging Face hub:
    OWNER/NAME, with a branch, tag or commit OWNER/NAME@REVISION. Processes of a fleet never
    download; `fleet models fetch` does so before they start.
    """


@app.command()
def fetch(
    config: ConfigFile = None,
    set_: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download without asking.")] = False,
) -> None:
    """Show size and licence of each model on the hub that the deployment names, ask, and download
    what is missing.

    Only configuration, tokenizer and safetensors files are downloaded. An interrupted download
    continues with the same command. Each file's hash is checked, also of files that are already
    there, so that the command repairs damaged ones. A name without @COMMIT stands for the branch's
    newest commit at the time of this command.

    Files are stored in the hub's own cache, ~/.cache/huggingface/hub, or in the folder that
    `hub_cache` in the configuration names. For gated models, first log in with `hf auth login`, or
    set HF_TOKEN. For a machine without internet, copy the folder that this command prints with
    `cp -rL`, and set the copy as checkpoint there.

    Examples:

      fleet models fetch --set graph=text --set checkpoint=HuggingFaceTB/SmolLM2-135M-Instruct

      fleet models fetch --config fleet.yaml --yes
    """
    from fleet.hub.cache import resolve
    from fleet.hub.download import check_space, fetch, missing_bytes
    from fleet.hub.listing import read_listing
    from fleet.hub.progress import DownloadProgress, shown_bytes

    deployed = open_deployment(config, set_).config
    hub = hub_of(deployed)
    listings = [read_listing(hub, name) for name in dict.fromkeys(hub_names(deployed).values())]
    if not listings:
        print("fleet: the deployment names no model on the hub; there is nothing to download")
        return
    for listing in listings:
        print(f"{listing.name}  licence {listing.licence}, commit {listing.commit}")
        for file in listing.files:
            print(f"  {shown_bytes(file.size):>8}  {file.path}")
    missing = sum(missing_bytes(hub, listing) for listing in listings)
    total = shown_bytes(sum(listing.size for listing in listings))
    print(f"{total} in all, {shown_bytes(missing)} to download, into {hub.cache}", flush=True)
    check_space(hub, missing)
    if missing and not yes:
        _ask()
    for listing in listings:
        try:
            with DownloadProgress(str(listing.name), listing.size) as bar:
                fetch(hub, listing, bar)
        except KeyboardInterrupt:
            print("\nfleet: interrupted; the same command continues", file=sys.stderr)
            raise typer.Exit(130) from None
        print(f"fleet: {listing.name} is complete: {resolve(hub, listing.name)}", flush=True)


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the checkpoints of the deployment that are names on the hub, and whether their files are
    on this machine. Uses no network.

    Example: fleet models list --config fleet.yaml
    """
    from fleet.hub.cache import resolve

    deployed = open_deployment(config, set_).config
    hub = hub_of(deployed)
    for field, name in hub_names(deployed).items():
        try:
            state = f"complete: {resolve(hub, name)}"
        except ConfigError as error:
            state = error.message.removeprefix("checkpoint: ")
        print(f"{field}: {name}\n  {state}")
    if not hub_names(deployed):
        print("fleet: the deployment names no model on the hub")


def _ask() -> None:
    """Ask for consent. Raises: ConfigError where there is no terminal; typer.Abort for a "no"."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "--yes: there is no terminal to ask at whether to download; add --yes", param="yes"
        )
    typer.confirm("Download?", abort=True)
