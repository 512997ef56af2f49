"""Small charts as SVG paths. Knows no page and no colour."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 300, 60
"""Size of a chart in SVG units; the page scales it."""
_PAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A line of a chart. `path` is an SVG path with gaps where nothing was measured. `kind` selects
    the stroke.
    """

    kind: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A small line chart. `now` is the last measured value with its unit; `note` is the value at
    the upper edge with its unit.
    """

    key: str
    title: str
    now: str
    note: str
    description: str
    lines: tuple[ChartLine, ...]


def draw_path(values: Sequence[float | None], top: float) -> str:
    """Return the SVG path of a line with `values` from left to right, where `top` is the value at
    the upper edge. A missing value leaves a gap; a single value becomes a dot.
    """
    step = WIDTH / max(len(values) - 1, 1)
    pieces: list[str] = []
    drawing = False
    for number, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = (
            number * step,
            HEIGHT - _PAD - (HEIGHT - 2 * _PAD) * min(value / top, 1.0)
            if top > 0
            else HEIGHT - _PAD,
        )
        pieces.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        alone = not drawing and (number + 1 == len(values) or values[number + 1] is None)
        if alone:
            pieces.append("h2")
        drawing = True
    return "".join(pieces)


def find_top(*series: Sequence[float | None]) -> float:
    """Return a round number that no value of the series exceeds, for a chart's upper edge; 0
    without values.
    """
    highest = max(
        (value for values in series for value in values if value is not None), default=0.0
    )
    if highest <= 0:
        return 0.0
    scale = 1.0
    while scale * 10 <= highest:
        scale *= 10
    while scale > highest:
        scale /= 10
    return next(
        scale * factor
        for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
        if scale * factor >= highest * (1 - 1e-9)
    )


def find_last(values: Sequence[float | None], at_us: Sequence[int]) -> tuple[float | None, int]:
    """Return the last measured value of a series and its time; (None, 0) without a measured
    value.
    """
    for value, at in zip(reversed(values), reversed(at_us), strict=True):
        if value is not None:
            return value, at
    return None, 0
