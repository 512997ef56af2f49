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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fleet.cli.deployment import secure_data_dir
from fleet.config import FleetConfig
from fleet.core.errors import ConfigError, NoSafeWeights
from fleet.core.ids import StageName
from fleet.graphs import get_graph
from fleet.hub.names import HubName, hub_name_of
from fleet.process.private import make_private_folder

if TYPE_CHECKING:
    from fleet.hub.cache import Hub

AUTO, TINY = "auto", "tiny"
SAFE_WEIGHTS = "*.safetensors"
CONFIGURATION: tuple[str, ...] = ("config.json",)


def resolve_checkpoint(
    config: FleetConfig, stage: StageName | None = None, *, is_whole: bool = True
) -> Path:
    """Return the folder of a stage's weights, or without a `stage` the deployment's folder; write a
    tiny checkpoint first if needed. "auto" is the checkpoint shipped with the graph, or "tiny" if
    the graph ships none. `is_whole`: False if config.json suffices; for a hub name whose files are
    missing, the JSON files are then downloaded, but never weights.

    Raises: ConfigError if the folder or a needed file is missing, or a download fails.
    """
    graph = get_graph(config.graph)
    declared = graph.stage(stage) if stage is not None else graph.main_stage
    files = declared.checkpoint_files if is_whole else CONFIGURATION
    own = config.stage(stage).checkpoint if stage is not None else None
    if own is not None:
        field = f"stages.{stage}.checkpoint"
        shipped = declared.shipped_folder(own)
        folder = shipped or _located(config, own, field, is_whole=is_whole)
        return _check_folder(folder, files, field)
    root = _resolve_root(config, is_whole=is_whole)
    if graph.has_stage_checkpoints and stage is None:
        return root
    return _check_folder(root / declared.checkpoint_folder, files)


def _resolve_root(config: FleetConfig, *, is_whole: bool) -> Path:
    shipped = get_graph(config.graph).shipped_folder()
    if config.checkpoint == AUTO and shipped is not None:
        return shipped
    if config.checkpoint in (AUTO, TINY):
        return _tiny(config)
    return _located(config, config.checkpoint, "checkpoint", is_whole=is_whole)


def resolve_checkpoints(config: FleetConfig, stage: StageName | None = None) -> FleetConfig:
    """Return the configuration with the checkpoints of all stages, or of one `stage`, replaced by
    the folders of their weights. Raises: as `resolve_checkpoint`.
    """
    graph = get_graph(config.graph)
    if not graph.has_stage_checkpoints:
        return config.model_copy(update={"checkpoint": str(resolve_checkpoint(config))})
    names = [each.name for each in graph.stages] if stage is None else [stage]
    return _with_folders(config, {name: resolve_checkpoint(config, name) for name in names})


def resolve_configuration(config: FleetConfig, stage: StageName) -> FleetConfig:
    """Return the configuration with the checkpoint of a stage replaced by a folder with its
    configuration; its weights may be missing.

    Of a hub name whose files are missing, only the JSON files are downloaded. Raises: ConfigError
    if the folder or its configuration is missing, or the download fails.
    """
    folder = resolve_checkpoint(config, stage, is_whole=False)
    if not get_graph(config.graph).has_stage_checkpoints:
        return config.model_copy(update={"checkpoint": str(folder)})
    return _with_folders(config, {stage: folder})


def _with_folders(config: FleetConfig, folders: Mapping[StageName, Path]) -> FleetConfig:
    """Return the configuration with the checkpoints of stages replaced by these folders."""
    stages = {
        **config.stages,
        **{
            name: config.stage(name).model_copy(update={"checkpoint": str(folder)})
            for name, folder in folders.items()
        },
    }
    return config.model_copy(update={"stages": stages})


def find_checkpoints(config: FleetConfig) -> dict[str, str]:
    """Return, by field of the configuration, the folder with the weights, or a description of the
    step by which the first start would provide it. Writes nothing.

    Raises: ConfigError for a checkpoint that `resolve_checkpoint` refuses.
    """
    graph = get_graph(config.graph)
    if not graph.has_stage_checkpoints:
        return {
            "checkpoint": _promise(config, config.checkpoint) or str(resolve_checkpoint(config))
        }
    found: dict[str, str] = {}
    for stage in graph.stages:
        own = config.stage(stage.name).checkpoint
        field = f"stages.{stage.name}.checkpoint"
        promise = None
        if own is None:
            promise = _promise(config, config.checkpoint)
        elif stage.shipped_folder(own) is None:
            promise = _promise(config, own)
        found[field] = promise or str(resolve_checkpoint(config, stage.name))
    return found


def _promise(config: FleetConfig, name: str) -> str | None:
    """Return a description of the tiny checkpoint that the first start would write; None if it is
    written already, or if `name` is another checkpoint, which no start provides.
    """
    if name == AUTO and get_graph(config.graph).shipped is not None:
        return None
    if name in (AUTO, TINY):
        target = _tiny_folder(config)
        return (
            None
            if target.is_dir()
            else f"a tiny random one is written to {target} at the first start"
        )
    return None


def _located(config: FleetConfig, checkpoint: str, field: str, *, is_whole: bool) -> Path:
    """Return the folder of a configured path or hub name. If not `is_whole` and files of a hub name
    are missing, download the JSON files. Raises: ConfigError if needed files are missing, or the
    download fails.
    """
    name = hub_name_of(checkpoint)
    if name is None:
        return Path(checkpoint).expanduser().absolute()
    from fleet.hub.cache import resolve

    hub = hub_of(config)
    if is_whole:
        return resolve(hub, name, field)
    with contextlib.suppress(ConfigError):
        return resolve(hub, name)
    from fleet.hub.download import fetch
    from fleet.hub.listing import read_listing
    from fleet.hub.progress import DownloadProgress

    listing = read_listing(hub, name, (".json",))
    with DownloadProgress(str(name), listing.size) as bar:
        return fetch(hub, listing, bar)


def hub_of(config: FleetConfig) -> "Hub":
    """Return the model hub as a deployment uses it: the local cache folder, and which files of a
    model its graph needs.
    """
    from fleet.hub.cache import Hub

    stages = get_graph(config.graph).all_stages
    return Hub(
        folder=config.hub_cache,
        parts=tuple(stage.checkpoint_folder for stage in stages if stage.checkpoint_folder),
        extras=tuple(pattern for stage in stages for pattern in stage.checkpoint_extras),
    )


def hub_names(config: FleetConfig) -> dict[str, HubName]:
    """Return the hub names that a deployment uses, by configuration field."""
    graph = get_graph(config.graph)
    given = {
        f"stages.{stage.name}.checkpoint": config.stage(stage.name).checkpoint
        for stage in graph.stages
    }
    if not graph.has_stage_checkpoints or None in given.values():
        given["checkpoint"] = config.checkpoint
    named = {field: hub_name_of(text) for field, text in given.items() if text is not None}
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


def _check_folder(folder: Path, files: Sequence[str], field: str = "checkpoint") -> Path:
    """Return a folder after a check. Raises: ConfigError if it is missing, or lacks a file of a
    pattern in `files`.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{field}: no folder {folder}; set a folder with the weights, a name on the "
            "hub (OWNER/NAME), or auto",
            param=field,
        )
    for pattern in files:
        if any(folder.glob(pattern)):
            continue
        if pattern == SAFE_WEIGHTS:
            raise NoSafeWeights.of(folder, pattern, field)
        raise ConfigError(f"{field}: {folder} has no {pattern}", param=field)
    return folder
