"""The page of actions: who ordered what of workers and answers, by the journal. Knows no script."""

from dataclasses import dataclass

from fleet.telemetry.journal import JournalEntry
from web.console.page_context import FilteredContext, FilterLink, LivePage, Query, build_path

MAX_READ, MAX_ROWS = 1000, 200
NO_KEY = "-"
"""Value of the filter for orders without a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersContext(FilteredContext):
    """Data of the page. `orders`: newest first; `num_more` older orders are left out. `names`: API
    keys that ordered something, each as a link that filters by the key.
    """

    orders: tuple[JournalEntry, ...] = ()
    num_more: int = 0
    names: tuple[FilterLink, ...] = ()


class OrdersPage(LivePage):
    key = active = "orders"
    title = "Actions"
    path = "/orders"
    live = ("trouble", "names", "orders")
    context = OrdersContext

    def empty(self, query: Query) -> OrdersContext:
        return OrdersContext(wanted={"by": query.get("by", "").strip()})

    async def read(self, query: Query) -> OrdersContext:
        by = query.get("by", "").strip()
        found = await self._gateway.client.telemetry.journal(what=("ordered",), limit=MAX_READ)
        names = [entry.by or NO_KEY for entry in found]
        shown = [entry for entry, name in zip(found, names, strict=True) if by in ("", name)]
        links = [
            FilterLink(
                name=name,
                count=names.count(name) if name else len(names),
                path=build_path(self.path, {"by": name}),
                chosen=name == by,
            )
            for name in ("", *sorted(set(names)))
        ]
        return OrdersContext(
            stream_query={"by": by},
            wanted={"by": by},
            orders=tuple(shown[: -MAX_ROWS - 1 : -1]),
            num_more=len(shown[:-MAX_ROWS]),
            names=tuple(links),
        )
