"""Spans that a span worker has loaded: the one in use, and a second one for a later route."""

import queue
import threading
from typing import Any, cast

from fleet.core.errors import ConfigError, FleetError
from fleet.spans.host.loaded import LoadedSpans
from fleet.spans.protocol.layers import LayerSpan
from fleet.stages.base import BuiltSpan

WAIT_S = 10.0


class Loader:
    """Loader double that counts loads; a load waits until `may_load` is set."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.spans = LoadedSpans(self._load)
        self.prepared: queue.SimpleQueue[FleetError | None] = queue.SimpleQueue()

    def _load(self, span: LayerSpan) -> BuiltSpan:
        assert self.may_load.wait(WAIT_S)
        self.loads.append(str(span))
        if span.first == 9:
            raise ConfigError("no such layer")
        return BuiltSpan(layers=cast(Any, None), num_bytes=10 + span.first)

    def prepare(self, span: str, *, beside_used: bool) -> FleetError | None:
        self.spans.prepare(span, self.prepared.put, beside_used=beside_used)
        return self.prepared.get(timeout=WAIT_S)


def test_prepared_span_is_used_without_loading_it_again() -> None:
    loader = Loader()
    loader.spans.use("0:1")
    assert loader.prepare("2:3", beside_used=True) is None
    assert (loader.spans.loaded, loader.spans.num_bytes) == ("0:1", 10 + 12)
    loader.spans.use("2:3")
    assert (loader.spans.loaded, loader.spans.num_bytes, loader.loads) == (
        "2:3",
        12,
        ["0:1", "2:3"],
    )
    assert not loader.spans.has("0:1")


def test_span_that_no_route_needs_is_dropped_for_one_to_stand_by_with() -> None:
    loader = Loader()
    assert loader.spans.loaded == ""
    loader.spans.use("0:1")
    loader.prepare("2:3", beside_used=False)
    assert (loader.spans.loaded, loader.spans.num_bytes) == ("2:3", 12)


def test_span_that_cannot_be_loaded_leaves_the_one_in_use() -> None:
    loader = Loader()
    loader.spans.use("0:1")
    failure = loader.prepare("9:9", beside_used=True)
    assert failure is not None and failure.message == "no such layer"
    assert loader.spans.loaded == "0:1"


def test_use_of_a_span_waits_until_it_is_prepared() -> None:
    loader = Loader()
    loader.may_load.clear()
    loader.spans.prepare("2:3", loader.prepared.put, beside_used=True)
    used = threading.Thread(target=loader.spans.use, args=("2:3",))
    used.start()
    assert loader.spans.num_bytes == 0, "readable while a span is loaded"
    loader.may_load.set()
    used.join(WAIT_S)
    assert loader.loads == ["2:3"] and loader.spans.loaded == "2:3"
