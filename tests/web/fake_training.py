"""State of draft-head training in memory."""

from dataclasses import dataclass, field

import msgspec

from fleet.control.training import OUTCOMES, Outcome, TrainingClient
from fleet.core.errors import NotFound
from fleet.drafts.figures.training import DraftVersion, TrainingState


@dataclass(slots=True)
class FakeTraining(TrainingClient):
    """State of draft-head training in memory, as the gateway reads it. `waiting`: whether a request
    waits for a worker. `num_purges`: number of commands to delete the samples.
    """

    waiting: bool = False
    counted: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    known: list[DraftVersion] = field(default_factory=list[DraftVersion])
    num_purges: int = 0
    shown: TrainingState = field(default_factory=lambda: TrainingState(enabled=False))

    async def state(self) -> TrainingState:
        return msgspec.structs.replace(self.shown, versions=tuple(self.known))

    async def promote(self, number: int) -> None:
        if number and all(version.number != number for version in self.known):
            raise NotFound(f"no version {number} of the draft head", param="number")
        self.shown = msgspec.structs.replace(
            self.shown, version=number, last_version=self.shown.version
        )

    async def roll_back(self) -> int:
        await self.promote(self.shown.last_version)
        return self.shown.version

    async def has_waiting(self) -> bool:
        return self.waiting

    async def count(self, outcome: Outcome) -> None:
        self.counted[outcome] += 1

    async def forget_samples(self) -> None:
        self.num_purges += 1

    async def counts(self) -> dict[Outcome, int]:
        return dict(self.counted)

    async def versions(self) -> list[DraftVersion]:
        return list(self.known)
