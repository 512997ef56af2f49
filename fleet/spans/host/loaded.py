"""The loaded spans of a span worker: the span in use, and at most one loaded beside it.
Thread-safe.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from fleet.core.errors import FleetError, failure_of
from fleet.engine.torch.pass_queue import FAILURES
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltSpan

log = logging.getLogger(__name__)

WhenPrepared = Callable[[FleetError | None], None]
"""Callback of `LoadedSpans.prepare`, called once by any thread: with None if the span was loaded,
else with the error.
"""


class LoadedSpans:
    """The spans that a span worker's process has loaded, by notation. Outlives the worker's
    incarnations, so that weights are loaded once.
    """

    def __init__(self, load: Callable[[LayerSpan], BuiltSpan]) -> None:
        self._load = load
        self._lock = threading.Lock()
        """Held while a span is loaded, since `transformers` loads one model at a time."""
        self._built: Mapping[str, BuiltSpan] = {}
        """Loaded spans by notation. Replaced as a whole and never changed, since other threads read
        it.
        """
        self._used = ""

    @property
    def loaded(self) -> str:
        """Notation of the span last used, if it is still loaded, else of another loaded span; ""
        for none.
        """
        built, used = self._built, self._used
        return used if used in built else next(iter(built), "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all loaded spans."""
        return sum(built.num_bytes for built in self._built.values())

    def use(self, span: str) -> BuiltSpan:
        """Return a span for computation, loading it if necessary. All other spans are dropped
        first.

        Raises: errors of loading.
        """
        with self._lock:
            self._keep(span)
            self._used = ""
            built = self._load_if_missing(span)
            self._used = span
        return built

    def has(self, span: str) -> bool:
        return span in self._built

    def prepare(self, span: str, when_prepared: WhenPrepared, *, beside_used: bool) -> None:
        """Begin to load a span in a thread of its own, which then calls `when_prepared`. All other
        spans are dropped first, except the span in use if `beside_used` is True.
        """
        kept = (self._used, span) if beside_used else (span,)
        threading.Thread(
            target=self._prepare,
            args=(span, kept, when_prepared),
            name=f"loads {span}",
            daemon=True,
        ).start()

    def _prepare(self, span: str, kept: Sequence[str], when_prepared: WhenPrepared) -> None:
        failure: FleetError | None = None
        with self._lock:
            try:
                self._keep(*kept)
                self._load_if_missing(span)
            except (FleetError, *FAILURES) as error:
                failure = failure_of(f"span {span} cannot be loaded", error)
        when_prepared(failure)

    def _keep(self, *spans: str) -> None:
        self._built = {name: built for name, built in self._built.items() if name in spans}

    def _load_if_missing(self, span: str) -> BuiltSpan:
        if span not in self._built:
            log.info("loading layers %s", span)
            self._built = {**self._built, span: self._load(LayerSpan.parse(span, "span"))}
        return self._built[span]
