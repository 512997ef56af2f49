"""The model of the scripts in the interleaving check replies as the scripts do: random calls run on
both, and their states are compared after every call.
"""

import random
from collections.abc import Callable
from typing import cast

import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import first_text, run, text
from fleet.core import events as ev
from fleet.core.chunk import Chunk, TensorRef, decode_location
from fleet.core.ids import CLIENT, Epoch, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec
from tests.control.interleaving_store import (
    CONSUMER,
    MAX_DEATHS,
    PAIR,
    PRODUCER,
    STAGES,
    Answer,
    MirrorTask,
    R,
    Scripts,
    Store,
    submitted,
)
from tests.control_plane import appended, place
from tests.support import stream_entries

GATEWAY, CONDUCTOR = WorkerId("gateway"), WorkerId("conductor")
WORKERS = (("A0", PRODUCER), ("B0", PRODUCER), ("c0", CONSUMER))
EDGES = tuple(edge.name for edge in PAIR.edges)
CONSUMERS = (STAGES[CONSUMER], CLIENT)
INPUTS = ((), (EDGES[PRODUCER],))
SIZES, HOUR_US, NUM_WALKS, NUM_CALLS = (2, 2), 3_600_000_000, 16, 120


class Twins:
    """The same request in Redis and in the model. `epochs`: maps an epoch of the model to the epoch
    in Redis, for each stage.
    """

    def __init__(self, client: redis.Redis, rng: random.Random, mirror: Scripts) -> None:
        client.flushdb()
        self.client = client
        self.rng = rng
        self.mirror = mirror
        self.leader = text(run(client, scripts.lead(CONDUCTOR, "", 600_000)))
        for worker, role in (*((w, STAGES[stage]) for w, stage in WORKERS), (GATEWAY, "")):
            run(client, scripts.register(WorkerId(worker), role, HOUR_US, {"kind": "test"}))
        spec = RequestSpec(id=R, graph=PAIR.name, prompt_ids=(1,), outputs=(EDGES[CONSUMER],))
        run(
            client, scripts.submit(spec, None, bound=1, stages=STAGES, edges=EDGES, gateway=GATEWAY)
        )
        self.store = submitted(mirror, SIZES)._replace(listed=frozenset(w for w, _ in WORKERS))
        self.epochs = [{0: 0}, {0: 0}]
        self.compare("submit")

    def call_both(self, answer: Answer, call: scripts.Call) -> None:
        self.store, mirrored = answer
        replied = first_text(run(self.client, call))
        assert replied == mirrored, f"{call}: Redis replies {replied}, the mirror {mirrored}"
        self.compare(str(call))

    def compare(self, after: str) -> None:
        for stage, task in enumerate(self.store.tasks):
            raw = cast("dict[bytes, bytes]", self.client.hgetall(keys.task(R, STAGES[stage])))
            fields = {text(name): text(value) for name, value in raw.items()}
            self.epochs[stage][task.epoch] = int(fields["epoch"])
            middle = EDGES[PRODUCER] if stage == CONSUMER else ""
            seen = {
                "state": fields["state"],
                "owner": fields.get("owner", ""),
                "produced": int(fields.get(f"produced:{EDGES[stage]}", 0)),
                "consumed": int(fields.get(f"consumed:{middle}", 0)),
                "idle_consumed": int(fields.get(f"idle_consumed:{middle}", 0)),
                "deaths": int(fields.get("deaths", 0)),
                "produced_at_death": int(fields.get("produced_at_death", -1)),
                "alone": fields.get("alone", "") == "1",
                "log": self.client.xlen(keys.edge(R, EDGES[stage])),
            }
            expected = {name: getattr(task, name) for name in seen} | {"log": len(task.log)}
            assert seen == expected, after
            assert sorted(self.epochs[stage].values()) == [
                self.epochs[stage][m] for m in sorted(self.epochs[stage])
            ]
        self.compare_rest(after)

    def compare_rest(self, after: str) -> None:
        if not self.store.end:
            places = cast("dict[bytes, bytes]", self.client.hgetall(keys.loc(R, EDGES[PRODUCER])))
            refs = {int(index): decode_location(raw)["rows"] for index, raw in places.items()}
            at = {index: ref.agent for index, ref in refs.items() if isinstance(ref, TensorRef)}
            assert at == dict(enumerate(self.store.at)), after
            assert self.inboxes() == self.store.notices, after
        for stage, task in enumerate(self.store.tasks):
            offer = self.client.hmget(
                keys.kv(R, STAGES[stage]), ["state", "source", "confirmed_epoch"]
            )
            confirmed = (
                str(self.epochs[stage][task.confirmed_epoch]) if task.confirmed_epoch else ""
            )
            assert [text(field) for field in cast("list[bytes | None]", offer)] == [
                task.offer,
                task.source,
                confirmed,
            ], after
        assert self.evidence() == self.store.evidence, after

    def evidence(self) -> set[tuple[str, int, int, bool]]:
        """Return, as the model has them, the workers whose lease lapsed over a task."""
        found: set[tuple[str, int, int, bool]] = set()
        for worker, _ in WORKERS:
            held = cast(
                "dict[bytes, bytes]", self.client.hgetall(keys.gone_tasks(WorkerId(worker)))
            )
            for pair, noted in held.items():
                stage = STAGES.index(StageName(text(pair).partition("|")[2]))
                produced, _, alone = text(noted).partition("|")
                found.add((worker, stage, int(produced), alone == "1"))
        return found

    def inboxes(self) -> set[tuple[str, str]]:
        """Return the inbox entries that the model has too: a task to drop ("x", "y"), and imported
        blocks to free ("f").
        """
        notices: set[tuple[str, str]] = set()
        for worker, _ in WORKERS:
            entries = stream_entries(self.client, keys.inbox(WorkerId(worker)))
            notices |= {(worker, text(fields[b"k"])) for _, fields in entries}
        return {(worker, kind) for worker, kind in notices if kind in ("x", "y", "f")}

    def real(self, stage: int, epoch: int) -> Epoch:
        return Epoch(self.epochs[stage].get(epoch, 1))

    def random_epoch(self, stage: int) -> int:
        """Return an epoch for a call: mostly the task's own epoch, sometimes an older one."""
        now = self.store.tasks[stage].epoch
        return now if self.rng.random() < 0.75 else self.rng.choice(sorted(self.epochs[stage]))

    def random_call(self) -> Callable[[], None]:
        frequent = [self.overdue, self.claim, self.append] * 3
        rare = [
            self.relocate,
            self.consume,
            self.lose,
            self.fail,
            self.fence,
            self.ack_by_client,
            self.abort,
            self.die,
        ]
        rare += [
            self.hand_off,
            self.hand_off,
            self.confirm,
            self.confirm,
            self.release,
            self.lose_task,
            self.report_idle,
        ]
        return self.rng.choice([*frequent, *rare])

    def overdue(self) -> None:
        """Repeat all grants that left their streams; every grant is delivered at this time."""
        leads = self.rng.random() < 0.9
        for stage in STAGES:
            self.client.xreadgroup(keys.GROUP, "reader", {keys.role(RoleName(stage)): ">"})
        self.store = self.store._replace(
            tasks=cast(
                "tuple[MirrorTask, MirrorTask]",
                tuple(task._replace(waits=False) for task in self.store.tasks),
            )
        )
        call = scripts.overdue(self.leader if leads else "other|1", 0, None)
        self.call_both(self.mirror.overdue(self.store, self.store.term + (not leads)), call)

    def claim(self) -> None:
        worker, stage = self.rng.choice(WORKERS)
        epoch = self.random_epoch(stage)
        role = RoleName(STAGES[stage])
        call = scripts.claim(
            WorkerId(worker), role, "0-1", R, STAGES[stage], self.real(stage, epoch), INPUTS[stage]
        )
        self.call_both(self.mirror.claim(self.store, worker, stage, epoch), call)

    def append(self) -> None:
        worker, stage = self.rng.choice(WORKERS)
        epoch, index, finish = (
            self.random_epoch(stage),
            self.rng.randrange(4),
            self.rng.random() < 0.3,
        )
        chunk = Chunk(request=R, edge=EDGES[stage], index=index, epoch=self.real(stage, epoch))
        location = place(WorkerId(worker)) if stage == PRODUCER else {}
        item = appended(
            chunk, stage=STAGES[stage], consumer=CONSUMERS[stage], location=location, finish=finish
        )
        self.call_both(
            self.mirror.append(self.store, worker, stage, epoch, index, finish=finish),
            scripts.append([item]),
        )

    def relocate(self) -> None:
        worker, epoch, index = (
            self.rng.choice("AB") + "0",
            self.random_epoch(PRODUCER),
            self.rng.randrange(3),
        )
        moved = scripts.Relocation(
            request=R,
            stage=STAGES[PRODUCER],
            epoch=self.real(PRODUCER, epoch),
            edge=EDGES[PRODUCER],
            consumer=STAGES[CONSUMER],
            index=index,
            location=place(WorkerId(worker)),
        )
        self.call_both(
            self.mirror.relocate(self.store, worker, epoch, index), scripts.relocate(moved)
        )

    def consume(self) -> None:
        epoch, consumed = self.random_epoch(CONSUMER), self.rng.randrange(3)
        ack = scripts.Ack(
            request=R,
            stage=STAGES[CONSUMER],
            epoch=self.real(CONSUMER, epoch),
            edge=EDGES[PRODUCER],
            consumed=consumed,
            producer=STAGES[PRODUCER],
        )
        self.call_both(self.mirror.ack(self.store, epoch, consumed), scripts.ack([ack]))

    def report_idle(self) -> None:
        epoch, consumed = self.random_epoch(CONSUMER), self.rng.randrange(3)
        call = scripts.report_idle(
            R, STAGES[CONSUMER], self.real(CONSUMER, epoch), {EDGES[PRODUCER]: consumed}
        )
        self.call_both(self.mirror.report_idle(self.store, epoch, consumed), call)

    def ack_by_client(self) -> None:
        raw = text(self.client.hget(keys.task(R, CLIENT), "epoch"))
        ack = scripts.Ack(
            request=R,
            stage=CLIENT,
            epoch=Epoch(int(raw)),
            edge=EDGES[CONSUMER],
            consumed=SIZES[CONSUMER],
            producer=STAGES[CONSUMER],
            delivered=True,
        )
        self.call_both(self.mirror.ack_by_client(self.store, SIZES[CONSUMER]), scripts.ack([ack]))

    def lose(self) -> None:
        epoch = self.random_epoch(CONSUMER)
        call = scripts.lose_tensors(
            R, STAGES[CONSUMER], self.real(CONSUMER, epoch), STAGES[PRODUCER]
        )
        self.call_both(self.mirror.lose_tensors(self.store, epoch), call)

    def hand_off(self) -> None:
        """Hand a task off to the same role, so that any worker of the stage may claim it."""
        worker, stage = self.rng.choice(WORKERS)
        epoch, role = self.random_epoch(stage), RoleName(STAGES[stage])
        call = scripts.hand_off(
            R,
            STAGES[stage],
            self.real(stage, epoch),
            WorkerId(worker),
            role,
            num_rows=1,
            data=b"blocks",
        )
        self.call_both(self.mirror.hand_off(self.store, worker, stage, epoch, role), call)

    def confirm(self) -> None:
        stage = self.rng.randrange(2)
        epoch = self.random_epoch(stage)
        self.call_both(
            self.mirror.confirm(self.store, stage, epoch),
            scripts.confirm(R, STAGES[stage], self.real(stage, epoch)),
        )

    def release(self) -> None:
        worker, stage = self.rng.choice(WORKERS)
        self.call_both(
            self.mirror.release(self.store, worker, stage),
            scripts.release(R, STAGES[stage], WorkerId(worker)),
        )

    def lose_task(self) -> None:
        stage = self.rng.randrange(2)
        epoch = self.random_epoch(stage)
        call = scripts.lose_task(R, STAGES[stage], self.real(stage, epoch))
        self.call_both(self.mirror.lose_task(self.store, stage, epoch), call)

    def fail(self) -> None:
        stage = self.rng.randrange(2)
        epoch = self.random_epoch(stage)
        real = self.real(stage, epoch)
        fact = ev.TaskFailed(
            request=R, stage=STAGES[stage], epoch=real, code="engine_error", message=""
        )
        self.call_both(self.mirror.fail(self.store, stage, epoch), scripts.fail(fact))

    def fence(self) -> None:
        """Fence a worker, whether or not it is late; it registers again immediately."""
        worker, stage = self.rng.choice(WORKERS)
        deadline_us = int(self.client.zscore(keys.WORKERS, worker) or 0)
        if self.rng.random() < 0.7:
            self.store = self.store._replace(late=self.store.late | {worker})
        else:
            deadline_us -= 1
        fenced = self.mirror.fence_worker(self.store, self.store.term, worker)
        self.call_both(
            fenced, scripts.fence_worker(self.leader, WorkerId(worker), deadline_us=deadline_us)
        )
        self.register(worker, stage)

    def die(self) -> None:
        """Observe a worker's end; the worker registers again immediately."""
        worker, stage = self.rng.choice(WORKERS)
        ended = self.mirror.end_worker(self.store, worker)
        self.call_both(ended, scripts.fence_worker("", WorkerId(worker), died=True))
        self.register(worker, stage)

    def register(self, worker: str, stage: int) -> None:
        run(
            self.client,
            scripts.register(WorkerId(worker), STAGES[stage], HOUR_US, {"kind": "test"}),
        )
        self.store = self.store._replace(listed=self.store.listed | {worker})

    def abort(self) -> None:
        """End the request. Done rarely, since later calls are refused."""
        if self.rng.random() < 0.1:
            call = scripts.abort(R, scripts.API_RIGHT, "")
            self.call_both(self.mirror.close(self.store, "aborted"), call)


