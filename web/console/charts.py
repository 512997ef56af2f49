"""Small charts as SVG paths: numbers in, coordinates out. Knows no page and no colour."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 300, 60
"""The coordinates of a chart; it is stretched to whatever place it has."""
_PAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One line of a chart: `path` is an SVG path with a gap wherever nothing was measured. `kind` chooses its stroke."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`now` is the last value measured, at `at_us`; `note` says what the upper edge is. All are already words, with units."""

    key: str
    title: str
    now: str
    at_us: int
    note: str
    words: str
    lines: tuple[ChartLine, ...]

    @property
    def empty(self) -> bool:
        return not any(line.path for line in self.lines)


def draw_path(values: Sequence[float | None], top: float) -> str:
    """A line from left to right; None leaves a gap, a lone point is a dot's width long."""
    step = WIDTH / max(len(values) - 1, 1)
    pieces: list[str] = []
    drawing = False
    for number, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = number * step, HEIGHT - _PAD - (HEIGHT - 2 * _PAD) * min(value / top, 1.0) if top > 0 else HEIGHT - _PAD
        pieces.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        alone = not drawing and (number + 1 == len(values) or values[number + 1] is None)
        if alone:
            pieces.append("h2")
        drawing = True
    return "".join(pieces)


def find_top(*series: Sequence[float | None]) -> float:
    """A round number not below any value, 0 where there is none."""
    highest = max((value for values in series for value in values if value is not None), default=0.0)
    if highest <= 0:
        return 0.0
    scale = 1.0
    while scale * 10 <= highest:
        scale *= 10
    while scale > highest:
        scale /= 10
    return next(scale * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if scale * factor >= highest * (1 - 1e-9))


def find_last(values: Sequence[float | None], at_us: Sequence[int]) -> tuple[float | None, int]:
    """The latest value that was measured, and when; (None, 0) where none was."""
    for value, at in zip(reversed(values), reversed(at_us), strict=True):
        if value is not None:
            return value, at
    return None, 0
