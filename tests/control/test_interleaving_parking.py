"""Parked tasks in every order of moves of workers, keepers, client and conductor, on a real Redis:
a parked task holds no slot, continues with its credit and not before, and its former owner may
write no more.

One request has two stages, three edges of two chunks each, and credit for one chunk. Two processes
with one fault are 240 to 1,040 states and 420 to 2,640 moves; `--thorough` adds a second process of
a stage, a second fault, or a second source: up to 5,900 states and 24,300 moves.
"""

import pytest
import redis

from tests.control.interleaving_actors import Faults
from tests.control.interleaving_explore import Broken
from tests.control.interleaving_parking import ParkingFleet, ParkingSearch
from tests.control.interleaving_redis import Mutation

PAIR, TWO_SOURCES = "A:think C:talk", "A:think B:see C:talk"
pytestmark = pytest.mark.usefixtures("no_collection")


def explore(fleet: ParkingFleet, mutation: Mutation | None = None) -> ParkingSearch:
    search = ParkingSearch(fleet=fleet)
    search.run(fleet.begin(mutation))
    return search


def parked(search: ParkingSearch) -> set[str]:
    """Return the tasks that are parked in some state."""
    return {
        pair
        for world in search.worlds
        for pair, task in world.view.tasks.items()
        if task["state"] == "parked"
    }


@pytest.mark.one_in(3, "interleavings of parked tasks")
@pytest.mark.parametrize(
    ("faulty", "faults"),
    [
        pytest.param("A", Faults(deaths=1), id="the thinker dies"),
        pytest.param("C", Faults(deaths=1), id="the talker dies"),
        pytest.param("A", Faults(pauses=1), id="the thinker is paused"),
        pytest.param("C", Faults(pauses=1), id="the talker is paused"),
        pytest.param("", Faults(aborts=1), id="the client aborts"),
        pytest.param("", Faults(losses=1), id="tensors are lost"),
    ],
)
def test_parked_task_continues_in_every_interleaving(
    client: redis.Redis, faulty: str, faults: Faults
) -> None:
    search = explore(ParkingFleet(client, PAIR, faults, faulty=faulty))
    assert parked(search) == {"r0|think", "r0|talk"}


def test_task_that_waits_for_credit_is_not_granted_with_a_task_that_starved_it_before(
    client: redis.Redis,
) -> None:
    """The talker waits for input from two parked tasks, continues with the first, and waits for
    credit when the second continues.
    """
    search = ParkingSearch(fleet=ParkingFleet(client, TWO_SOURCES, Faults()))
    moves = (
        "think.*reads, think.*claims, think.*appends, think.*parks, "
        "see.*reads, see.*claims, see.*appends, see.*parks, "
        "talk.*reads, talk.*claims, reads thoughts, reads views, without input, "
        "client reads words, talk.*reads, talk.*claims, reads thoughts, talk.*appends, "
        r"parks r0\|talk for, client reads captions"
    )
    world = search.follow(moves)
    assert world.view.tasks["r0|talk"]["state"] == "parked"
    assert world.view.tasks["r0|see"]["state"] == "granted"
    with pytest.raises(Broken, match="r0.talk is granted as .* but it waits for"):
        search.follow(moves, Mutation(r"== 'parked' and not \S+ then", "== 'parked' then"))


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "faults"),
    [
        pytest.param("A:think B:think C:talk", Faults(deaths=1), id="any of two thinkers dies"),
        pytest.param("A:think C:talk D:talk", Faults(pauses=1), id="any of two talkers pauses"),
        pytest.param(PAIR, Faults(losses=1, deaths=1), id="tensors and a death"),
        pytest.param(TWO_SOURCES, Faults(), id="two sources of a stage"),
    ],
)
def test_parked_tasks_of_larger_fleets_continue(
    client: redis.Redis, processes: str, faults: Faults
) -> None:
    explore(ParkingFleet(client, processes, faults))


MUTATIONS = {
    "park compares no epoch": (
        Mutation(r"if (\w+) then return \{\1\} end", "", ["park"]),
        "former owner",
    ),
    "park keeps the slot": (
        Mutation(
            r"(?<!function )remove_owner\((\w+),[^)]*\)", r"call('HGET', \1, 'owner')", ["park"]
        ),
        "is parked, and fills a slot",
    ),
    "park misses credit that has arrived": (
        Mutation(r"if not \w+ then return \w+ end", "", ["park"]),
        "is parked, and has the credit for which it waits",
    ),
    "parking counts as a death": (
        Mutation(
            r"\n\w+\((\w+), \w+, \w+, 'parked'(?=[,)])",
            r"\ncall('HINCRBY', \1, 'deaths', 1)\g<0>",
            ["park"],
        ),
        "a death is counted against r0|think as",
    ),
    "credit grants nothing": (
        Mutation(r"(?<!function )unpark_if_due\(\w+, \w+\)", "send_news()", ["ack"]),
        "is parked, and has the credit for which it waits",
    ),
    "any acknowledgement grants": (
        Mutation(r"if tonumber\(consumed_of\([^)]*\)\) < tonumber\(\w+\) then return end", ""),
        "but it waits for",
    ),
    "a starved task is forgotten": (
        Mutation(r"== 'parked' and not (\S+) then(\s+)unpark\(", r"== 'lost' then\2unpark("),
        "is parked without input, and no other task would grant it",
    ),
    "a parked task's former owner appends": (
        Mutation(
            r"elseif \S+ ~= 'running' then(\s+)answer = 'stale'", r"elseif false then\1answer = ''"
        ),
        "former owner",
    ),
}


@pytest.mark.one_in(2, "mutated rules of parking")
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_rule_of_parking_is_detected(client: redis.Redis, name: str) -> None:
    mutation, message = MUTATIONS[name]
    with pytest.raises(Broken, match=message.replace("|", r"\|")):
        explore(ParkingFleet(client, PAIR, Faults(losses=1)), mutation)
