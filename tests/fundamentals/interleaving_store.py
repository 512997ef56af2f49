"""What the scripts do to the hashes of one request, as pure functions: the mirror that the interleaving check runs over.

Two stages and a client: the producer's chunks carry remote tensors, the consumer's ride inline. An epoch rises by one where the
scripts take Redis's time. Each method of `Scripts` names its Lua; it answers as the Lua does. Knows no order of things.
"""

from typing import NamedTuple

from fleet.core import events as ev
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName, WorkerId
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
SUBMITTED = ev.RequestSubmitted(request=R, graph=PAIR.name, outputs=(EdgeName("out"),))


class Task(NamedTuple):
    """`req:{r}:task:{stage}`, its `worker:{id}:tasks` (`owner`), its entry in the role's stream (`waits`) and its edge's log.

    `log` holds the index of each entry. `consumed` is its client's or worker's acknowledgement. `made_at_death` -1: no field.
    """

    state: str = "pending"
    epoch: int = 0
    owner: str = ""
    waits: bool = False
    log: tuple[int, ...] = ()
    produced: int = 0
    consumed: int = 0
    deaths: int = 0
    made_at_death: int = -1
    alone: bool = False
    died_alone: bool = False


class Store(NamedTuple):
    """`tasks` by stage; `delivered` is the client's task. `end`: "" while the request is in `live`.

    `sizes`: how many chunks each stage is to make. `at`: which incarnation holds the tensors of each chunk the producer logged.
    `listed` and `late`: `workers`, and those of it whose deadline has passed.
    """

    sizes: tuple[int, int]
    tasks: tuple[Task, ...] = (Task(), Task())
    at: tuple[str, ...] = ()
    taken_by_client: int = 0
    end: str = ""
    listed: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    term: int = 0
    events: tuple[ev.Event, ...] = ()

    def with_task(self, stage: int, task: Task) -> "Store":
        tasks = self.tasks
        return self._replace(tasks=(task, tasks[1]) if stage == PRODUCER else (tasks[0], task))

    def told(self, event: ev.Event) -> "Store":
        return self._replace(events=(*self.events, event))


Answer = tuple[Store, str]


