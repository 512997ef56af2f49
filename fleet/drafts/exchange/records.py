"""Training records in Redis that all trainers share: which trainer may write, and the versions of
the draft head.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import redis
from redis.exceptions import RedisError

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.errors import RedisUnreachable
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.figures.training import DraftVersion, decode_version, parse_versions
from fleet.drafts.trainer.records import TrainingRecords

log = logging.getLogger(__name__)
NO_VERSION = (b"unlisted", b"stale")


class RedisRecords(TrainingRecords):
    """Training records in Redis, as worker `trainer` writes them. Writes are refused once the
    worker is fenced, or another trainer has claimed the right.
    """

    def __init__(self, client: redis.Redis, trainer: WorkerId, stage: StageName) -> None:
        """Use an open client. `stage`: stage whose workers draft with the versions."""
        self._client = client
        self._trainer = trainer
        self._stage = stage
        self._epoch = 0

    def claim(self, newest: int) -> int | None:
        with _reachable():
            call = scripts.claim_training(self._trainer, newest)
            answer, *epochs = map(text, cast("list[bytes]", run(self._client, call)))
        if answer != "ok":
            return None
        self._epoch, former = map(int, epochs)
        if former > newest:
            log.warning(
                "the last trainer wrote nothing to this training.folder: if it was on another "
                "host, give all trainers the same folder"
            )
        return self._epoch

    def holds(self) -> bool:
        with _reachable():
            call = scripts.holds_training(self._trainer, self._epoch)
            return text(run(self._client, call)) == "ok"

    def versions(self) -> Sequence[DraftVersion]:
        with _reachable():
            fields = cast("dict[bytes, bytes]", self._client.hgetall(keys.DRAFT_VERSIONS))
        return parse_versions(fields)

    def add_version(self, version: DraftVersion, newest: int) -> DraftVersion | None:
        with _reachable():
            call = scripts.add_version(self._trainer, self._epoch, version, newest)
            answer = cast(bytes, run(self._client, call))
        return decode_version(answer) if answer not in NO_VERSION else None

    def forget_version(self, version: DraftVersion) -> bool:
        with _reachable():
            call = scripts.forget_version(self._trainer, self._epoch, version.sha256)
            return text(run(self._client, call)) == "ok"

    def version_in_use(self) -> DraftVersion | None:
        with _reachable():
            sha256 = text(self._client.hget(keys.DRAFTERS, f"{self._stage}:version"))
            found = cast("bytes | None", self._client.hget(keys.DRAFT_VERSIONS, sha256))
        return decode_version(found) if found is not None else None

    def promote(self, version: DraftVersion, present: DraftVersion | None, reason: str) -> bool:
        expected = present.sha256 if present is not None else ""
        with _reachable():
            call = scripts.promote_version(
                self._trainer, self._epoch, self._stage, expected, version.sha256, reason
            )
            return text(run(self._client, call)) == "ok"


@contextmanager
def _reachable() -> Iterator[None]:
    """Turn an error of Redis into RedisUnreachable: training is repeated after it, and the worker's
    own calls decide whether its incarnation is over.
    """
    try:
        yield
    except RedisError as error:
        raise RedisUnreachable(f"redis: {error}") from error
