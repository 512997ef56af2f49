"""Lanes over time and what is drawn on them. Data only; knows no request and no SVG.

Units: `x` and `width` are thousandths of the axis, `*_us` microseconds since 1970.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from web.console import formats
from web.console.charts import find_top

SCALE = 1000
MIN_WIDTH = 2.0
"""Narrowest span that can be seen and pointed at."""
NUM_LABELS, LAST_LABEL = 5, 930
SPAN_HEIGHT, LANE_HEIGHT = 11.0, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan:
    """A period on a lane. `kind` selects its style: wait, first, output, stall, walk, hop, pull,
    kv, whole, speech, pause, word, dropout. `detail` is its description; `label` is drawn on it if
    it is wide enough. `height` is its thickness in units of the lane's height.
    """

    x: float
    width: float
    kind: str
    detail: str
    label: str = ""
    height: float = SPAN_HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePoint:
    """A moment on a lane. `kind` is tick (a chunk), lost, failed, aborted, handed_off or another
    trace event.
    """

    x: float
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShape:
    """A curve on a lane, as an SVG path. `kind` selects its style: heard, unheard, made, played."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A lane with its spans and points. `stage` is the stage whose colour the lane has, "" without
    a stage. `note` is text beside the lane, such as bytes or owners.
    """

    key: str
    label: str
    kind: str
    stage: str
    note: str
    spans: tuple[LaneSpan, ...] = ()
    points: tuple[LanePoint, ...] = ()
    shapes: tuple[LaneShape, ...] = ()
    height: int = LANE_HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """All lanes of a request. `labels` are times for the axis with their positions."""

    lanes: tuple[Lane, ...]
    labels: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """The time from `start_us` to `end_us`. `zero_us` is the submission of the request, from which
    times are counted.
    """

    start_us: int
    end_us: int
    zero_us: int

    def x(self, at_us: float) -> float:
        length = max(self.end_us - self.start_us, 1)
        return round(min(max((at_us - self.start_us) / length, 0.0), 1.0) * SCALE, 1)

    def span(self, begin_us: int, end_us: int, kind: str, detail: str) -> LaneSpan:
        x = self.x(begin_us)
        width = max(self.x(end_us) - x, MIN_WIDTH)
        return LaneSpan(x=min(x, SCALE - width), width=round(width, 1), kind=kind, detail=detail)

    def at(self, us: int) -> str:
        """Format a time relative to the submission of the request."""
        return f"at {formats.ms((us - self.zero_us) / 1000)}"

    def labels(self) -> Iterator[tuple[float, str]]:
        """Yield round times in one unit along the axis, with their positions. The last leaves space
        for its text.
        """
        total_ms = (self.end_us - self.start_us) / 1000
        step = find_top([total_ms / NUM_LABELS])
        for number in range(NUM_LABELS + 1):
            at = number * step
            x = self.x(self.zero_us + at * 1000)
            if x <= LAST_LABEL:
                text = f"{at / 1000:g} s" if total_ms >= 2000 else f"{at:g} ms"
                yield x, text if number else "0"
