"""In every order of two gateways' calls and of lost Redis writes, the gateway that the client reads
delivers the answer.

A holder's epoch above the one in Redis proves that Redis lost writes, so that holder has the better
right. Seeded mutations show that the check can fail, and random calls show that the model replies
as the scripts do.
"""

import random

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import text
from fleet.core.ids import CLIENT, Epoch, WorkerId
from tests.control.interleaving_explore import Broken
from tests.control.interleaving_gateways import (
    Answer,
    GatewayMoves,
    GatewaySearch,
    ReaderBudget,
    ReaderScripts,
    ReaderStore,
)
from tests.control_plane import (
    GATEWAY,
    OTHER_GATEWAY,
    REQUEST,
    Control,
    acknowledgement,
)


def explore(budget: ReaderBudget, scripts: ReaderScripts | None = None) -> GatewaySearch:
    gateways = GatewayMoves(budget, scripts)
    search = GatewaySearch(gateways=gateways)
    search.run(gateways.start)
    return search


BUDGETS = [
    pytest.param(ReaderBudget(losses=2), id="Redis loses writes twice"),
    pytest.param(ReaderBudget(losses=1, stray_aborts=1), id="and the older connection is aborted"),
    pytest.param(ReaderBudget(losses=1, deaths=1), id="and the first gateway dies"),
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_resumed_answer_is_delivered_in_every_interleaving(budget: ReaderBudget) -> None:
    search = explore(budget)
    assert {world.store.end for world in search.worlds} == {"", "finished", "aborted"}
    assert any(second.phase == "acked" for world in search.worlds for second in world.readers[1:])


class RefusesLostEpochs(ReaderScripts):
    """Mutation: an epoch that Redis lost is refused as if it belonged to another reader."""

    def is_refused(self, held: int, epoch: int) -> bool:
        return held != epoch


class AttachesAnyEpoch(ReaderScripts):
    """Mutation: attach accepts any epoch, so that the former reader may take the answer back from
    the newer one.
    """

    def is_refused(self, held: int, epoch: int) -> bool:
        return False


class AbortsUnread(ReaderScripts):
    """Mutation: a gateway aborts an answer that it does not read, by the API's right, instead of
    giving the answer up.
    """

    def give_up(self, store: ReaderStore, clock: int, gateway: str) -> Answer:
        return self.abort(store, clock, store.epoch)


class AbortsAtAnyEpoch(ReaderScripts):
    def abort(self, store: ReaderStore, clock: int, right: int) -> Answer:
        return super().abort(store, clock, max(right, store.epoch))


@pytest.mark.parametrize(
    ("scripts", "message"),
    [
        (RefusesLostEpochs, "gave up the answer"),
        (AttachesAnyEpoch, "gave up the answer"),
        (AbortsUnread, "was aborted, but the client reads it"),
        (AbortsAtAnyEpoch, "was aborted, but the client reads it"),
    ],
)
def test_mutated_rule_of_readers_is_detected(scripts: type[ReaderScripts], message: str) -> None:
    with pytest.raises(Broken, match=message):
        explore(ReaderBudget(losses=1, stray_aborts=1), scripts())


NAMES = {"A": GATEWAY, "B": OTHER_GATEWAY}
NUM_WALKS, NUM_CALLS = 12, 40


class ReaderTwins:
    """The same answer in Redis and in the model. `epochs`: epoch in Redis by epoch of the model."""

    def __init__(self, client: redis.Redis, rng: random.Random, mirror: ReaderScripts) -> None:
        client.flushdb()
        self.rng = rng
        self.mirror = mirror
        self.store = ReaderStore()
        self.clock = 1
        self.control = Control(client).begin()
        self.control.register(NAMES["B"], "")
        self.producing = self.control.own()
        self.epochs = {1: self.control.epoch(CLIENT)}
        self.saved = (self.store, self.dump())

    def dump(self) -> dict[bytes, bytes]:
        client = self.control.client
        return {key: client.dump(key) for key in client.scan_iter("*")}  # type: ignore[misc]

    def call_both(self, answer: Answer, call: scripts.Call) -> None:
        self.store, self.clock, mirrored = answer
        assert self.control.run(call) == mirrored, call
        self.compare(call)

    def compare(self, after: object) -> None:
        client, task = self.control.client, self.control.task(CLIENT)
        self.epochs[self.store.epoch] = Epoch(int(task["epoch"]))
        in_order = [self.epochs[number] for number in sorted(self.epochs)]
        assert in_order == sorted(in_order), after
        seen = ReaderStore(
            state=task["state"],
            epoch=self.store.epoch,
            owner={gateway: name for name, gateway in NAMES.items()}.get(
                WorkerId(task["owner"]), ""
            ),
            finished=self.control.task()["state"] == "finished" and self.store.finished,
            end=""
            if client.sismember(keys.LIVE, REQUEST)
            else text(client.hget(keys.request(REQUEST), "state")),
            moved=frozenset((name, epoch) for name in NAMES for epoch in self.moved(name)),
        )
        assert seen == self.store, after

    def moved(self, name: str) -> list[int]:
        """Return the epochs (as the model numbers them) in the notices that a gateway has received
        of its answer moving elsewhere.
        """
        numbers = {real: epoch for epoch, real in self.epochs.items()}
        notices = [notice for notice in self.control.inbox(NAMES[name]) if notice[b"k"] == b"m"]
        return [numbers[Epoch(int(notice[b"e"]))] for notice in notices]

    def random_call(self) -> None:
        name, epoch = self.rng.choice("AB"), self.rng.choice([self.store.epoch, *self.epochs])
        at, gateway, now = self.epochs[epoch], NAMES[name], (self.store, self.clock)
        kind = self.rng.choice(
            ("attach", "attach", "reattach", "detach", "ack", "lose", "save", "finish", "abort")
        )
        if kind == "attach":
            self.call_both(self.mirror.attach(*now, name, None), scripts.attach(REQUEST, gateway))
        elif kind == "reattach":
            self.call_both(
                self.mirror.attach(*now, name, epoch), scripts.attach(REQUEST, gateway, held=at)
            )
        elif kind == "detach":
            self.call_both(
                self.mirror.detach(*now, name, epoch), scripts.detach(REQUEST, gateway, at)
            )
        elif kind == "ack":
            self.call_both(self.mirror.acks(*now, epoch), acknowledgement(at, delivered=True))
        elif kind == "abort" and self.rng.random() < 0.3:
            self.call_both(self.mirror.abort(*now, epoch), scripts.abort(REQUEST, at, "stop"))
        elif kind == "save":
            self.saved = (self.store, self.dump())
        else:
            self.write_without_reply(kind)

    def write_without_reply(self, kind: str) -> None:
        if kind == "lose":
            self.store, keys_then = self.saved
            self.control.client.flushdb()
            for key, value in keys_then.items():
                self.control.client.restore(key, 0, value)
        elif kind == "finish" and not self.store.finished and not self.store.end:
            self.store, self.clock = self.mirror.finish(self.store, self.clock)
            assert self.control.append(self.producing, finish=True) == "ok"
        self.compare(kind)


def run_walks(client: redis.Redis, mirror: ReaderScripts) -> set[str]:
    """Make the same random calls on Redis and on the model; return the ends and states that
    occurred.
    """
    seen: set[str] = set()
    for seed in range(NUM_WALKS):
        twins = ReaderTwins(client, random.Random(seed), mirror)
        for _ in range(NUM_CALLS):
            twins.random_call()
            seen |= {twins.store.end, twins.store.state}
    return seen


def test_model_of_readers_answers_as_the_scripts(client: redis.Redis) -> None:
    assert run_walks(client, ReaderScripts()) == {"", "finished", "aborted", "running", "lost"}


@pytest.mark.parametrize("mirror", [RefusesLostEpochs(), AttachesAnyEpoch(), AbortsAtAnyEpoch()])
def test_differing_model_of_readers_is_detected(client: redis.Redis, mirror: ReaderScripts) -> None:
    with pytest.raises(AssertionError):
        run_walks(client, mirror)
