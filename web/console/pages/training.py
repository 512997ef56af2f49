"""The Training page: the trainer, its loss, its hidden-state samples, and the versions of the draft
head.
"""

from dataclasses import dataclass

from fleet.drafts.figures.training import DraftVersion, TrainingState
from fleet.telemetry.views import WorkerView
from web.console.charts import Chart, ChartLine, draw_path, find_top
from web.console.page_context import LivePage, PageContext, Query

MAX_ROWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext(PageContext):
    """Data of the Training page. `versions` are the newest versions of the draft head. `workers`
    are workers that use a drafter; `num_more` further workers are left out. `charts` shows the
    loss, and is empty without a loss.
    """

    state: TrainingState | None = None
    versions: tuple[DraftVersion, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    num_more: int = 0
    charts: tuple[Chart, ...] = ()


class TrainingPage(LivePage):
    key = active = "training"
    path = "/training"
    live = ("trouble", "trainer", "charts", "versions", "workers")
    context = TrainingContext

    async def read(self, query: Query) -> TrainingContext:
        state = await self._gateway.client.training.state()
        workers = await self._gateway.client.telemetry.workers()
        drafting = tuple(view for view in workers if view.speculation is not None and not view.gone)
        return TrainingContext(
            state=state,
            versions=state.versions[:MAX_ROWS],
            workers=drafting[:MAX_ROWS],
            num_more=max(0, len(drafting) - MAX_ROWS),
            charts=_charts(state),
        )


def _charts(state: TrainingState) -> tuple[Chart, ...]:
    """Return the chart of the loss in the trainer's last windows; empty without a loss."""
    losses = state.figures.losses if state.figures is not None else ()
    if not losses:
        return ()
    top = find_top(losses)
    chart = Chart(
        key="loss",
        title=f"loss of the last {len(losses)} windows",
        now=f"{losses[-1]:.2f}",
        note=f"{top:g}",
        description=f"loss of the last {len(losses)} windows, now {losses[-1]:.2f}",
        lines=(ChartLine(kind="p50", path=draw_path(losses, top)),),
    )
    return (chart,)
