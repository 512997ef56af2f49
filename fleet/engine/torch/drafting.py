"""Interface between the batch loop and speculative decoding, which `fleet.drafts` implements.

A batch loop without an implementation samples one token per request and step. Draft tokens change
the speed of a loop, never its answers.
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
    """Source of draft tokens for the requests of one batch loop. Not thread-safe."""

    @property
    def reads_features(self) -> bool:
        """True if the drafter needs hidden states of each step, which a captured graph does not
        return.
        """
        ...

    def use(self, name: str) -> None:
        """Switch to the drafter `name` from the next step on. Raises: BadInput for an unknown
        name.
        """
        ...

    def with_drafts(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], pool: KVPool
    ) -> list[PassEntry[TaskT]]:
        """Return the entries of the next step, with draft tokens added where a token will be
        sampled. `pool`: KV pool in which the draft tokens get pages.
        """
        ...

    def record(
        self, entries: Sequence[tuple[RequestId, PassEntry[TaskT]]], done: PassDone, seconds: float
    ) -> None:
        """Count the accepted draft tokens of a finished step, and its duration in `seconds`."""
        ...

    def close(self, request: RequestId, task: DraftedTask, *, complete: bool) -> None:
        """Forget an ended request. `complete`: True if its answer is complete, so that later
        requests may use it as a source of draft tokens.
        """
        ...

    def figures(self) -> SpeculationFigures:
        """Return the statistics of the present drafter, counted since it came into use."""
        ...
