"""Training records in Redis that all trainers share: the last durable checkpoint, and the numbered
versions of the draft head.
"""

from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.figures.training import DraftVersion, decode_version, encode_version
from fleet.drafts.trainer.records import TrainingRecords


class RedisRecords(TrainingRecords):
    """Training records in Redis, as worker `trainer` writes them. Writes are refused once the
    worker is fenced.
    """

    def __init__(self, client: redis.Redis, trainer: WorkerId, stage: StageName) -> None:
        """Use an open client. `stage`: stage whose workers draft with the versions."""
        self._client = client
        self._trainer = trainer
        self._stage = stage

    def checkpoint(self) -> str:
        return text(self._client.hget(keys.TRAINING, "checkpoint"))

    def note_checkpoint(self, name: str) -> bool:
        return text(run(self._client, scripts.note_checkpoint(self._trainer, name))) == "ok"

    def add_version(self, version: DraftVersion) -> DraftVersion | None:
        answer = run(
            self._client,
            scripts.add_version(self._trainer, version.sha256, encode_version(version)),
        )
        return decode_version(cast(bytes, answer)) if answer != b"unlisted" else None

    def version_in_use(self) -> DraftVersion | None:
        number = text(self._client.hget(keys.DRAFTERS, f"{self._stage}:version"))
        found = cast("bytes | None", self._client.hget(keys.DRAFT_VERSIONS, number or "0"))
        return decode_version(found) if found is not None else None

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        expected = present.number if present is not None else 0
        call = scripts.promote_version(self._trainer, self._stage, expected, version.number, reason)
        return text(run(self._client, call)) == "ok"
