"""A span worker's place in a route. Computes nothing."""

from dataclasses import dataclass

from fleet.spans.host.compute import SpanHost
from fleet.spans.net.connection import SpanConnection
from fleet.spans.protocol.messages import SpanResult, SpanSetup, SpanTapped
from fleet.spans.protocol.pass_log import SpanLog


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRoute:
    """A route in which this worker has a place, with its rows and what it may have to send again.

    `following`: connection to the next worker; None for the last one. `results`: results and tapped
    hidden states sent to the anchor, by step number, kept until the anchor reports them as
    received.
    """

    setup: SpanSetup
    anchor: SpanConnection
    following: SpanConnection | None
    host: SpanHost
    log: SpanLog
    results: dict[int, list[tuple[SpanResult | SpanTapped, memoryview]]]

    def resumes(self, setup: SpanSetup) -> bool:
        """Return True if a new route can continue with the rows of this one."""
        last, same = self.setup, ("span", "num_pages", "page_size", "returned", "wire_dtype")
        is_same_end = bool(setup.following) == bool(last.following)
        return (
            setup.lineage == last.lineage
            and is_same_end
            and all(getattr(setup, name) == getattr(last, name) for name in same)
        )
