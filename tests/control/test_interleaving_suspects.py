"""Suspects in every order of moves of workers, keepers and conductor, on a real Redis: the request
that kills workers is found among n after two deaths and at most log2(n) more (one more for each
that is observed late), and fails by an observed death while it ran alone; no other request does.

Up to two processes, four requests and two faults are 375 to 1,300 states and 570 to 2,300 moves;
`--thorough` adds two processes with four requests, or with a pause and a death: up to 7,300 states
and 12,700 moves.
"""

import pytest
import redis

from tests.control.interleaving_actors import Faults
from tests.control.interleaving_explore import Broken
from tests.control.interleaving_redis import Mutation
from tests.control.interleaving_suspects import SuspectFleet, SuspectSearch

ONE, TWO = "A:lm", "A:lm B:lm"
PAUSE_AND_DEATH = Faults(pauses=1, deaths=1)
pytestmark = pytest.mark.usefixtures("no_collection")


def explore(fleet: SuspectFleet, mutation: Mutation | None = None) -> SuspectSearch:
    search = SuspectSearch(fleet=fleet)
    search.run(fleet.begin(mutation))
    print("at most", max(world.actors.kills for world in search.worlds), "kills")
    return search


@pytest.mark.one_in(3, "interleavings of suspects")
@pytest.mark.parametrize(
    ("processes", "num_requests", "faults"),
    [
        pytest.param(ONE, 4, Faults(), id="four requests"),
        pytest.param(TWO, 3, Faults(), id="three requests, two workers"),
        pytest.param(TWO, 2, Faults(progress=1), id="the other request progresses"),
        pytest.param(TWO, 2, Faults(lapses=1), id="an end is observed late"),
        pytest.param(ONE, 3, Faults(pauses=1), id="a worker is paused and wakes"),
        pytest.param(ONE, 2, PAUSE_AND_DEATH, id="and a worker dies"),
    ],
)
def test_request_that_kills_workers_is_found_in_every_interleaving(
    client: redis.Redis, processes: str, num_requests: int, faults: Faults
) -> None:
    search = explore(SuspectFleet(client, processes, faults, num_requests=num_requests))
    failed = {
        tuple(
            request
            for request, (state, _) in sorted(world.view.requests.items())
            if state == "failed"
        )
        for world in search.worlds
        if search.has_ended(world)
    }
    assert failed == {("r0",)} or (faults.deaths and ("r0",) in failed)


def test_process_that_wakes_takes_back_the_evidence_against_its_tasks(client: redis.Redis) -> None:
    """A worker is paused over a task that runs alone, wakes, and leaves. If its process dies before
    it joins again, that is no death over the task.
    """
    search = SuspectSearch(fleet=SuspectFleet(client, ONE, PAUSE_AND_DEATH, num_requests=2))
    killed = "reads, claims, kills, observed, joins"
    moves = f"{killed}, {killed}, reads, claims, claims suspects, lapses, wakes, dies, observed"
    world = search.follow(moves)
    assert world.view.tasks["r0|lm"]["deaths"] == "2"
    assert world.view.requests["r0"][0] == "running"
    mutation, _, message = MUTATIONS["evidence is not taken back"]
    with pytest.raises(Broken, match=message):
        search.follow(moves, mutation)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("processes", "num_requests", "faults"),
    [
        pytest.param(TWO, 4, Faults(), id="four requests, two workers"),
        pytest.param(TWO, 2, PAUSE_AND_DEATH, id="a pause and a death"),
        pytest.param(ONE, 3, Faults(lapses=1, progress=1), id="a late end, and progress"),
    ],
)
def test_killer_is_found_in_larger_fleets(
    client: redis.Redis, processes: str, num_requests: int, faults: Faults
) -> None:
    explore(SuspectFleet(client, processes, faults, num_requests=num_requests))


MUTATIONS = {
    "halves do not shrink": (
        Mutation(r"math\.ceil\((#\w+) / 2\)", r"\1"),
        Faults(),
        "the killer has killed 5 processes, and 4 are enough",
    ),
    "suspects run beside others": (
        Mutation(r"(grant_task\([^()]*call\('HGET', \w+, 'role'\)), group\)", r"\1, '')"),
        Faults(),
        "the killer has killed 5 processes, and 4 are enough",
    ),
    "a death beside others condemns": (
        Mutation(r"if \w+ and (\w+) > MAX_DEATHS then", r"if \1 > MAX_DEATHS then"),
        Faults(),
        "is condemned by the death of a process that ran",
    ),
    "a half leaves its grants in the queue": (
        Mutation(r"if not (\S+) then delete_entry\(\w+\) end", "", ["reserve"]),
        Faults(),
        "is granted and reserved for .* and 1 entries grant it",
    ),
    "a lapsed lease counts as a death": (
        Mutation(r"\((\w+) == 'died' or \1 == 'failed'\)", r"(\1 ~= 'left')"),
        Faults(pauses=1),
        "a death is counted against",
    ),
    "evidence is not taken back": (
        Mutation(r"if not (\w+) and (\w+) == 'left' then", "if false then", ["fence_worker"]),
        PAUSE_AND_DEATH,
        r"is condemned by the death of a process that ran \(\)",
    ),
}


@pytest.mark.one_in(2, "mutated rules of suspects")
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_rule_of_suspects_is_detected(client: redis.Redis, name: str) -> None:
    mutation, faults, message = MUTATIONS[name]
    fleet = SuspectFleet(client, ONE, faults, num_requests=2 if faults.deaths else 3)
    fleet.reads = 1 if "queue" in name else 99
    with pytest.raises(Broken, match=message):
        explore(fleet, mutation)
