"""Spans that unused span workers load beforehand, so that a lost worker can be replaced without
loading. Knows no Redis.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from fleet.core.ids import WorkerId
from fleet.spans.route.division import RouteFailure, RouteWorker
from fleet.spans.route.setup import prepare_spans

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""Pause after a failure to load spans, before unused workers are asked again."""


def choose_standby_spans(spans: Sequence[str], unused: Sequence[RouteWorker]) -> list[RouteWorker]:
    """Choose a span to load for each unused worker that has no span of the route: the span with the
    fewest loaded copies so far. Return these workers with `span` set.

    `spans`: spans of the route. `unused`: workers outside the route, with the span that each has
    loaded, "" for none.
    """
    copies = Counter(dict.fromkeys(spans, 0))
    copies.update(hop.span for hop in unused if hop.span in copies)
    chosen: list[RouteWorker] = []
    for hop in (hop for hop in unused if hop.span not in copies):
        span = min(copies, key=lambda each: copies[each])
        copies[span] += 1
        chosen.append(replace(hop, span=span))
    return chosen


class StandbySpans:
    """Loads the route's spans into unused workers, in a thread of its own. The methods are called
    by one other thread.
    """

    def __init__(self, anchor: WorkerId, is_stopping: Callable[[], bool]) -> None:
        self._anchor, self._is_stopping = anchor, is_stopping
        self._thread: threading.Thread | None = None
        self._loading: list[RouteWorker] = []
        self._has_failed = False
        self._retry_s = 0.0

    def follow(self, spans: Sequence[str], unused: Sequence[RouteWorker]) -> list[RouteWorker]:
        """Return the workers that have loaded a span since the last call, with `span` set to the
        loaded span. If there are none, begin to load spans into the unused workers that have no
        span of the route, unless workers still load or loading has failed within `RETRY_S`.

        `spans`, `unused`: see `choose_standby_spans`.
        """
        if self._thread is not None and self._thread.is_alive():
            return []
        loaded, self._loading = ([] if self._has_failed else self._loading), []
        if loaded or time.monotonic() < self._retry_s:
            return loaded
        self._loading, self._has_failed = choose_standby_spans(spans, unused), False
        if self._loading:
            self._thread = threading.Thread(
                target=self._load, args=(self._loading,), name="standby spans", daemon=True
            )
            self._thread.start()
        return []

    def _load(self, hops: Sequence[RouteWorker]) -> None:
        try:
            prepare_spans(self._anchor, hops, self._is_stopping)
        except RouteFailure as failure:
            self._has_failed, self._retry_s = True, time.monotonic() + RETRY_S
            log.warning("span workers that stand by cannot load a span yet: %s", failure)
