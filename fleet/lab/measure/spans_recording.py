"""A chain of span workers that records the steps of an anchor. Opens no connection."""

import time
from collections.abc import Callable, Sequence

import msgspec

from fleet.lab.measure.spans_protocol import Extents, SpanReply
from fleet.spans.protocol.chain import DelegatingChain, SpanArrival, SpanChain
from fleet.spans.protocol.messages import SpanPass, SpanReport, SpanResult

US = 1e-6


class RecordingChain(DelegatingChain):
    """Chain of span workers that records each step: its extents, and the time from its sending to
    its result minus the workers' computation.
    """

    def __init__(self, chain: SpanChain, item_bytes: int) -> None:
        """Wrap `chain`. `item_bytes`: size of an element of a hidden state."""
        super().__init__(chain)
        self._item_bytes = item_bytes
        self.row_width = 0
        self._running_s: dict[int, float] = {}
        self.clear()

    def clear(self) -> None:
        self.passes: list[Extents] = []
        self.draws: list[tuple[bool, ...]] = []
        self.hop_s: list[float] = []
        self.sent_s: list[float] = []

    def recorded(self, reply: SpanReply) -> SpanReply:
        """Return a copy of `reply` with the steps recorded since `clear`."""
        return msgspec.structs.replace(
            reply,
            passes=tuple(self.passes),
            draws=tuple(self.draws),
            row_width=self.row_width,
            hop_s=tuple(self.hop_s),
            sent_s=tuple(self.sent_s),
        )

    def send(
        self,
        message: SpanPass | SpanReport,
        *rows: memoryview,
        when_sent: Callable[[], None] | None = None,
    ) -> None:
        if isinstance(message, SpanPass):
            self.passes.append(
                tuple((extent.table, extent.start, extent.stop) for extent in message.extents)
            )
            self.draws.append(tuple(extent.draws for extent in message.extents))
            num_rows = sum(extent.stop - extent.start for extent in message.extents)
            self.row_width = sum(part.nbytes for part in rows) // num_rows // self._item_bytes
            self.sent_s.append(time.perf_counter())
            self._running_s[message.number] = self.sent_s[-1]
        self._chain.send(message, *rows, when_sent=when_sent)

    def take(self, timeout_s: float) -> Sequence[SpanArrival]:
        arrivals = self._chain.take(timeout_s)
        now_s = time.perf_counter()
        for arrival in arrivals:
            result = arrival.message
            if (
                isinstance(result, SpanResult)
                and (sent_s := self._running_s.pop(result.number, None)) is not None
            ):
                self.hop_s.append(
                    now_s - sent_s - US * sum(hop.computed_us for hop in result.times)
                )
        return arrivals
