"""Every order of what workers, client and conductor may do: each state is right, and each leads to the request's end.

`interleaving_store` mirrors the scripts, `interleaving_moves` says what can happen next, around the real `step`;
`interleaving_search` tries all orders. Seeded mistakes show that it can fail.
"""

from dataclasses import replace

import pytest

from fleet.conductor.state import ConductorState
from fleet.conductor.step import Decision, step
from fleet.core import events as ev
from fleet.core.ids import WorkerId
from fleet.graphs import GRAPHS
from tests.fundamentals.interleaving_moves import Budget, Fleet, Worker, World
from tests.fundamentals.interleaving_search import Broken, Search
from tests.fundamentals.interleaving_store import CONSUMER, PAIR, PRODUCER, Answer, Scripts, Store, Task

TWO_PRODUCERS, TWO_CONSUMERS = "ABc", "Acd"


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAPHS, PAIR.name, PAIR)


def explored(fleet: Fleet) -> Search:
    search = Search(fleet)
    search.run()
    return search


@pytest.mark.parametrize(
    ("places", "frail", "budget"),
    [
        pytest.param(TWO_PRODUCERS, PRODUCER, Budget(deaths=1, crashes=1), id="a producer and the conductor die"),
        pytest.param(TWO_PRODUCERS, PRODUCER, Budget(freezes=1, failures=1), id="a producer freezes, a task fails"),
        pytest.param(TWO_PRODUCERS, PRODUCER, Budget(retold=1, crashes=1, hasty=1), id="events told again, a hasty grant"),
        pytest.param(TWO_CONSUMERS, CONSUMER, Budget(deaths=1, crashes=1), id="a consumer and the conductor die"),
        pytest.param(TWO_CONSUMERS, CONSUMER, Budget(freezes=1, retold=1, hasty=1), id="a consumer freezes"),
    ],
)
def test_every_order_is_right_and_leads_to_the_end(places: str, frail: int, budget: Budget) -> None:
    search = explored(Fleet(places, budget, frail=(frail,)))
    print(f"\n{places} {budget}: {len(search.worlds)} states, {search.num_moves} moves")
    assert any(world.store.end == "finished" for world in search.worlds)
