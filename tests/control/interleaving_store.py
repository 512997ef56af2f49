"""Model of the scripts' effect on the hashes of one request, as pure functions, on which the
interleaving check runs.

The model has two stages and a client: the producer's chunks carry remote tensors, the consumer's
are inline; either stage may have two roles. An epoch rises by one where the scripts use Redis's
time. A method of `Scripts` has the name of its Lua script and gives the same reply. The order of
calls is not modelled here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fleet.core.ids import CLIENT, EdgeName, RequestId, StageName
from fleet.graphs import Edge, Graph, Stage

R = RequestId("r")
PRODUCER, CONSUMER = 0, 1
STAGES = (StageName("producer"), StageName("consumer"))
PAIR = Graph(
    name="pair",
    frontend="",
    media={EdgeName("out"): "text"},
    stages=tuple(Stage(name=name, builder="", walks=()) for name in STAGES),
    edges=(
        Edge(name=EdgeName("middle"), source=STAGES[PRODUCER], target=STAGES[CONSUMER]),
        Edge(name=EdgeName("out"), source=STAGES[CONSUMER], target=CLIENT),
    ),
)
MAX_DEATHS = 2
"""Deaths over a task without progress before it runs alone, as in `lua/common`."""


class MirrorTask(NamedTuple):
    """Redis's state of one task: the hashes `req:{r}:task:{stage}` and `req:{r}:kv:{stage}`, the
    task's place in `worker:{id}:tasks` (`owner`), whether its entry is in the role's stream
    (`waits`), and the log of its edge.

    `log`: chunk index of each log entry. `consumed`: number of chunks acknowledged by their
    consumer. `produced_at_death`: -1 if the field is missing. `offer`: state of the KV blocks that
    `source` offers, imported at `confirmed_epoch`; `begun`: number of chunks before these blocks.
    `idle_consumed`: number of input chunks consumed at the owner's last report of being idle.
    """

    state: str = "pending"
    epoch: int = 0
    role: str = ""
    owner: str = ""
    waits: bool = False
    log: tuple[int, ...] = ()
    produced: int = 0
    consumed: int = 0
    deaths: int = 0
    produced_at_death: int = -1
    alone: bool = False
    offer: str = ""
    source: str = ""
    confirmed_epoch: int = 0
    begun: int = 0
    idle_consumed: int = 0


class Store(NamedTuple):
    """Redis's state of one request and its workers. `tasks`: one per stage. `consumed_by_client`:
    number of chunks acknowledged by the client. `end`: how the request ended, "" while it is in
    `live`.

    `sizes`: number of chunks that each stage is to produce. `at`: incarnation that holds the
    tensors of each logged producer chunk. `listed`: workers. `late`: workers whose lease was not
    renewed. `notices`: inbox entries as (worker, kind): "x" and "y" drop the task, "f" frees the
    blocks, which were imported. `evidence`: workers whose lease lapsed over a task, as worker,
    stage, number of chunks appended before, and whether the task ran alone.
    """

    sizes: tuple[int, int]
    tasks: tuple[MirrorTask, ...] = (MirrorTask(), MirrorTask())
    at: tuple[str, ...] = ()
    consumed_by_client: int = 0
    end: str = ""
    listed: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    notices: frozenset[tuple[str, str]] = frozenset()
    term: int = 0
    evidence: frozenset[tuple[str, int, int, bool]] = frozenset()

    def with_task(self, stage: int, task: MirrorTask) -> "Store":
        tasks = self.tasks
        return self._replace(tasks=(task, tasks[1]) if stage == PRODUCER else (tasks[0], task))


Answer = tuple[Store, str]


def submitted(scripts: "Scripts", sizes: tuple[int, int], roles: Sequence[str] = STAGES) -> Store:
    """Model of submit.lua: return a store in which both tasks are granted to their first roles."""
    store = Store(sizes)
    for stage, role in enumerate(roles):
        store = scripts.grant_task(store, stage, store.tasks[stage], role, alone=False, by="grant")
    return store


def outdated(store: Store, task: MirrorTask, epoch: int) -> str:
    """Return the refusal of a write at another epoch than the task's, or after the request's end;
    "" if the write is allowed.
    """
    return "stale" if task.epoch != epoch else "ended" if store.end else ""


def refused(store: Store, task: MirrorTask, epoch: int) -> str:
    """Model of `refused` in lua/common."""
    return outdated(store, task, epoch) or ("" if task.state == "running" else "stale")


class Scripts:
    """Models of the scripts, one method per script. A subclass that omits a comparison is a
    mutation that the check must detect.
    """

    def raised(self, task: MirrorTask, by: str) -> int:
        """Model of `raise` in lua/common, as the script `by` calls it."""
        return task.epoch + 1

    def overdue(self, store: Store, term: int) -> Answer:
        """Model of overdue.lua, when all unclaimed grants are overdue and every role has workers: a
        grant that left its stream is lost.
        """
        if term != store.term:
            return store, "not_leader"
        for stage, task in enumerate(store.tasks):
            if not store.end and task.state == "granted" and not task.waits:
                store = self.grant_task(
                    store, stage, task, task.role, alone=task.alone, by="overdue"
                )
        return store, "ok"

    def grant_task(
        self, store: Store, stage: int, task: MirrorTask, role: str, *, alone: bool, by: str
    ) -> Store:
        """Model of `grant_task` in lua/common, for a task of a role."""
        epoch = self.raised(task, by)
        task = task._replace(
            state="granted", epoch=epoch, role=role, owner="", waits=True, alone=alone
        )
        return store.with_task(stage, task)

    def claim(self, store: Store, worker: str, stage: int, epoch: int) -> Answer:
        """Model of claim.lua; the grant's entry left the stream when it was delivered."""
        task = store.tasks[stage]
        if worker not in store.listed:
            return store, "unlisted"
        if store.end:
            return store, "ended"
        if task.epoch != epoch or task.state != "granted":
            return store, "stale"
        claimed = task._replace(state="running", owner=worker, idle_consumed=0)
        return store.with_task(stage, claimed), "ok"

    def may_append(self, task: MirrorTask, epoch: int) -> bool:
        return task.epoch == epoch

    def append(
        self, store: Store, worker: str, stage: int, epoch: int, index: int, *, finish: bool
    ) -> Answer:
        """Model of append.lua."""
        task, answer = store.tasks[stage], "ok"
        if not self.may_append(task, epoch):
            return store, "stale"
        if store.end:
            return store, "ended"
        if index >= task.produced and task.state != "running":
            return store, "stale"
        if index > task.produced:
            return store, "gap"
        if index < task.produced:
            answer = "duplicate"
        else:
            task = task._replace(log=(*task.log, index), produced=index + 1)
            if stage == PRODUCER:
                store = store._replace(at=(*store.at, worker))
        if finish and task.state in ("running", "finished"):
            task = task._replace(state="finished", owner="")
            return self.close_if_complete(store.with_task(stage, task)), answer
        return store.with_task(stage, task), answer

    def relocate(self, store: Store, worker: str, epoch: int, index: int) -> Answer:
        """Model of relocate.lua."""
        task = store.tasks[PRODUCER]
        if why := outdated(store, task, epoch):
            return store, why
        if index >= task.produced:
            return store, "gap"
        return store._replace(at=(*store.at[:index], worker, *store.at[index + 1 :])), "ok"

    def hand_off(self, store: Store, worker: str, stage: int, epoch: int, role: str) -> Answer:
        """Model of hand_off.lua, with KV blocks."""
        task = store.tasks[stage]
        if why := refused(store, task, epoch):
            return store, why
        task = task._replace(
            state="granted",
            epoch=self.raised(task, "hand_off"),
            role=role,
            owner="",
            waits=True,
            offer="offered",
            source=worker,
            confirmed_epoch=0,
            begun=task.produced,
        )
        return store.with_task(stage, task), "ok"

    def may_take(self, store: Store, task: MirrorTask) -> bool:
        return task.offer == "offered" and task.source in store.listed

    def confirm(self, store: Store, stage: int, epoch: int) -> Answer:
        """Model of confirm.lua."""
        task = store.tasks[stage]
        if why := outdated(store, task, epoch):
            return store, why
        if not self.may_take(store, task):
            return store, "released"
        notices = (
            store.notices | {(task.source, "f")} if task.source in store.listed else store.notices
        )
        return store.with_task(
            stage, task._replace(offer="confirmed", confirmed_epoch=epoch)
        )._replace(notices=notices), "ok"

    def release(self, store: Store, worker: str, stage: int) -> Answer:
        """Model of release.lua."""
        task = store.tasks[stage]
        if task.offer != "offered" or task.source != worker:
            return store, "stale"
        return store.with_task(stage, task._replace(offer="released")), "ok"

    def skips(self, task: MirrorTask) -> bool:
        """Model of a check in lose_tensors.lua: return True if the owner does not recompute the
        chunks published before it imported the blocks.
        """
        return task.state == "running" and task.confirmed_epoch == task.epoch

    def lose_tensors(self, store: Store, epoch: int) -> Answer:
        """Model of lose_tensors.lua, called by the consumer about the producer."""
        if why := outdated(store, store.tasks[CONSUMER], epoch):
            return store, why
        task = store.tasks[PRODUCER]
        if task.state == "finished":
            return self.grant_task(
                store, PRODUCER, task, task.role, alone=task.alone, by="recompute"
            ), "ok"
        if self.skips(task):
            notified = store._replace(notices=store.notices | {(task.owner, "x")})
            return self._lose(notified, PRODUCER, task, how="left"), "ok"
        return store, "ok"

    def lose_task(self, store: Store, stage: int, epoch: int) -> Answer:
        """Model of lose_task.lua."""
        task = store.tasks[stage]
        if why := refused(store, task, epoch):
            return store, why
        return self._lose(store, stage, task, how="failed"), "ok"

    def report_idle(self, store: Store, epoch: int, consumed: int) -> Answer:
        """Model of report_idle.lua, called by the consumer."""
        task = store.tasks[CONSUMER]
        if why := refused(store, task, epoch):
            return store, why
        return store.with_task(CONSUMER, task._replace(idle_consumed=consumed)), "ok"

    def ack(self, store: Store, epoch: int, consumed: int) -> Answer:
        """Model of ack.lua, called by the consumer."""
        task = store.tasks[CONSUMER]
        if why := outdated(store, task, epoch):
            return store, why
        return store.with_task(CONSUMER, task._replace(consumed=max(consumed, task.consumed))), "ok"

    def ack_by_client(self, store: Store, consumed: int) -> Answer:
        """Model of ack.lua, called by the only gateway of this model; the ack of the last chunk
        ends the client's task.
        """
        if store.end:
            return store, "ended"
        store = store._replace(consumed_by_client=max(consumed, store.consumed_by_client))
        return self.close_if_complete(store), "ok"

    def fail(self, store: Store, stage: int, epoch: int) -> Answer:
        """Model of fail.lua."""
        task = store.tasks[stage]
        if why := refused(store, task, epoch):
            return store, why
        store = store.with_task(stage, task._replace(state="failed", owner=""))
        return self.close(store, "failed")[0], "ok"

    def fence_worker(self, store: Store, term: int, worker: str) -> Answer:
        """Model of fence_worker.lua, called by the leader: the worker's lease lapsed."""
        if term != store.term:
            return store, "not_leader"
        if worker not in store.late:
            return store, "alive"
        return self._fence(store, worker, "lapsed"), "ok"

    def end_worker(self, store: Store, worker: str) -> Answer:
        """Model of fence_worker.lua, called by the worker's keeper, which saw its process end."""
        return self._settle(self._fence(store, worker, "died"), worker), "ok"

    def _fence(self, store: Store, worker: str, how: str) -> Store:
        inboxes = frozenset(notice for notice in store.notices if notice[0] != worker)
        store = store._replace(
            listed=store.listed - {worker}, late=store.late - {worker}, notices=inboxes
        )
        for stage, task in enumerate(store.tasks):
            if task.owner == worker and not store.end:
                store = self._lose(store, stage, task, how=how)
        return store

    def counts(self, how: str) -> bool:
        """Return True if such an end of an owner counts against its task."""
        return how in ("died", "failed")

    def _settle(self, store: Store, worker: str) -> Store:
        """Model of `settle_evidence` in lua/common."""
        held = sorted(each for each in store.evidence if each[0] == worker)
        store = store._replace(evidence=store.evidence - set(held))
        for _, stage, produced, was_alone in held:
            task = store.tasks[stage]
            if task.state not in ("granted", "running") or task.produced != produced:
                continue
            task = self._with_death(task)
            store = store.with_task(stage, task)
            if was_alone and task.deaths > MAX_DEATHS:
                return self.close(store, "failed")[0]
            if task.deaths >= MAX_DEATHS and not task.alone:
                if task.owner:
                    store = store._replace(notices=store.notices | {(task.owner, "y")})
                store = self._lose(store, stage, task, how="revoked")
        return store

    def _with_death(self, task: MirrorTask) -> MirrorTask:
        """Model of `count_death` in lua/common."""
        deaths = task.deaths + 1 if task.produced_at_death == task.produced else 1
        return task._replace(deaths=deaths, produced_at_death=task.produced)

    def had_work(self, store: Store, stage: int) -> bool:
        """Model of `had_work` in lua/common."""
        return (
            stage == PRODUCER
            or store.tasks[PRODUCER].produced > store.tasks[CONSUMER].idle_consumed
        )

    def _lose(self, store: Store, stage: int, task: MirrorTask, *, how: str) -> Store:
        """Model of `lose_owner` in lua/common."""
        is_evidence = self.counts(how) and self.had_work(store, stage)
        if how == "lapsed" and self.had_work(store, stage):
            noted = (task.owner, stage, task.produced, task.alone)
            kept = {each for each in store.evidence if each[:2] != noted[:2]}
            store = store._replace(evidence=frozenset(kept | {noted}))
        if is_evidence:
            task = self._with_death(task)
        was_alone = is_evidence and task.alone
        task = task._replace(state="lost", epoch=self.raised(task, "lose"), owner="")
        store = store.with_task(stage, task)
        if was_alone and task.deaths > MAX_DEATHS:
            return self.condemn(store)
        return self.grant_task(
            store, stage, task, task.role, alone=task.deaths >= MAX_DEATHS, by="regrant"
        )

    def condemn(self, store: Store) -> Store:
        """Model of `condemn` in lua/common."""
        return self.close(store, "failed")[0]

    def is_complete(self, store: Store) -> bool:
        delivered = store.consumed_by_client == store.sizes[CONSUMER]
        return delivered and all(task.state == "finished" for task in store.tasks)

    def close_if_complete(self, store: Store) -> Store:
        """Model of `close_if_complete` in lua/common."""
        return self.close(store, "finished")[0] if self.is_complete(store) else store

    def close(self, store: Store, state: str) -> Answer:
        """Model of `close` in lua/common, which abort.lua calls too."""
        if store.end:
            return store, "ended"
        for stage, task in enumerate(store.tasks):
            left = task.state if task.state in ("finished", "failed") else "aborted"
            task = task._replace(
                state=left,
                epoch=self.raised(task, "close"),
                owner="",
                waits=False,
                offer="",
                source="",
                confirmed_epoch=0,
            )
            store = store.with_task(stage, task)
        return store._replace(end=state), "ok"
