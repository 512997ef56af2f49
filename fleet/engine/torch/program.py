"""What an autoregressive model brings to the batch loop: tasks (one a request) and the two computations they share.

A task knows its input as rows, one a position. The loop computes rows in order, any number at a time; when all that are known are
computed and the task wants it, the program draws, and the task grows by a row or ends.
Legend: N rows of a pass, H hidden size, S rows drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """`last_NH` are final (normed) hidden rows; `tapped_NH` those entering the layer the program taps, if it does."""

    last_NH: Tensor
    tapped_NH: Tensor | None = None


class ProgramTask(Protocol):
    """One request inside a program."""

    @property
    def num_rows(self) -> int:
        """Input rows known so far. Only grows."""
        ...

    @property
    def wants_draw(self) -> bool:
        """Whether a draw is due once every known row is computed."""
        ...

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Take input; returns what it makes at once (an end without an answer, mostly nothing). Raises: BadInput."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Embeddings of rows [start, stop): [rows, H]. Asked again for old rows after the loop took the pages away."""
        ...

    def on_computed(self, start: int, stop: int, tapped_NH: Tensor | None) -> Sequence[EngineOutput]:
        """Rows [start, stop) were computed; returns what that makes. May be told twice of a row.

        `tapped_NH` are the last of them: those before were taken over, and the task has what was tapped of them.
        """
        ...

    def prefix(self) -> Prefix:
        """Its leading rows as another request could begin with them. Asked only of a request with a session."""
        ...

    def on_reused(self, prefix: Prefix, start: int, stop: int) -> None:
        """Rows [start, stop) need not be computed: an earlier request of the session had the same."""
        ...


TaskT = TypeVar("TaskT", bound=ProgramTask)


NUM_POSITIONS = "num_positions"
"""Request parameter that every program's requests carry: the most rows the request can come to."""


class Program(Protocol[TaskT]):
    """A model behind the loop."""

    @property
    def kv_shape(self) -> KVShape: ...

    def open(self, request: EngineRequest) -> TaskT:
        """Raises: BadInput."""
        ...

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[TaskT]) -> Forwarded:
        """Run every layer. `tasks` are those whose rows are in the pass."""
        ...

    def draw(self, tasks: Sequence[TaskT], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        """Draw once for each task from its last hidden row. A task ends by an output that is `final` or has an `error`."""
        ...
