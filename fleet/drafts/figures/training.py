"""Statistics that a trainer publishes, and versions of its draft head as readers see them."""

from collections.abc import Mapping

import msgspec

from fleet.core.ids import WorkerId


class TrainingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the active trainer since it was started.

    `windows`: optimizer steps of its head. `loss`: loss of the last step; `losses`: losses of the
    latest steps. `accepted`, `refused`: samples. `waiting`: samples that wait to be in a durable
    checkpoint. `held_out`: samples kept for evaluation. `replay_samples`, `replay_bytes`: samples
    held to be trained on again. `checkpoint`: optimizer steps in the last durable checkpoint.
    `checkpoint_name`: name of that checkpoint, "" for none, made at `saved_us`. `acceptance`:
    simulated acceptance length on held-out samples at the last evaluation, None before. `shares`:
    acceptance rate by draft position in the last step.
    """

    windows: int = 0
    loss: float | None = None
    accepted: int = 0
    refused: int = 0
    waiting: int = 0
    held_out: int = 0
    replay_samples: int = 0
    replay_bytes: int = 0
    checkpoint: int = 0
    checkpoint_name: str = ""
    saved_us: int = 0
    acceptance: float | None = None
    losses: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


class DraftVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered version of a draft head.

    `number`: name for operators; 0 before it has one. `sha256`: hash of its weights' bytes, by
    which versions are compared. `target`: hash of the target model's weights. `windows`,
    `samples`: optimizer steps and samples that it was trained on. `acceptance`: simulated
    acceptance length on held-out samples; None without any. `source`: training run that made it, or
    file that it was imported from. `note`: why a worker promoted or replaced it.
    """

    number: int
    sha256: str
    target: str
    num_bytes: int
    windows: int = 0
    samples: int = 0
    acceptance: float | None = None
    source: str = ""
    created_us: int = 0
    note: str = ""


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """State of draft head training in a fleet.

    `trainer`: the active trainer, "" without one. `figures`: statistics of the active trainer; None
    until first published. `checkpoint`: name of the active trainer's last durable checkpoint, made
    at `saved_us`. `acknowledged`: samples that were trained on. `shed`: live answers not submitted
    because requests waited. `failed`: samples that failed. `versions`: the newest first. `version`:
    version that the workers of the main stage should use, 0 for the head that they started with;
    `last_version`: the version in use before.
    """

    enabled: bool
    trainer: WorkerId = WorkerId("")
    figures: TrainingFigures | None = None
    checkpoint: str = ""
    saved_us: int = 0
    acknowledged: int = 0
    shed: int = 0
    failed: int = 0
    versions: tuple[DraftVersion, ...] = ()
    version: int = 0
    last_version: int = 0


def encode_version(version: DraftVersion) -> bytes:
    return msgspec.json.encode(version)


decode_version = msgspec.json.Decoder(DraftVersion).decode


def parse_versions(fields: Mapping[bytes, bytes]) -> list[DraftVersion]:
    """Return the versions in the fields of their hash in Redis, each with its note; the newest
    first.
    """
    found = [
        msgspec.structs.replace(
            decode_version(record), note=fields.get(b"note:" + name, b"").decode()
        )
        for name, record in fields.items()
        if name != b"last" and b":" not in name
    ]
    return sorted(found, key=lambda version: -version.number)


def same_version(one: DraftVersion, other: DraftVersion) -> bool:
    """Return True if two records are of one version with one number, whatever their notes."""
    return msgspec.structs.replace(one, note="") == msgspec.structs.replace(other, note="")
