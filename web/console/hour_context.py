"""What a page needs to show a time on one axis: marks, lives of processes, and charts. Shared by
the pages that do so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fleet.telemetry.journal import JournalEntry
from fleet.telemetry.views import WorkerView
from web.console.hour import HourWindow, LifeRow, MarkRow, answers_between, life_rows, mark_rows
from web.console.hour_charts import HourChart, HourCharts
from web.console.page_context import PageContext


class _Recent(msgspec.Struct, frozen=True, kw_only=True):
    """What the browser needs at each change to draw the charts. `from_s`, `to_s`: the window in
    seconds since 1970. `newest`: numbers of the newest steps.
    """

    from_s: int
    to_s: int
    newest: object
    charts: tuple[HourChart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HourBand:
    """A time on one axis. `recent` is the JSON of the last minute's numbers with what the charts
    need to draw them; `drawn` has the numbers of the whole time.
    """

    window: HourWindow
    marks: tuple[MarkRow, ...]
    lives: tuple[LifeRow, ...]
    charts: tuple[HourChart, ...]
    drawn: HourCharts
    recent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandContext(PageContext):
    """Data of a page with a time on one axis; `band` is None while it is not known."""

    band: HourBand | None = None

    @property
    def recent(self) -> str:
        return self.band.recent if self.band is not None else "{}"

    @property
    def whole(self) -> str:
        """The JSON of the numbers of the whole time, "{}" without a band. Only a whole page
        contains this; updates contain `recent`.
        """
        return _island(self.band.drawn.whole()) if self.band is not None else "{}"

    @property
    def answers_path(self) -> str:
        """The path of the list of answers of this time."""
        window = self.band.window if self.band is not None else HourWindow(to_us=0)
        return answers_between(window.from_us, window.to_us)


def draw_band(
    window: HourWindow,
    drawn: HourCharts,
    entries: Sequence[JournalEntry],
    workers: Sequence[WorkerView],
) -> HourBand:
    """Draw a time on one axis. `drawn`: the charts of its time series; a past time whose series is
    empty has no charts. `entries`: the journal, oldest first.
    """
    charts = drawn.charts() if drawn.series or not drawn.is_past else ()
    recent = _Recent(
        from_s=window.from_us // 1_000_000,
        to_s=window.to_us // 1_000_000,
        newest=drawn.recent(),
        charts=charts,
    )
    return HourBand(
        window=window,
        marks=mark_rows(entries, window),
        lives=life_rows(workers, entries, window, drawn.stages),
        charts=charts,
        drawn=drawn,
        recent=_island(recent),
    )


def _island(data: msgspec.Struct) -> str:
    """Return the JSON of `data` as the content of a script element, which no text in it can end."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
