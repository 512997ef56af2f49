"""Figures of a trainer, as it publishes them, and versions of its draft head as readers see
them.
"""

import msgspec

from fleet.core.ids import WorkerId


class TrainingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the active trainer since it was started.

    `windows`: optimizer steps of its head; `loss`: loss of the last one. `accepted`, `refused`:
    samples. `waiting`: samples that wait for a checkpoint which contains them. `replay_samples`,
    `replay_bytes`: samples held to be trained on again. `checkpoint`: windows in the last durable
    checkpoint. `acceptance`: simulated acceptance length on held-out samples at the last
    evaluation, None before.
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
    acceptance: float | None = None
    losses: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


class DraftVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered version of a draft head. `sha256`: hash of its weights' bytes. `target`: hash of
    the target that it belongs to.

    `acceptance`: simulated acceptance length on held-out samples; None without any. `windows`,
    `samples`: numbers that it was trained on. `source`: the training run, or the file that it was
    imported from. `note`: why a worker promoted or replaced it.
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
    """Training in a fleet. `trainer`: the active one, "" without; it has no `figures` before its
    first.

    `checkpoint`: name of the last durable checkpoint, made at `saved_us` by Redis's clock.
    `acknowledged`, `shed`, `failed`: samples that were trained on, were not submitted since
    requests waited, and failed. `versions`: the newest first. `version`: version that the workers
    of the main stage are to use, 0 for the head of their start; `last_version`: the one before.
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
