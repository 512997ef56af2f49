"""The drafter that uses a draft head in the batch loop: reads the hidden states of each step, and
drafts before the next one.

The head's keys and values are the last layer of the target's KV pool, so they move and end with a
request's pages. Rows that the head has not read, such as an earlier worker's, make its guesses
worse and nothing else. Legend: see the package.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fleet.core.errors import ConfigError
from fleet.core.ids import RequestId
from fleet.drafts.drafters import AskedDraft, ComputedRows, Drafter
from fleet.drafts.eagle3.config import Eagle3Config
from fleet.drafts.eagle3.drafting import draft_tokens, read_taps
from fleet.drafts.eagle3.head import Eagle3Head
from fleet.drafts.pass_costs import PassTimes, bucket_of
from fleet.engine.torch.attention_fast import FastLayout
from fleet.engine.torch.kv_pool import KVPool, KVShape, PageTable
from fleet.engine.torch.layout import Extent
from fleet.engine.torch.program import DraftedTask

MOST_UNREAD = 256
"""Most rows of one request that wait to be read while no drafts are wanted. Reading many rows
together takes less time, but they occupy memory until then.
"""


@dataclass(slots=True, kw_only=True)
class _Unread:
    """Rows [start, stop) of a request that the head has not read. `features`: the target's hidden
    states of these rows, in parts.

    `num_backlog`: number of unread rows, without the answer's rows of the last step.
    """

    task: DraftedTask
    table: PageTable
    start: int
    stop: int
    features: list[Tensor] = field(default_factory=list[Tensor])
    num_backlog: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def add(self, rows: ComputedRows) -> None:
        is_prompt = len(rows.task.answer_ids) <= 1
        self.num_backlog = (rows.stop if is_prompt else rows.start) - self.start
        self.stop = rows.stop
        self.features.append(rows.features_NT)


class HeadDrafter(Drafter):
    """Drafter that uses an EAGLE-3 head; without a head it makes no drafts.

    `pool`: the target's KV pool, whose last layer is the head's. `embed`: maps ids [n] to the
    target's embeddings [n, H].
    """

    costs_time = True

    def __init__(
        self, head: Eagle3Head | None, pool: KVPool, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self._head = head
        self._pool = pool
        self._embed = embed
        self._layer = pool.shape.num_layers - 1
        self._hidden: dict[RequestId, tuple[int, Tensor]] = {}
        """By request: the number of rows that the head has read, and its output at the last of
        these rows, [1, H].
        """
        self._unread: dict[RequestId, _Unread] = {}
        self._read_times = PassTimes()
        """Time to read rows, by the number of rows that were read together."""

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
        """Use another head from the next step on; None ends drafting. Keys and values of the former
        head make the first guesses worse.
        """
        self._head = head
        self.forget_requests()

    def on_computed(self, rows: Sequence[ComputedRows]) -> None:
        """Store a step's rows until drafts are wanted; read them now for requests with
        `MOST_UNREAD` rows.

        Rows whose next token is not known are skipped: their request has ended.
        """
        if self._head is None:
            return
        many: list[RequestId] = []
        for each in rows:
            if each.task.num_rows <= each.stop:
                continue
            unread = self._unread.get(each.request)
            # pages that were taken back are computed again
            if unread is None or unread.stop != each.start:
                unread = self._unread[each.request] = _Unread(
                    task=each.task, table=each.table, start=each.start, stop=each.start
                )
            unread.add(each)
            if unread.num_rows >= MOST_UNREAD:
                many.append(each.request)
        self._read(many)

    def _read(self, requests: Sequence[RequestId]) -> float:
        """Run the head on the unread rows of these requests, and drop the rows' hidden states;
        return the seconds that the backlog took.
        """
        began_s = time.monotonic()
        unread = [self._unread.pop(request) for request in requests]
        if not unread or self._head is None:
            return 0.0
        extents = [Extent(table=each.table, start=each.start, stop=each.stop) for each in unread]
        following_NH = torch.cat([each.task.rows(each.start + 1, each.stop + 1) for each in unread])
        features_NT = torch.cat([part for each in unread for part in each.features])
        hidden_NH = read_taps(
            self._head, following_NH, features_NT, FastLayout(self._pool, extents), self._layer
        )
        last = 0
        for request, extent in zip(requests, extents, strict=True):
            last += extent.num_rows
            self._hidden[request] = extent.stop, hidden_NH[last - 1 : last]
        took_s = time.monotonic() - began_s
        self._read_times.add(bucket_of(last), took_s)
        return took_s * sum(each.num_backlog for each in unread) / last

    def expected_backlog_s(self, asked: Sequence[AskedDraft]) -> float:
        unread = [self._unread[each.request] for each in asked if each.request in self._unread]
        num_backlog, num_rows = (
            sum(each.num_backlog for each in unread),
            sum(each.num_rows for each in unread),
        )
        return (
            (self._read_times.of(bucket_of(num_rows)) or 0.0) * num_backlog / num_rows
            if num_backlog
            else 0.0
        )

    def propose(self, asked: Sequence[AskedDraft]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(asked)
        most = max((each.most for each in asked), default=0)
        unread = [each.request for each in asked if each.most > 0 and each.request in self._unread]
        self.backlog_s = self._read(unread)
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
        """Return True if the head has read every row before the last token, and pages for the
        drafts' rows are free.
        """
        num_read, _ = self._hidden.get(asked.request, (-1, None))
        return (
            asked.most > 0
            and num_read == asked.task.num_rows - 1
            and self._pool.grow(asked.table, num_read + most)
        )

    def close(self, request: RequestId) -> None:
        self._hidden.pop(request, None)
        self._unread.pop(request, None)

    def forget_requests(self) -> None:
        self._hidden.clear()
        self._unread.clear()


def check_fit(config: Eagle3Config, shape: KVShape, source: str) -> None:
    """Raise ConfigError unless a head was made for a target with KV layers of this shape.

    `shape`: shape of the target's keys and values. `source`: name of the head's file in the error.
    """
    for name, own, wanted in (
        ("num_layers", config.num_layers, shape.num_layers),
        ("num_kv_heads", config.num_kv_heads, shape.num_kv_heads),
        ("head_dim", config.head_dim, shape.head_dim),
    ):
        if own != wanted:
            raise ConfigError(
                f"{source}: the draft head is made for {name} {own}, this model has {wanted}",
                param=name,
            )