class Scripts:
    """One method a script. A subclass that leaves a comparison out is a mutation that the check must find."""

    def raised(self, task: Task, by: str) -> int:
        """common.lua `raise`, as the script `by` calls it."""
        return task.epoch + 1

    def grant(self, store: Store, term: int, stage: int, expected: int, *, alone: bool, remake: bool) -> Answer:
        """grant.lua"""
        task = store.tasks[stage]
        if term != store.term:
            return store, "not_leader"
        if store.end:
            return store, "ended"
        if task.epoch != expected:
            return store, "stale"
        if task.state == "running" or (task.state == "finished" and not remake):
            return store, "owned"
        epoch = self.raised(task, "grant")
        task = task._replace(state="granted", epoch=epoch, owner="", waits=True, alone=alone)
        return store.with_task(stage, task).told(ev.TaskGranted(request=R, stage=STAGES[stage], epoch=Epoch(epoch))), "ok"

    def claim(self, store: Store, worker: str, stage: int, epoch: int) -> Answer:
        """claim.lua; the entry was taken from the stream when it was delivered."""
        task = store.tasks[stage]
        if worker not in store.listed:
            return store, "unlisted"
        if store.end:
            return store, "ended"
        if task.epoch != epoch or task.state != "granted":
            return store, "stale"
        fact = ev.TaskClaimed(request=R, stage=STAGES[stage], epoch=Epoch(epoch), owner=WorkerId(worker))
        return store.with_task(stage, task._replace(state="running", owner=worker)).told(fact), "ok"

    def may_append(self, task: Task, epoch: int) -> bool:
        return task.epoch == epoch

    def append(self, store: Store, worker: str, stage: int, epoch: int, index: int, *, finish: bool) -> Answer:
        """append.lua"""
        task, answer = store.tasks[stage], "ok"
        if not self.may_append(task, epoch):
            return store, "stale"
        if store.end:
            return store, "ended"
        if index > task.produced:
            return store, "gap"
        if index < task.produced:
            answer = "duplicate"
        else:
            task = task._replace(log=(*task.log, index), produced=index + 1)
            if stage == PRODUCER:
                store = store._replace(at=(*store.at, worker))
        if finish:
            task = task._replace(state="finished", owner="")
            store = store.told(ev.TaskFinished(request=R, stage=STAGES[stage], epoch=Epoch(epoch)))
        return store.with_task(stage, task), answer

    def relocate(self, store: Store, worker: str, epoch: int, index: int) -> Answer:
        """relocate.lua"""
        task = store.tasks[PRODUCER]
        if task.epoch != epoch:
            return store, "stale"
        if store.end:
            return store, "ended"
        if index >= task.produced:
            return store, "gap"
        return store._replace(at=(*store.at[:index], worker, *store.at[index + 1 :])), "ok"

    def lose_tensors(self, store: Store, epoch: int) -> Answer:
        """lose_tensors.lua, said by the consumer of the producer."""
        if store.tasks[CONSUMER].epoch != epoch:
            return store, "stale"
        if store.end:
            return store, "ended"
        at = Epoch(store.tasks[PRODUCER].epoch)
        return store.told(ev.TensorsLost(request=R, stage=STAGES[PRODUCER], epoch=at)), "ok"

    def ack(self, store: Store, epoch: int, consumed: int) -> Answer:
        """ack.lua, by the consumer."""
        task = store.tasks[CONSUMER]
        if task.epoch != epoch:
            return store, "stale"
        if store.end:
            return store, "ended"
        return store.with_task(CONSUMER, task._replace(consumed=max(consumed, task.consumed))), "ok"

    def ack_by_client(self, store: Store, consumed: int) -> Answer:
        """ack.lua, by the one gateway of this model; with its last chunk comes the event."""
        if store.end:
            return store, "ended"
        store = store._replace(taken_by_client=max(consumed, store.taken_by_client))
        return (store.told(ev.AnswerDelivered(request=R)) if consumed == store.sizes[CONSUMER] else store), "ok"

    def fail(self, store: Store, stage: int, epoch: int) -> Answer:
        """fail.lua"""
        task = store.tasks[stage]
        if task.epoch != epoch:
            return store, "stale"
        if store.end:
            return store, "ended"
        fact = ev.TaskFailed(request=R, stage=STAGES[stage], epoch=Epoch(epoch), code="engine_error", message="")
        return store.with_task(stage, task._replace(state="failed", owner="")).told(fact), "ok"

    def fence_worker(self, store: Store, term: int, worker: str) -> Answer:
        """fence_worker.lua, by the leader."""
        if term != store.term:
            return store, "not_leader"
        if worker not in store.late:
            return store, "alive"
        store = store._replace(listed=store.listed - {worker}, late=store.late - {worker})
        for stage, task in enumerate(store.tasks):
            if task.owner == worker:
                store = self._lose(store, stage, task)
        return store, "ok"

    def _lose(self, store: Store, stage: int, task: Task) -> Store:
        epoch = self.raised(task, "fence_worker")
        deaths = task.deaths + 1 if task.made_at_death == task.produced else 1
        alone = task.alone
        task = task._replace(
            state="lost", epoch=epoch, owner="", deaths=deaths, made_at_death=task.produced, died_alone=alone
        )
        fact = ev.TaskLost(request=R, stage=STAGES[stage], epoch=Epoch(epoch), deaths=deaths, alone=alone)
        return store.with_task(stage, task).told(fact)

    def end_request(self, store: Store, term: int, state: str) -> Answer:
        """end_request.lua"""
        return self.close(store, state) if term == store.term else (store, "not_leader")

    def close(self, store: Store, state: str) -> Answer:
        """common.lua `close`, which abort.lua calls too."""
        if store.end:
            return store, "ended"
        for stage, task in enumerate(store.tasks):
            left = task.state if task.state == "finished" else ("finished" if state == "finished" else "aborted")
            task = task._replace(state=left, epoch=self.raised(task, "close"), owner="", waits=False)
            store = store.with_task(stage, task)
        return store._replace(end=state).told(ev.RequestEnded(request=R, state=state)), "ok"
