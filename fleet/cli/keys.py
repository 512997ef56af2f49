"""`fleet keys`: the API keys in `web.keys_file`, which gateways read again when it changes."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated

import msgspec
import typer

from fleet.cli.options import ConfigFile, Overrides
from fleet.config.api_keys import (
    NAME,
    SCOPES,
    SETTING,
    ApiKey,
    KeyLimits,
    KeysFile,
    Scope,
    digest_of,
    encode_keys_file,
    read_keys_file,
)
from fleet.config.deployment import open_config
from fleet.config.names import suggest
from fleet.config.settings import read_settings
from fleet.core.errors import BadInput, ConfigError, quoted
from fleet.process.private import write_private

PREFIX = "fk_"
KEY_BYTES = 32
MAX_OVERLAP_S = 30 * 24 * 3600
app = typer.Typer(name="keys", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Small letters, digits, - and _, 40 at most.")
]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        help="talk: use the model; watch: read the console, the fleet API and metrics; operate: "
        "change the fleet. Can be repeated. Default: talk.",
    ),
]


@app.callback()
def keys() -> None:
    """API keys with names, scopes and limits, in the file that `web.keys_file` names.

    The file has a digest of each key, never the key. Running gateways read a changed file again at
    the next request.
    """


@app.command()
def add(
    name: Name,
    scope: Scopes = None,
    max_requests: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Requests that are answered at one time."),
    ] = None,
    max_sessions: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, help="Voice sessions open or queued at one time."),
    ] = None,
    audio_s_per_day: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="Seconds of audio in prompts, answers and voice sessions in a day (UTC).",
        ),
    ] = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Add a key, and print it once.

    Example: fleet keys add assistant --scope talk --max-requests 8
    """
    if not re.fullmatch(NAME, name):
        raise BadInput(
            f"{quoted(name)} is no name of a key; use small letters, digits, - and _, 40 at most"
        )
    wanted = set(scope or ["talk"])
    for unknown in wanted - set(SCOPES):
        raise BadInput(
            f"--scope: {quoted(unknown)} is none of {', '.join(SCOPES)}{suggest(unknown, SCOPES)}"
        )
    chosen: tuple[Scope, ...] = tuple(each for each in SCOPES if each in wanted)
    limits = KeyLimits(
        max_requests=max_requests, max_sessions=max_sessions, audio_s_per_day=audio_s_per_day
    )
    key = new_key()

    def added(listed: dict[str, ApiKey]) -> None:
        if name in listed:
            raise BadInput(f"a key {quoted(name)} exists; `fleet keys rotate {name}` replaces it")
        listed[name] = ApiKey(
            sha256=digest_of(key.encode()), scopes=chosen, limits=limits, made=_today()
        )

    change_file(_path(config, set_), added, creates=True)
    print(key)


@app.command("list")
def list_(config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the keys: names, scopes and limits.

    Example: fleet keys list
    """
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in (
        "name",
        "scopes",
        "requests",
        "sessions",
        "audio s a day",
        "made",
        "former key",
    ):
        table.add_column(heading, overflow="fold")
    for name, key in sorted(read_keys_file(_path(config, set_)).keys.items()):
        limits = key.limits
        bounds = (limits.max_requests, limits.max_sessions, limits.audio_s_per_day)
        shown = [f"{bound:,}" if bound is not None else "no limit" for bound in bounds]
        until = datetime.fromtimestamp(key.former_until, UTC)
        former = f"until {until:%Y-%m-%d %H:%M} UTC" if key.former_until > time.time() else ""
        table.add_row(name, ", ".join(key.scopes), *shown, key.made, former)
    Console().print(table)


@app.command()
def remove(name: Name, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Remove a key. New requests with it are refused at once; answers and voice sessions that have
    begun go on to their end.

    Example: fleet keys remove assistant
    """

    def removed(listed: dict[str, ApiKey]) -> None:
        _find(listed, name)
        del listed[name]

    change_file(_path(config, set_), removed)


@app.command()
def rotate(
    name: Name,
    overlap_s: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_OVERLAP_S, help="Seconds for which the former key is accepted too."
        ),
    ] = 0,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Replace a key by a new one with the same name, scopes and limits, and print it once.

    Example: fleet keys rotate assistant --overlap-s 3600
    """
    key = new_key()

    def rotated(listed: dict[str, ApiKey]) -> None:
        former = _find(listed, name)
        listed[name] = msgspec.structs.replace(
            former,
            sha256=digest_of(key.encode()),
            made=_today(),
            former_sha256=former.sha256 if overlap_s else None,
            former_until=int(time.time()) + overlap_s if overlap_s else 0,
        )

    change_file(_path(config, set_), rotated)
    print(key)


def new_key() -> str:
    return PREFIX + token_urlsafe(KEY_BYTES)


def _find(listed: dict[str, ApiKey], name: str) -> ApiKey:
    if name not in listed:
        raise BadInput(f"no key {quoted(name)}{suggest(name, listed)}; see `fleet keys list`")
    return listed[name]


def _path(config_file: Path | None, overrides: list[str] | None) -> Path:
    """Return the file of keys of a deployment. Raises: ConfigError if it names none."""
    _, config = open_config(config_file, overrides, read_settings())
    if config.web.keys_file is None:
        raise ConfigError(
            f"{SETTING} is not set; name the file of keys there, or with "
            f"--set {SETTING}=/etc/fleet/keys.json",
            param=SETTING,
        )
    return config.web.keys_file


def change_file(
    path: Path, change: Callable[[dict[str, ApiKey]], None], *, creates: bool = False
) -> None:
    """Apply `change` to the listed keys and replace the file atomically; a lock keeps other
    commands from changing it meanwhile. `creates`: begin with no keys if the file is missing.

    Raises: OSError, the errors of `change`, and the errors of `read_keys_file`.
    """
    with _locked(path.parent):
        is_new = creates and not path.exists()
        listed = {} if is_new else dict(read_keys_file(path).keys)
        change(listed)
        write_private(path, encode_keys_file(KeysFile(keys=listed)))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")
