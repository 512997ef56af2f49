"""Resolution of the `checkpoint` setting to a folder: a path, a model hub name whose files
`fleet models fetch` has downloaded, the graph's shipped checkpoint, or a tiny random one. Loads no
weights.
"""

import contextlib
import fcntl
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fleet.cli.deployment import secure_data_dir
from fleet.config import FleetConfig
from fleet.core.errors import ConfigError, NoSafeWeights
from fleet.graphs import get_graph
from fleet.hub.names import HubName, hub_name_of
from fleet.process.private import make_private_folder

if TYPE_CHECKING:
    from fleet.hub.cache import Hub

AUTO, TINY = "auto", "tiny"


def resolve_checkpoint(config: FleetConfig) -> Path:
    """Return the weights folder that `config.checkpoint` names; write a tiny checkpoint first if
    needed. "auto" is the checkpoint shipped with the graph, or "tiny" if the graph ships none.

    Uses no network. Raises: ConfigError if the folder is missing or holds no weights, or the files
    of a hub name are missing.
    """
    shipped = get_graph(config.graph).shipped_folder()
    if config.checkpoint == AUTO and shipped is not None:
        return _check_folder(shipped)
    if config.checkpoint in (AUTO, TINY):
        return _check_folder(_tiny(config))
    name = hub_name_of(config.checkpoint)
    if name is None:
        return _check_folder(Path(config.checkpoint).expanduser().absolute())
    from fleet.hub.cache import resolve

    return _check_folder(resolve(hub_of(config), name))


def resolve_configuration(config: FleetConfig) -> Path:
    """Return a folder with a checkpoint's configuration; its weights may be missing.

    Of a hub name whose files are missing, only the JSON files are downloaded. Raises: ConfigError
    if the folder or its configuration is missing, or the download fails.
    """
    if config.checkpoint in (AUTO, TINY):
        return resolve_checkpoint(config)
    name = hub_name_of(config.checkpoint)
    if name is None:
        return _check_configuration(Path(config.checkpoint).expanduser().absolute())
    from fleet.hub.cache import resolve
    from fleet.hub.download import fetch
    from fleet.hub.listing import read_listing
    from fleet.hub.progress import DownloadProgress

    hub = hub_of(config)
    with contextlib.suppress(ConfigError):
        return _check_configuration(resolve(hub, name))
    listing = read_listing(hub, name, (".json",))
    with DownloadProgress(str(name), listing.size) as bar:
        return _check_configuration(fetch(hub, listing, bar))


def find_checkpoint(config: FleetConfig) -> tuple[Path | None, str]:
    """Return the weights folder, or None and a description of the step by which the first start
    would provide it. Writes nothing.

    Raises: ConfigError for a checkpoint that `resolve_checkpoint` refuses.
    """
    if config.checkpoint == AUTO and get_graph(config.graph).shipped is not None:
        return resolve_checkpoint(config), ""
    if config.checkpoint in (AUTO, TINY):
        target = _tiny_folder(config)
        return (
            (target, "")
            if target.is_dir()
            else (None, f"a tiny random one is written to {target} at the first start")
        )
    return resolve_checkpoint(config), ""


def hub_of(config: FleetConfig) -> "Hub":
    """Return the hub of a deployment, with the folder of its files."""
    from fleet.hub.cache import Hub

    parts = tuple(stage.name for stage in get_graph(config.graph).all_stages)
    return Hub(folder=config.hub_cache, parts=parts)


def hub_names(config: FleetConfig) -> dict[str, HubName]:
    """Return the hub names in a deployment, by the field that has them."""
    given = {"checkpoint": config.checkpoint}
    named = {field: hub_name_of(checkpoint) for field, checkpoint in given.items()}
    return {field: name for field, name in named.items() if name}


def _tiny_folder(config: FleetConfig) -> Path:
    return config.data_dir.absolute() / "checkpoints" / f"{config.graph}-tiny"


def _tiny(config: FleetConfig) -> Path:
    """Return the folder of the graph's tiny checkpoint. If missing, it is written by a separate
    process, since writing needs torch.
    """
    if not get_graph(config.graph).tiny:
        raise ConfigError(
            f"checkpoint: graph {config.graph} has no tiny checkpoint; set the folder of its "
            "weights",
            param="checkpoint",
        )
    home = secure_data_dir(config) / "checkpoints"
    make_private_folder(home)
    target = _tiny_folder(config)
    lock_file = home / f"{config.graph}-tiny.lock"
    lock_file.touch(mode=0o600)
    with lock_file.open("w") as lock:
        _acquire(lock, target)
        if not target.is_dir():
            _print(
                f"writing a tiny random {config.graph} checkpoint to {target} (once; takes up "
                "to a minute)"
            )
            _write_aside(config.graph, target)
            _print(f"wrote {target}")
    return target


def _print(line: str) -> None:
    print(f"fleet: {line}", flush=True)


def _acquire(lock: IO[str], target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _print(f"waiting for another process that is writing {target}")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _write_aside(graph: str, target: Path) -> None:
    """Write the tiny checkpoint to a temporary folder in a child process, and rename the folder to
    `target` once it is complete.
    """
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    command = [
        sys.executable,
        "-m",
        "fleet.cli",
        "checkpoint",
        "tiny",
        str(aside),
        "--graph",
        graph,
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        umask=0o077,
    )
    if done.returncode != 0:
        shutil.rmtree(aside, ignore_errors=True)
        reason = (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(
            f"checkpoint: writing the tiny checkpoint failed: {reason}", param="checkpoint"
        )
    aside.rename(target)


def write_tiny(graph_name: str, out_dir: Path, seed: int) -> Path:
    """Write a tiny checkpoint of a graph to `out_dir` in this process; return the folder. Raises:
    ConfigError if the graph declares no tiny checkpoint or the folder is not empty.
    """
    writer = get_graph(graph_name).tiny
    if writer is None:
        raise ConfigError(f"graph {graph_name} declares no tiny checkpoint", param="graph")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir}: is not an empty folder; choose another", param="OUT_DIR")
    module, _, function = writer.partition(":")
    write: Callable[[Path, int], Path] = getattr(importlib.import_module(module), function)
    return write(out_dir, seed)


def _check_folder(folder: Path) -> Path:
    _check_configuration(folder)
    if not any(folder.glob("*.safetensors")):
        raise NoSafeWeights.of(folder, "*.safetensors")
    return folder


def _check_configuration(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint: no folder {folder}; set a folder with the weights, a name on the "
            "hub (OWNER/NAME), or auto",
            param="checkpoint",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"checkpoint: {folder} has no config.json", param="checkpoint")
    return folder
