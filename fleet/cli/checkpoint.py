"""Resolution of the `checkpoint` setting to a folder: a path, a model hub name, the graph's shipped
checkpoint, or a tiny random one. Loads no weights.
"""

import fcntl
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from fleet.cli.deployment import secure_data_dir
from fleet.config import FleetConfig
from fleet.core.errors import ConfigError, NoSafeWeights
from fleet.graphs import get_graph
from fleet.process.private import make_private_folder

AUTO, TINY = "auto", "tiny"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def resolve_checkpoint(config: FleetConfig) -> Path:
    """Return the weights folder that `config.checkpoint` names; download or write it first if
    needed. "auto" is the checkpoint shipped with the graph, or "tiny" if the graph ships none.

    A hub name is downloaded once, into the hub's own cache. Raises: ConfigError if the folder is
    missing or holds no weights, or the download fails.
    """
    shipped = get_graph(config.graph).shipped_folder()
    if config.checkpoint == AUTO and shipped is not None:
        return _check_folder(shipped)
    if config.checkpoint in (AUTO, TINY):
        return _check_folder(_tiny(config))
    folder = Path(config.checkpoint).expanduser()
    from_hub = not folder.exists() and HUB_NAME.fullmatch(config.checkpoint)
    return _check_folder(_download(config.checkpoint) if from_hub else folder.absolute())


def resolve_configuration(config: FleetConfig) -> Path:
    """Return a folder with a checkpoint's configuration; its weights may be missing.

    If `config.checkpoint` is a hub name, only its JSON files are downloaded. Raises: ConfigError if
    the folder or its configuration is missing, or the download fails.
    """
    if config.checkpoint in (AUTO, TINY):
        return resolve_checkpoint(config)
    folder = Path(config.checkpoint).expanduser()
    from_hub = not folder.exists() and HUB_NAME.fullmatch(config.checkpoint)
    return _check_configuration(
        _download(config.checkpoint, ["*.json"]) if from_hub else folder.absolute()
    )


def find_checkpoint(config: FleetConfig) -> tuple[Path | None, str]:
    """Return the weights folder, or None and a description of the step by which the first start
    would provide it. Downloads and writes nothing.

    Raises: ConfigError for a checkpoint that `resolve_checkpoint` refuses without a download.
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
    if not Path(config.checkpoint).expanduser().exists() and HUB_NAME.fullmatch(config.checkpoint):
        return (
            None,
            f"{config.checkpoint} is looked for in the hub's cache, and downloaded if it is "
            "missing",
        )
    return resolve_checkpoint(config), ""


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


def _download(
    name: str, patterns: Sequence[str] = ("*.json", "*.safetensors", "*.txt", "*.jinja")
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    _print(f"checkpoint: there is no folder {name}; downloading it from the model hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"checkpoint: there is no folder {name}, and its download from the model hub "
            f"failed: {reason}",
            param="checkpoint",
        ) from error


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
            f"checkpoint: no folder {folder}; set a folder with the weights (`hf download NAME "
            "--local-dir DIR`), or auto",
            param="checkpoint",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"checkpoint: {folder} has no config.json", param="checkpoint")
    return folder
