"""The order in which a span worker handles what has arrived.

Where rows are computed again, a route's anchor sends thousands of steps at one time. A worker that
finished them first would keep the next anchor waiting for minutes, even if the first one has left.
So everything from outside the route comes before the route's own messages.
"""

from collections import deque

from fleet.spans.host.hosting import SpanHosting
from fleet.spans.net.connection import Arrival, SpanArrivals


class SpanBacklog:
    """Arrivals that wait for `hosting`. The order within a connection is kept."""

    def __init__(self, hosting: SpanHosting, arrivals: SpanArrivals) -> None:
        self._hosting, self._arrivals = hosting, arrivals
        self._of_route: deque[Arrival] = deque()
        self._others: deque[Arrival] = deque()

    def handle_next(self, idle_s: float) -> None:
        """Handle one arrival. If there is none, wait up to `idle_s` seconds for more."""
        is_idle = not (self._others or self._of_route)
        for arrival in self._arrivals.take(idle_s if is_idle else 0):
            is_of_route = self._hosting.is_of_route(arrival.connection)
            (self._of_route if is_of_route else self._others).append(arrival)
        if waiting := self._others or self._of_route:
            self._hosting.handle(waiting.popleft())
