"""State of training in Redis, as gateways and training runs read and change it: sample counts, and
versions of the draft head.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from redis.asyncio import Redis

from fleet.config import FleetConfig
from fleet.control import keys, scripts
from fleet.control.connect import answer_of, number, pairs, run_async, text
from fleet.core.errors import NotFound
from fleet.core.ids import RoleName, WorkerId
from fleet.drafts.figures.training import (
    DraftVersion,
    TrainingState,
    decode_version,
    parse_versions,
)
from fleet.graphs.training import TRAINER
from fleet.telemetry.vitals import Vitals

Outcome = Literal["acknowledged", "shed", "failed"]
PURGES = "purges"
OUTCOMES: tuple[Outcome, ...] = ("acknowledged", "shed", "failed")


class TrainingClient:
    """Client of the state of training in Redis. Any method may raise RedisUnreachable."""

    def __init__(self, client: Redis, config: FleetConfig) -> None:
        self._redis = client
        self._enabled = config.training.enabled
        self._main = config.graph_declaration().main_stage.name
        self._main_role = config.roles_of(self._main)[0].name

    async def has_waiting(self) -> bool:
        """Return True if a request waits for a worker of the main stage, or at a gateway for
        admission.
        """
        pipe = self._redis.pipeline(transaction=False)
        for stream in keys.role_streams(self._main_role):
            pipe.xlen(stream)
        pipe.exists(keys.WAITING)
        return any(cast("list[int]", await answer_of(pipe.execute())))

    async def count(self, outcome: Outcome) -> None:
        """Add 1 to the fleet's total of samples with this outcome: `acknowledged` (trained on),
        `shed` (not submitted, since requests waited) or `failed`.
        """
        await answer_of(self._redis.hincrby(keys.TRAINING, outcome, 1))

    async def forget_samples(self) -> None:
        """Order the trainer to forget all samples that it holds; the trainer does so within a
        second.
        """
        await answer_of(self._redis.hincrby(keys.TRAINING, PURGES, 1))

    async def add(self, version: DraftVersion, newest: int = 0) -> DraftVersion:
        """Record a version of the draft head whose files are in the folder of versions; return the
        record with its number, or the present record of a version with the same weights. `newest`:
        highest number in that folder, which a new number exceeds.
        """
        call = scripts.add_version(WorkerId(""), None, version, newest)
        return decode_version(cast(bytes, await answer_of(run_async(self._redis, call))))

    async def promote(self, number: int) -> None:
        """Let the main stage's workers draft with version `number` of the draft head; 0 is the
        version with which they started. Workers follow within two seconds, and read the weights
        from any worker that has them. Raises: NotFound for a version that does not exist.
        """
        found = {version.number: version.sha256 for version in await self.versions()} | {0: ""}
        if number not in found or not await self._promote(found[number]):
            raise NotFound(
                f"no version {number} of the draft head; `fleet draft versions` lists those "
                "there are",
                param="number",
            )

    async def _promote(self, sha256: str) -> bool:
        call = scripts.promote_version(
            WorkerId(""), None, self._main, scripts.ANY_VERSION, sha256, "by order of an operator"
        )
        return text(await answer_of(run_async(self._redis, call))) == "ok"

    async def roll_back(self) -> int:
        """Return to the version of the draft head that was in use before the present one; return
        its number, which is 0 for the head with which the workers started.
        """
        before = text(
            await answer_of(self._redis.hget(keys.DRAFTERS, f"{self._main}:last_version"))
        )
        number = _number_of(before, await self.versions())
        await self.promote(number)
        return number

    async def counts(self) -> dict[Outcome, int]:
        found = await answer_of(self._redis.hmget(keys.TRAINING, list(OUTCOMES)))
        return {
            outcome: int(text(count) or 0) for outcome, count in zip(OUTCOMES, found, strict=True)
        }

    async def state(self) -> TrainingState:
        """Return the state of training: the trainer, sample counts, checkpoint and versions."""
        seconds, micros = await answer_of(self._redis.time())
        now_us = seconds * 1_000_000 + micros
        pipe = self._redis.pipeline(transaction=False)
        pipe.zrevrangebyscore(
            keys.role_workers(RoleName(TRAINER), "accepting"), "+inf", f"({now_us}", 0, 1
        )
        pipe.hgetall(keys.TRAINING)
        pipe.hmget(keys.DRAFTERS, f"{self._main}:version", f"{self._main}:last_version")
        active, raw, (present, before) = await answer_of(pipe.execute())
        trainer, fields = WorkerId(text(active[0]) if active else ""), pairs(raw)
        record = await answer_of(self._redis.hgetall(keys.worker(trainer))) if trainer else {}
        figures, versions = Vitals.decode(pairs(record)).training, await self.versions()
        return TrainingState(
            enabled=self._enabled,
            trainer=trainer,
            figures=figures,
            checkpoint=figures.checkpoint_name if figures is not None else "",
            saved_us=figures.saved_us if figures is not None else 0,
            acknowledged=number(fields, "acknowledged"),
            shed=number(fields, "shed"),
            failed=number(fields, "failed"),
            versions=tuple(versions),
            version=_number_of(text(present), versions),
            last_version=_number_of(text(before), versions),
        )

    async def versions(self) -> list[DraftVersion]:
        """Return the versions of the draft head, the newest first."""
        fields = await answer_of(self._redis.hgetall(keys.DRAFT_VERSIONS))
        return parse_versions(cast("Mapping[bytes, bytes]", fields))


def _number_of(sha256: str, versions: Sequence[DraftVersion]) -> int:
    """Return the number of the version with this hash; 0 for "", the head with which workers start,
    and for an unknown hash.
    """
    return next((version.number for version in versions if version.sha256 == sha256), 0)
