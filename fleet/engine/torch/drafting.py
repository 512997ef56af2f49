"""Interface between the batch loop and speculative decoding, which `fleet.drafts` implements.

A loop without it verifies no drafts. Drafts change the speed of a loop, never its answers.
"""

from collections.abc import Sequence
from typing import Protocol

from fleet.core.ids import RequestId
from fleet.drafts.figures.speculation import SpeculationFigures
from fleet.engine.torch.kv_pool import KVPool
from fleet.engine.torch.pass_queue import PassEntry
from fleet.engine.torch.passes import PassDone
from fleet.engine.torch.program import DraftedTask, TaskT


class Drafting(Protocol):
    """Drafts for the requests of one batch loop. Not thread-safe."""

    @property
    def reads_features(self) -> bool:
        """True if hidden states of each step are needed, which a captured graph does not return."""
        ...

    def use(self, name: str) -> None:
        """Draft with another drafter from the next step on. Raises: BadInput for an unknown
        name.
        """
        ...

    def with_drafts(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], pool: KVPool
    ) -> list[PassEntry[TaskT]]:
        """Return the entries of the next step, with drafts where a token will be sampled."""
        ...

    def record(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], done: PassDone, seconds: float
    ) -> None:
        """Count the accepted drafts of a step, and its time."""
        ...

    def close(self, request: RequestId, task: DraftedTask, *, complete: bool) -> None:
        """Forget a request. A complete answer may serve for later drafts."""
        ...

    def figures(self) -> SpeculationFigures:
        """Return the counts since the present drafter is in use."""
        ...
