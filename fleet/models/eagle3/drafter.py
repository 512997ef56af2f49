"""The draft head as a drafter of the batch loop: it reads the rows of each pass, and drafts before the next one.

Its keys and values are the last layer of the target's KV pool, so they move and end with a request's pages. Rows that the head
has not read, as those of an earlier worker, make its guesses worse and nothing else. Legend: see the package.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import RequestId
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.drafters import AskedDraft, ComputedRows, Drafter
from fleet.engine.torch.kv_pool import KVPool, KVShape
from fleet.engine.torch.layout import Extent
from fleet.models.eagle3.config import Eagle3Config
from fleet.models.eagle3.drafting import draft_tokens, read_taps
from fleet.models.eagle3.head import Eagle3Head


class HeadDrafter(Drafter):
    """Drafts with a head, or not at all while there is none. `embed`: maps ids [n] to the target's rows [n, H].

    The head's layer is the last one of `pool`.
    """

    costs_time = True

    def __init__(self, head: Eagle3Head | None, pool: KVPool, embed: Callable[[Tensor], Tensor]) -> None:
        self._head, self._pool, self._embed = head, pool, embed
        self._layer = pool.shape.num_layers - 1
        self._hidden: dict[RequestId, tuple[int, Tensor]] = {}
        """By request, the number of rows that the head has read, and its hidden row of the last of them: [1, H]."""

    @property
    def head(self) -> Eagle3Head | None:
        return self._head

    @property
    def can_draft(self) -> bool:
        return self._head is not None

    @property
    def reads_features(self) -> bool:
        return self._head is not None

    def exchange(self, head: Eagle3Head | None) -> None:
        """Draft with another head from the next pass on. Keys and values of the last one make the first guesses worse."""
        self._head = head
        self._hidden.clear()

    def on_computed(self, rows: Sequence[ComputedRows]) -> None:
        """Read the rows whose next token is known; a request without one has ended."""
        known = [each for each in rows if each.task.num_rows > each.stop]
        if not known or self._head is None:
            return
        extents = [Extent(table=each.table, start=each.start, stop=each.stop) for each in known]
        following_NH = torch.cat([each.task.rows(each.start + 1, each.stop + 1) for each in known])
        features_NT = torch.cat([each.features_NT for each in known])
        hidden_NH = read_taps(self._head, following_NH, features_NT, FastLayout(self._pool, extents), self._layer)
        last = 0
        for each, extent in zip(known, extents, strict=True):
            last += extent.num_rows
            self._hidden[each.request] = each.stop, hidden_NH[last - 1 : last]

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(asked)
        most = max((each.most for each in asked), default=0)
        ready = [at for at, each in enumerate(asked) if self._is_ready(each, most)]
        if not ready or self._head is None:
            return found
        first = [self._hidden[asked[at].request][0] for at in ready]
        hidden_SH = torch.cat([self._hidden[asked[at].request][1] for at in ready])
        layouts = (
            FastLayout(
                self._pool,
                [
                    Extent(table=asked[at].table, start=start + step, stop=start + step + 1)
                    for at, start in zip(ready, first, strict=True)
                ],
            )
            for step in range(most - 1)
        )
        tokens = draft_tokens(self._head, hidden_SH, layouts, self._layer, self._embed).tolist()
        for at, drafts in zip(ready, tokens, strict=True):
            found[at] = drafts[: asked[at].most]
        return found

    def _is_ready(self, asked: AskedDraft, most: int) -> bool:
        """Return True if the head has read every row but that of the last token, and pages are free for the rows of drafts."""
        num_read, _ = self._hidden.get(asked.request, (-1, None))
        return asked.most > 0 and num_read == asked.task.num_rows - 1 and self._pool.grow(asked.table, num_read + most)

    def close(self, request: RequestId) -> None:
        self._hidden.pop(request, None)

    def forget_requests(self) -> None:
        self._hidden.clear()


def check_fit(config: Eagle3Config, shape: KVShape, source: str) -> None:
    """Raise ConfigError unless a head's keys and values are of the size of its target's. `shape`: of the target's layers."""
    for name, own, wanted in (
        ("num_layers", config.num_layers, shape.num_layers),
        ("num_kv_heads", config.num_kv_heads, shape.num_kv_heads),
        ("head_dim", config.head_dim, shape.head_dim),
    ):
        if own != wanted:
            raise ConfigError(f"{source}: the draft head is made for {name} {own}, this model has {wanted}", param=name)
