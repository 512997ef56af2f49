"""Files of draft heads for `fleet draft export`, `import` and `add`. Imports torch only when
called.
"""

import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fleet.cli.checkpoint import resolve_checkpoint
from fleet.config import FleetConfig
from fleet.core.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from fleet.drafts.eagle3.head import Eagle3Head
    from fleet.drafts.figures.training import DraftVersion

Format = Literal["speculators", "sglang"]


def export_head(config: FleetConfig, folder: Path, out: Path, kind: Format) -> None:
    """Write a draft head, read from a folder of Fleet's format, to `out` in another program's
    format. Raises: ConfigError, BadInput.
    """
    from fleet.drafts.eagle3.files import load_head
    from fleet.drafts.eagle3.sglang import export_sglang
    from fleet.drafts.eagle3.speculators import export_speculators
    from fleet.models.target_hash import hash_of_target

    _require_empty(out)
    checkpoint = resolve_checkpoint(config, config.graph_declaration().main_stage.name)
    head = load_head(folder, target_hash=hash_of_target(checkpoint))
    if kind == "sglang":
        export_sglang(head, out)
        return
    described = json.loads((checkpoint / "config.json").read_text())
    num_drafts = config.stage(config.graph_declaration().main_stage.name).speculation.num_drafts
    export_speculators(
        head,
        out,
        target=str(checkpoint),
        target_architectures=described["architectures"],
        num_drafts=num_drafts,
        embedding_VH=_embedding_of(checkpoint),
    )


def import_head(config: FleetConfig, folder: Path, out: Path, kind: Format) -> None:
    """Write a draft head, read from a folder of another program's format, to `out` in Fleet's own
    format. Raises: ConfigError, BadInput.
    """
    from fleet.drafts.eagle3.files import save_head
    from fleet.drafts.eagle3.sglang import import_sglang
    from fleet.drafts.eagle3.speculators import import_speculators
    from fleet.models.target_hash import hash_of_target
    from fleet.stages.builders import layer_counter

    _require_empty(out)
    graph = config.graph_declaration()
    checkpoint = resolve_checkpoint(config, graph.main_stage.name)
    num_layers = layer_counter(graph, graph.main_stage.name)(checkpoint)
    read = import_sglang if kind == "sglang" else import_speculators
    head: Eagle3Head = read(
        folder,
        num_layers=num_layers,
        target_hash=hash_of_target(checkpoint),
        embedding_VH=_embedding_of(checkpoint),
    )
    save_head(head, out)


def store_version(config: FleetConfig, folder: Path) -> "DraftVersion":
    """Copy a draft head into the deployment's folder of versions; return its description, in which
    the version number is 0, since the fleet has not numbered it yet.

    Raises: ConfigError if the head is damaged or belongs to another target model.
    """
    from fleet.drafts.eagle3.files import load_head
    from fleet.drafts.trainer.folder import VERSIONS
    from fleet.drafts.trainer.versions import is_whole, write_version
    from fleet.models.target_hash import hash_of_target

    target = resolve_checkpoint(config, config.graph_declaration().main_stage.name)
    head = load_head(folder, target_hash=hash_of_target(target))
    versions = config.drafts_dir / VERSIONS
    part = versions / f".{secrets.token_hex(8)}.part"
    part.mkdir(parents=True)
    version = write_version(head, part, source=str(folder))
    place = versions / version.sha256
    if is_whole(place):
        shutil.rmtree(part)
        return version
    if place.exists():
        place.rename(versions / f".{secrets.token_hex(8)}.damaged")
    part.rename(place)
    return version


def newest_stored(config: FleetConfig) -> int:
    """Return the highest version number in the deployment's folder of versions; 0 without any."""
    from fleet.drafts.trainer.folder import VERSIONS
    from fleet.drafts.trainer.versions import newest_number

    return newest_number((config.drafts_dir / VERSIONS).iterdir())


def record_version(config: FleetConfig, version: "DraftVersion") -> None:
    """Write the record of a version, with its number, to the folder of its files."""
    from fleet.drafts.trainer.versions import write_record

    write_record(folder_of_version(config, version), version)


def folder_of_version(config: FleetConfig, version: "DraftVersion") -> Path:
    """Return the folder that stores a draft head version on this host. Raises: BadInput if this
    host does not have it.
    """
    from fleet.drafts.trainer.folder import VERSIONS

    folder = config.drafts_dir / VERSIONS / version.sha256
    if not folder.is_dir():
        raise BadInput(
            f"version {version.number}: its files are not in {folder.parent}; run the command "
            "on the trainer's host",
            param="version",
        )
    return folder


def _require_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder; name another", param="out")


def _embedding_of(checkpoint: Path) -> "Tensor":
    """Return the token embedding [V, H] of the target model's checkpoint. Raises: ConfigError if
    the checkpoint has none under a name in `EMBEDDINGS`.
    """
    import torch

    from fleet.models.checkpoint import CheckpointReader
    from fleet.models.target_hash import EMBEDDINGS

    reader = CheckpointReader(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    name = next((name for name in EMBEDDINGS if reader.has(name)), None)
    if name is None:
        raise ConfigError(
            f"{checkpoint}: no embedding under {', '.join(EMBEDDINGS)}", param="checkpoint"
        )
    return reader.get(name)
