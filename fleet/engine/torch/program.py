"""Interface between an autoregressive model and the batch loop: one task per request, and two
computations that all tasks share (hidden states, and sampling).

A task's input is a sequence of rows: one embedding per position. The loop computes rows in order,
any number per step. Once all known rows are computed and the task wants a token, the program
samples it, and the task grows by a row or ends. A program may also compute a whole decode step,
hidden states and sampling, from tensors alone, for capture as a graph (`GraphProgram`).
Legend: N rows of a step, H hidden size, S rows after which a token is sampled, B rows of a decode
step, Q codes of a sampled token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.engine.base import EngineInput, EngineOutput, EngineRequest
from fleet.engine.torch.attention_step import StepLayout
from fleet.engine.torch.kv_pool import KVShape
from fleet.engine.torch.layout import Layout
from fleet.engine.torch.prefix import Prefix
from fleet.engine.torch.sampling import RowSampling
from fleet.engine.torch.step_inputs import DrawInputs, StepInputs, StepShape


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
    """State of one request inside a program: its input rows (one embedding per position) and its
    answer so far.
    """

    @property
    def num_rows(self) -> int:
        """Number of input rows known so far, which only grows."""
        ...

    @property
    def wants_draw(self) -> bool:
        """True if a token is to be sampled once every known row is computed."""
        ...

    @property
    def num_unread(self) -> int:
        """Number of fed pieces that the known rows do not contain completely; always the last
        pieces.
        """
        return 0

    def feed(self, piece: EngineInput) -> Sequence[EngineOutput]:
        """Add a piece of input; return outputs that are ready at once: mostly nothing, or the end
        of a request without an answer. Raises: BadInput.
        """
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the input embeddings of positions [start, stop): [rows, H]. The loop asks again
        for old positions whose pages it freed.
        """
        ...

    def on_computed(
        self, start: int, stop: int, tapped_NH: Tensor | None
    ) -> Sequence[EngineOutput]:
        """Return the outputs that follow from newly computed positions [start, stop). A position
        may be reported twice.

        `tapped_NH`: hidden states of the last of these positions in the tapped layer, or None if
        there are no such hidden states, for example because all positions were reused. Positions
        before them were reused, and the task has their hidden states.
        """
        return ()

    def needs_tapped(self, start: int, stop: int) -> bool:
        """Return True if `on_computed` uses the tapped layer's hidden states of positions [start,
        stop); if not, the process that computes the layer need not send them.
        """
        return False

    def rope_len(self, num_rows: int) -> int:
        """Return the text length for which all rotary embeddings are scaled while `num_rows` rows
        are known.

        Later positions use their own length if it is greater. Positions that were computed with a
        different length are computed again. 0: the model does not scale rotary embeddings by
        length.
        """
        return 0

    def prefix(self) -> Prefix:
        """Return the identity of the task's leading positions, with which the next request of its
        session may begin. Called only for a request with a session.
        """
        ...

    def on_reused(self, prefix: Prefix, start: int, stop: int) -> None:
        """Handle the reuse of positions [start, stop) from an earlier request of the session, whose
        prefix is `prefix`. The default does nothing.
        """


TaskT = TypeVar("TaskT", bound=ProgramTask)


class Program(Protocol[TaskT]):
    """Model that the batch loop runs."""

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def tapped_width(self) -> int:
        """Number of values per position of the tapped layer that cached prefixes keep; 0 if
        prefixes keep none.
        """
        ...

    def open(self, request: EngineRequest) -> TaskT:
        """Create the task of a request. Raises: BadInput."""
        ...

    def forward(self, rows_NH: Tensor, layout: Layout, tasks: Sequence[TaskT]) -> Forwarded:
        """Run every layer over the rows of a step. `layout`: places of the rows in the KV pool;
        `tasks`: tasks whose rows are in the step.
        """
        ...

    def draw(self, tasks: Sequence[TaskT], last_SH: Tensor) -> Sequence[Sequence[EngineOutput]]:
        """Sample the next token of each task from the final hidden state of its last position. An
        output that is `final` or has an `error` ends its task.
        """
        ...


class DraftedTask(ProgramTask, Protocol):
    """The state of a request whose next tokens may be predicted by a drafter."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def answer_ids(self) -> Sequence[int]:
        """Token ids sampled so far."""
        ...

    @property
    def most_drafts(self) -> int:
        """Largest number of draft tokens that a step may add: one less than the number of tokens
        that may still be sampled.
        """
        ...


DraftedTaskT = TypeVar("DraftedTaskT", bound=DraftedTask)


class DraftedProgram(Program[DraftedTaskT], Protocol[DraftedTaskT]):
    """Program that computes the rows of draft tokens beside known rows, and samples a token after
    each. Legend: R rows after which a token is sampled, V vocabulary.
    """

    def read_features(self, layers: Sequence[int]) -> None:
        """Make each later `forward` return the hidden states that enter `layers`, side by side: [N,
        T]. Raises: ConfigError if the program cannot.
        """
        ...

    def draft_rows(self, ids: Sequence[int]) -> Tensor:
        """Return the input embeddings of draft tokens: [n, H]."""
        ...

    def logits(self, last_RH: Tensor) -> Tensor:
        """Return the logits of final hidden states: [R, V]."""
        ...

    def draw_drafted(
        self, tasks: Sequence[DraftedTaskT], drafts: Sequence[Sequence[int]], logits_RV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Sample, for each task, a token after its last known row and after each of its draft
        tokens; record the tokens up to and including the first that differs from the draft token.
        At least one token per task is recorded, as by `draw`.
        """
        ...


class GraphTask(ProgramTask, Protocol):
    """State of a request inside a `GraphProgram`."""

    @property
    def num_drawn(self) -> int:
        """Number of tokens sampled so far, which determines the noise of the next one."""
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
    `logits_BV`: the logits before sampling, if rows with a `RowSampling.adjustment` may be sampled
    again from them.
    """

    codes_BQ: Tensor
    rows_BH: Tensor
    tapped_BH: Tensor | None = None
    logits_BV: Tensor | None = None


class GraphProgram(Program[GraphTaskT], Protocol[GraphTaskT]):
    """Program whose decode step can be captured as one graph, and so can its `forward`: the host
    reads no value of a tensor, and no shape depends on such a value. `forward` then has no tasks.
    """

    @property
    def step_shape(self) -> StepShape: ...

    def decode(self, inputs: StepInputs, layout: StepLayout) -> StepOutputs:
        """Compute all layers for every row of a decode step, and sample each row's next token:
        `forward`, then `sample_step`.
        """
        ...

    def sample_step(
        self, last_BH: Tensor, draws: DrawInputs, *, is_fused: bool = False
    ) -> StepOutputs:
        """Sample the next token of each row from its final hidden state; by fused kernels if
        `is_fused`. The outputs have no `tapped_BH`.
        """
        ...

    def trial(self, rows_BH: Tensor, layout: StepLayout) -> Sequence[Tensor]:
        """Compute a fixed share of a decode step, by fused kernels if `layout.is_fused`. Duration
        and outputs of the share decide which form of the step is used.
        """
        ...

    def record(
        self, tasks: Sequence[GraphTaskT], codes_SQ: NDArray[np.int32], rows_SH: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Record the tokens that a decode step sampled, with their embeddings `rows_SH`; return the
        tasks' outputs, as `draw` does.
        """
        ...

    def draw_from(
        self, tasks: Sequence[GraphTaskT], logits_SV: Tensor
    ) -> Sequence[Sequence[EngineOutput]]:
        """Sample the next token of each task from logits; return the outputs, as `draw` does."""
        ...