def run_walks(client: redis.Redis, mirror: Scripts) -> set[str]:
    """Make the same random calls on Redis and on the model; return the states that occurred."""
    seen: set[str] = set()
    for seed in range(NUM_WALKS):
        twins = Twins(client, random.Random(seed), mirror)
        for _ in range(NUM_CALLS):
            twins.random_call()()
            seen |= {state for task in twins.store.tasks for state in (task.state, task.offer)}
            seen |= {"evidence"} if twins.store.evidence else set()
            seen |= {twins.store.end}
    return seen


def test_mirror_answers_as_the_scripts(client: redis.Redis) -> None:
    seen = run_walks(client, Scripts())
    assert {"finished", "failed", "aborted", "offered", "released", "confirmed", "evidence"} <= seen


def test_mirror_condemns_the_requests_that_the_scripts_condemn(client: redis.Redis) -> None:
    """A task is granted again after each failed step, from some number on to run alone; if a step
    fails then too, the scripts fail the request, and so does the model.
    """
    twins = Twins(client, random.Random(0), Scripts())
    worker, role = WorkerId("A0"), RoleName(STAGES[PRODUCER])
    states: list[tuple[str, bool]] = []
    for _ in range(MAX_DEATHS + 1):
        epoch = twins.store.tasks[PRODUCER].epoch
        claim = scripts.claim(worker, role, "0-1", R, STAGES[PRODUCER], twins.real(PRODUCER, epoch))
        twins.call_both(twins.mirror.claim(twins.store, worker, PRODUCER, epoch), claim)
        lose = scripts.lose_task(R, STAGES[PRODUCER], twins.real(PRODUCER, epoch))
        twins.call_both(twins.mirror.lose_task(twins.store, PRODUCER, epoch), lose)
        states.append((twins.store.tasks[PRODUCER].state, twins.store.tasks[PRODUCER].alone))
    assert states == [("granted", False), ("granted", True), ("aborted", True)]


def test_differing_mirror_is_detected(client: redis.Redis) -> None:
    class MirrorAppendsAtAnyEpoch(Scripts):
        def may_append(self, task: MirrorTask, epoch: int) -> bool:
            return True

    class CountsEveryDeath(Scripts):
        def had_work(self, store: Store, stage: int) -> bool:
            return True

    with pytest.raises(AssertionError, match="stale"):
        run_walks(client, MirrorAppendsAtAnyEpoch())
    with pytest.raises(AssertionError, match="deaths"):
        run_walks(client, CountsEveryDeath())
