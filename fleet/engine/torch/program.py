"""Interface of an autoregressive model to the batch loop: one task per request, and the two
computations that they share.

A task's input is rows, one per position. The loop computes rows in order, any number at a time;
once all known rows are computed and the task wants a draw, the program draws, and the task grows by
a row or ends. A program may also compute a whole decode step, rows and draws, from tensors alone,
for capture as a graph (`GraphProgram`).
Legend: N rows of a pass, H hidden size, S rows drawn from, B rows of a decode step, Q codes of a
draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix
from fleet.engine.torch.sampling import RowSampling
from fleet.engine.torch.step_inputs import StepInputs, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """Hidden states that a step computes. `last_NH`: the final (normed) hidden states. `tapped_NH`:
    the hidden states that enter the tapped layer, if the program taps a layer.

    `features_NT`: the hidden states that enter the layers read by a draft head, side by side, if
    there is a draft head.
    """

    last_NH: Tensor
    tapped_NH: Tensor | None = None
    features_NT: Tensor | None = None


class ProgramTask(Protocol):
    """The state of one request inside a program."""

    @property
    def num_rows(self) -> int:
        """Number of input rows known so far; it only grows."""
        ...

    @property
    def wants_draw(self) -> bool:
        """True if a draw is due once every known row is computed."""
        ...

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Add input; return its immediate output (an end without an answer, mostly nothing).
        Raises: BadInput.
        """
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return embeddings of rows [start, stop): [rows, H]. Called again for old rows whose pages
        the loop freed.
        """
        ...

    def on_computed(
        self, start: int, stop: int, tapped_NH: Tensor | None
    ) -> Sequence[EngineOutput]:
        """Return the output of newly computed rows [start, stop). May be called twice for a row.

        `tapped_NH` are the last of these rows: those before were reused, and the task has their
        tapped rows.
        """
        return ()

    def needs_tapped(self, start: int, stop: int) -> bool:
        """Return True if `on_computed` uses tapped rows of [start, stop): others need not come from
        the process that has them.
        """
        return False

    def rope_len(self, num_rows: int) -> int:
        """Return the length by which all rotary embeddings are scaled while `num_rows` are known.

        Later rows use their own length if it is greater. Rows that were computed with a different
        length are computed again. 0: the model does not scale rotary embeddings by length.
        """
        return 0

    def prefix(self) -> Prefix:
        """Return the leading rows, with which another request may begin. Called only for a request
        with a session.
        """
        ...

    def on_reused(self, prefix: Prefix, start: int, stop: int) -> None:
        """Handle that rows [start, stop) are reused from an earlier request of the session: by
        default, they need no output.
        """


TaskT = TypeVar("TaskT", bound=ProgramTask)


class Program(Protocol[TaskT]):
    """A model that the loop runs."""

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def tapped_width(self) -> int:
        """Number of values in a tapped row that cached prefixes keep; 0 if they keep none."""
        ...

    def open(self, request: EngineRequest) -> TaskT:
        """Create the task of a request. Raises: BadInput."""
        ...

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[TaskT]) -> Forwarded:
        """Run every layer. `tasks`: the tasks whose rows are in the step."""
        ...

    def draw(self, tasks: Sequence[TaskT], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        """Draw once for each task from its last hidden row. An output that is `final` or has an
        `error` ends its task.
        """
        ...


class DraftedTask(ProgramTask, Protocol):
    """The state of a request whose next tokens may be predicted by a drafter."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def answer_ids(self) -> Sequence[int]:
        """Ids drawn so far."""
        ...

    @property
    def most_drafts(self) -> int:
        """The most draws that may follow the next one."""
        ...


DraftedTaskT = TypeVar("DraftedTaskT", bound=DraftedTask)


class DraftedProgram(Program[DraftedTaskT], Protocol[DraftedTaskT]):
    """A program that computes rows of drafts beside known ones, and draws after each. Legend: R
    rows drawn from, V vocabulary.
    """

    def read_features(self, layers: Sequence[int]) -> None:
        """Return the rows that enter these layers from each later `forward`: [N, T]. Raises:
        ConfigError where it cannot.
        """
        ...

    def draft_rows(self, ids: Sequence[int]) -> Tensor:
        """Return the embeddings of drafts: [n, H]."""
        ...

    def logits(self, last_RH: Tensor) -> Tensor:
        """Return logits [R, V]."""
        ...

    def draw_drafted(
        self, tasks: Sequence[DraftedTaskT], drafts: Sequence[Sequence[int]], logits_RV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Draw for each task after its last known row and after each of its drafts, and record the
        draws up to the first that is not the draft: at least one, as `draw`.
        """
        ...


class GraphTask(ProgramTask, Protocol):
    """The state of a request inside a program whose decode step is a graph."""

    @property
    def num_drawn(self) -> int:
        """Number of draws made so far, which keys the next one's noise."""
        ...

    def next_draw(self) -> RowSampling: ...


GraphTaskT = TypeVar("GraphTaskT", bound=GraphTask)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Outputs of a decode step, of fixed shapes.

    `codes_BQ` (int32): the sampled codes; the first code of a row is -1 if the row's logits are not
    finite.
    `rows_BH`: the embeddings of the sampled codes.
    `tapped_BH`: the hidden states that enter the tapped layer, if the program taps a layer.
    """

    codes_BQ: Tensor
    rows_BH: Tensor
    tapped_BH: Tensor | None = None


class GraphProgram(Program[GraphTaskT], Protocol[GraphTaskT]):
    """A program whose decode step is one graph: no value of a tensor is read by the host, and no
    shape depends on one.
    """

    @property
    def step_shape(self) -> StepShape: ...

    def decode(self, inputs: StepInputs, layout: Layout) -> StepOutputs:
        """Compute every row's layers and its draw."""
        ...

    def record(
        self, tasks: Sequence[GraphTaskT], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Record the draws of a decode step and return their outputs, as `draw`."""
        ...
