"""Pictures of reports: figures made of panels, written as PNG. Draws panels without knowing what
their numbers mean.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DPI = 130

Axes = Any
"""Stands for `matplotlib.axes.Axes`, whose type annotations are incomplete."""
Panel = Callable[[Axes], None]


@contextmanager
def saved_figure(
    path: Path,
    rows: int,
    columns: int,
    size_inches: tuple[float, float],
    *,
    dpi: int = DPI,
    **layout: Any,
) -> Iterator[tuple[Any, list[Axes]]]:
    """Yield a new figure and its axes, row by row; write the figure to `path` at the end of the
    block.
    """
    import matplotlib

    # No window: there may be no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size_inches, squeeze=False, layout="constrained", **layout
    )
    try:
        yield figure, list(axes.flat)
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot.close(figure)


def draw_panels(
    panels: Sequence[Panel], path: Path, title: str, panel_inches: tuple[float, float]
) -> None:
    """Draw panels in two columns and write the picture to `path`. With no panels no file is
    written.
    """
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with saved_figure(path, rows, columns, (panel_inches[0] * columns, panel_inches[1] * rows)) as (
        figure,
        axes,
    ):
        for panel, place in zip(panels, axes, strict=False):
            panel(place)
        for place in axes[len(panels) :]:
            place.set_axis_off()
        figure.suptitle(title, fontsize=9)


def finish_bars(axes: Axes) -> None:
    """Draw a light horizontal grid behind a bar chart."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.25)
