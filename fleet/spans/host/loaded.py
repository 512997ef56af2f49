"""The spans that a span worker has loaded: the one that it computes, and at most one that it loads
beside it. Thread-safe.
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
"""Called once, by any thread: with None when a span is loaded, or with why it cannot be."""


class LoadedSpans:
    """Outlives the incarnations of its worker."""

    def __init__(self, load: Callable[[LayerSpan], BuiltSpan]) -> None:
        self._load = load
        self._lock = threading.Lock()
        """Held while a span is loaded: `transformers` loads one at a time."""
        self._built: Mapping[str, BuiltSpan] = {}
        """Replaced, and never changed: other threads read it."""
        self._used = ""

    @property
    def loaded(self) -> str:
        """Notation of the span that is computed, or was last, if it is still loaded, else of
        another loaded one; "" for none.
        """
        built, used = self._built, self._used
        return used if used in built else next(iter(built), "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all loaded spans."""
        return sum(built.num_bytes for built in self._built.values())

    def use(self, span: str) -> BuiltSpan:
        """Return a span, loaded if it is not yet; all others are dropped, before one is loaded.

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
        """Load a span by a thread of its own, beside the one that is used, if that is still needed;
        others are dropped before.
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
