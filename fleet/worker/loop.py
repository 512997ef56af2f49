"""The worker's loop, on one screen: step the engine, send what it made, take in what came, feed it.

One pipelined round trip per turn; no wait for the conductor. A failure of one request is that request's; the loop goes on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import Reply, pairs, text
from fleet.control.notices import ChunkNotice, CreditNotice, EndNotice, FreeNotice, Notice, RelocationNotice, WalkNotice
from fleet.core.errors import ChunkOrderError, EngineError, FleetError
from fleet.core.events import TaskFailed
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.request import decode_request
from fleet.engine.base import EngineOutput, KVBlocks
from fleet.stages.base import BuiltStage
from fleet.transfer.base import Transfer
from fleet.worker.hand_off import Adoption, Offers
from fleet.worker.link import Grant, Link
from fleet.worker.receive import Receiver
from fleet.worker.send import Sender
from fleet.worker.task import Task, made_before, open_task

log = logging.getLogger(__name__)

IDLE_BLOCK_MS = 200
PULL_BLOCK_MS = 1
SLOW_POLL_S = 0.5
HAND_OFF_LEASE_S = 10.0
Post = tuple[scripts.Call, Callable[[Reply], None]]
"""A script to run, and what to do with its answer."""


class WorkerLoop:
    """Serves one role. `turn()` is the whole loop body; every attribute is touched by this thread only."""

    def __init__(
        self, config: FleetConfig, worker: WorkerId, role: RoleName, built: BuiltStage, link: Link, transfer: Transfer
    ) -> None:
        self.config, self.worker, self.role, self.built = config, worker, role, built
        self.engine, self.link, self.transfer = built.engine, link, transfer
        self.serves = config.role(role)
        self.stage = self.serves.stage
        self.last_walk = config.graph_declaration().stage(self.stage).walks[-1]
        self.capacity = config.stage(self.stage).max_batch
        self.tasks: dict[RequestId, Task] = {}
        self.lingering: set[RequestId] = set()
        self.sender = Sender(transfer, worker)
        self.receiver = Receiver(transfer, link, config.transfer.deadline_s)
        self.failures: list[TaskFailed] = []
        self.reserved: list[Grant] = []
        self.offers = Offers(transfer, HAND_OFF_LEASE_S)
        self.giving: list[tuple[Task, KVBlocks | None]] = []
        self.next_poll = 0.0
        self.vitals: dict[str, int] = {}
        self.draining = False

    def run(self, stopping: Callable[[], bool], progress: Callable[[], None]) -> None:
        while not stopping():
            self.turn()
            progress()
        self._take_vitals()

    def turn(self) -> None:
        for output in self._step():
            task = self.tasks.get(output.request_id)
            if task is None:
                continue
            if output.error is not None:
                self._fail(task, output.error)
            else:
                self._guard(task, lambda task=task, output=output: task.produced(output))
                self._consider_giving(task, output)
        self._exchange()
        self._feed()

    def _consider_giving(self, task: Task, output: EngineOutput) -> None:
        """This role's walks are over with the first output of the next one: another worker goes on from here."""
        is_next = self.serves.next is not None and output.walk == self.last_walk
        if not is_next or output.final or task.given_up or task.all_ended() or task.request not in self.tasks:
            return
        task.given_up = True
        self.giving.append((task, self.engine.export(task.request)))
        self.engine.finish(task.request)

    def _step(self) -> Sequence[EngineOutput]:
        if not self.engine.ready():
            return ()
        try:
            return self.engine.step()
        except Exception as error:  # the process loop: the batch is lost, the worker is not
            log.exception("a batch of %d failed", len(self.tasks))
            for task in list(self.tasks.values()):
                self._fail(task, EngineError(f"the batch failed: {error}"))
            return ()

    def _exchange(self) -> None:
        """The turn's one round trip: every write out; answers, notices and grants in."""
        posts = self._posts()
        ask = self._poll_due()
        mail = self.link.exchange(
            [call for call, _ in posts],
            free_slots=self._free_slots(),
            block_ms=self._block_ms(bool(self.failures)),
            ask_live=ask,
        )
        self.failures, self.receiver.lost = [], []
        for (_, settle), reply in zip(posts, mail.replies, strict=True):
            settle(reply)
        for notice in mail.notices:
            self._deliver(notice)
        for request, live in zip(ask, mail.still_live, strict=True):
            if not live:
                self._drop(request)
        self._take(mail.grants)

    def _posts(self) -> list[Post]:
        """What this turn writes, in order: a task's chunks go before its hand-off."""
        appends, relocations = self.sender.collect(list(self.tasks.values()))
        acks = [ack for task in self.tasks.values() for ack in task.acks_due()]
        posts: list[Post] = [(scripts.ack(acks), _ignore)] if acks else []
        # Before the chunk that may end the task: whoever waits for these tensors would not be told of another.
        posts += [(scripts.relocate(relocation), _ignore) for relocation in relocations]
        if appends:
            posts.append((scripts.append(appends), partial(self._settle_appends, appends)))
        posts += [(scripts.fail(event), _ignore) for event in self.failures]
        for task, edge in self.receiver.lost:
            posts.append((scripts.lose_tensors(task.request, task.stage, task.epoch, task.producers[edge]), _ignore))
        posts += [(scripts.release(request, self.stage, self.worker), _ignore) for request in self._withdrawn()]
        for task in self._arrived():
            posts.append((scripts.confirm(task.request, task.stage, task.epoch), partial(self._adopt, task)))
        return posts + self._gifts()

    def _gifts(self) -> list[Post]:
        """Hand-offs of tasks that have come to the end of this role's walks."""
        giving, self.giving = self.giving, []
        posts: list[Post] = []
        for task, blocks in giving:
            if self.tasks.get(task.request) is not task or self.serves.next is None:
                continue
            location, data = self.offers.publish(task.request, blocks) if blocks is not None else ({}, b"")
            rows = blocks.num_rows if blocks is not None else 0
            call = scripts.hand_off(
                task.request, task.stage, task.epoch, self.worker, self.serves.next, num_rows=rows, location=location, data=data
            )
            posts.append((call, partial(self._settle_gift, task)))
        return posts

    def _settle_gift(self, task: Task, reply: Reply) -> None:
        if text(cast("list[Reply]", reply)[0]) != "ok":
            self.offers.free(task.request)
            self._drop(task.request)
        elif self.tasks.get(task.request) is task:
            self._finish(task)

    def _withdrawn(self) -> list[RequestId]:
        """Offers nobody took in time."""
        overdue = self.offers.overdue()
        for request in overdue:
            self.offers.free(request)
        return overdue

    def _arrived(self) -> list[Task]:
        """Tasks whose blocks are here, and whose input reaches as far as it did when they were opened: to be confirmed."""
        due: list[Task] = []
        for task in self.tasks.values():
            if task.adoption is None:
                continue
            task.adoption.poll()
            if task.adoption.failed:
                log.warning("request %s: what %s computed could not be pulled; it is computed here", task.request, task.stage)
                task.adoption = None
            elif task.adoption.blocks is not None and task.has_read_logs():
                due.append(task)
        return due

    def _adopt(self, task: Task, reply: Reply) -> None:
        """The blocks are ours if they were still on offer; if not, they are computed here."""
        adoption, task.adoption = task.adoption, None
        if self.tasks.get(task.request) is not task or adoption is None or adoption.blocks is None or text(reply) != "ok":
            return
        if self.engine.adopt(task.request, adoption.blocks):
            task.adopted(self.config.graph_declaration().stage(self.stage).walks[:-1])

    def _block_ms(self, hurry: bool) -> int:
        if hurry or self.engine.ready() or self.receiver.can_advance(self.tasks.values()):
            return 0
        pulling = self.receiver.pulling() or any(task.adoption is not None for task in self.tasks.values())
        return PULL_BLOCK_MS if pulling else IDLE_BLOCK_MS

    def _free_slots(self) -> int:
        closed = self.draining or self.reserved or any(task.alone for task in self.tasks.values())
        return 0 if closed else max(0, self.capacity - len(self.tasks))

    def _take(self, grants: Sequence[Grant]) -> None:
        """Claim what came; a task that is to run alone waits until nothing else runs here, and nothing new is taken meanwhile."""
        self.reserved += [grant for grant in grants if grant.alone]
        due = [grant for grant in grants if not grant.alone]
        if self.reserved and not self.tasks and not due:
            due.append(self.reserved.pop(0))
        if due:
            self._claim(due)

    def _poll_due(self) -> list[RequestId]:
        """The slow poll that covers a lost notice: is what we hold still live?"""
        now = time.monotonic()
        if now < self.next_poll:
            return []
        self.next_poll = now + SLOW_POLL_S
        self._take_vitals()
        return list({*self.tasks, *self.lingering, *self.offers.requests()})

    def _take_vitals(self) -> None:
        """Counts for the lease thread to publish; taken here because the engine is this thread's."""
        stats = self.engine.stats()
        self.vitals = {
            "running": len(self.tasks),
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
            "slots_used": self.transfer.used_slots(),
        }

    def _settle_appends(self, appends: list[scripts.Append], reply: Reply) -> None:
        for item, raw in zip(appends, cast("list[bytes]", reply), strict=True):
            answer, task = text(raw), self.tasks.get(item.chunk.request)
            if task is None:
                continue
            if answer == "gap":
                self._fail(task, ChunkOrderError(f"edge {item.chunk.edge}: chunk {item.chunk.index} left a gap"))
            elif answer in ("stale", "ended"):
                self._drop(task.request)
            elif item.finish:
                self._finish(task)

    def _deliver(self, notice: Notice) -> None:
        match notice:
            case ChunkNotice(chunk=chunk, location=location):
                task = self.tasks.get(chunk.request)
                if task is not None and chunk.edge in task.inbound:
                    task.inbound[chunk.edge].put(chunk, location)
            case CreditNotice(request=request, edge=edge, consumed=consumed):
                task = self.tasks.get(request)
                if task is not None and edge in task.outbound:
                    task.outbound[edge].credit(consumed)
            case RelocationNotice(request=request, edge=edge, index=index, location=location):
                task = self.tasks.get(request)
                if task is not None and edge in task.inbound:
                    task.inbound[edge].relocate(index, location)
            case WalkNotice(request=request, edge=edge, from_index=index, walk=walk):
                task = self.tasks.get(request)
                if task is not None and edge in task.inbound:
                    task.inbound[edge].assign(index, walk)
            case FreeNotice(request=request):
                self.offers.free(request)
            case EndNotice(request=request):
                self._drop(request)

    def _claim(self, grants: list[Grant]) -> None:
        calls = [scripts.claim(self.worker, self.role, g.entry, g.request, g.stage, g.epoch) for g in grants]
        mail = self.link.exchange(calls, free_slots=0, block_ms=0)
        for grant, reply in zip(grants, mail.replies, strict=True):
            answer = cast("list[Reply]", reply)
            if text(answer[0]) == "ok":
                self._open(grant, cast(bytes, answer[1]), pairs(answer[2]))
            else:
                log.info("grant of %s for %s: %s", grant.stage, grant.request, text(answer[0]))
        for notice in mail.notices:  # only now: some may be for the tasks just opened
            self._deliver(notice)

    def _open(self, grant: Grant, raw_spec: bytes, fields: dict[str, bytes]) -> None:
        """Begin a claimed task, or go on where an earlier owner's log ends: claim first, then the logs, then the inbox; the index
        removes repeats.
        """
        spec = decode_request(raw_spec)
        graph = self.config.graph_declaration()
        made = {edge.name: edge.target for edge in graph.edges_from(grant.stage) if f"produced:{edge.name}" in fields}
        inputs = [edge.name for edge in graph.edges_to(grant.stage)]
        logs = self.link.read_logs(grant.request, grant.stage, inputs, made)
        try:
            adapter = self.built.adapter(spec, logs.blob)
            task = open_task(spec, grant.stage, grant.epoch, adapter, self.config, logs=logs, alone=grant.alone)
            for edge, arrived in logs.inputs.items():
                for chunk, location in arrived:
                    task.inbound[edge].put(chunk, location)
            _assign_walks(task, fields)
            request, first = adapter.open(made_before(logs))
            self.engine.submit(request)
            self.tasks[grant.request] = task
            for piece in first:
                self.engine.feed(grant.request, piece)
            if logs.offer is not None:
                deadline_s = self.config.transfer.deadline_s
                task.adoption = Adoption(logs.offer, self.transfer, self.link.peer_metadata, deadline_s)
                self.engine.pause(grant.request, paused=True)
                task.paused = True
        except FleetError as error:
            self._report(grant.request, grant.stage, grant.epoch, error)
        except Exception as error:  # the process loop: this request fails, the others go on
            log.exception("request %s could not be opened", grant.request)
            self._report(grant.request, grant.stage, grant.epoch, EngineError(f"could not be opened: {error}"))

    def _feed(self) -> None:
        """Move arrived chunks into the engine, and tell it who has no credit."""
        for task in list(self.tasks.values()):
            self._guard(task, lambda task=task: self._feed_one(task))

    def _feed_one(self, task: Task) -> None:
        for edge, walk, arrays, final in self.receiver.advance(task):
            for piece in task.adapter.consume(edge, walk, arrays, final=final):
                self.engine.feed(task.request, piece)
        if task.adapter.stopped() and task.all_ended():
            self.engine.finish(task.request)
        paused = not task.has_credit() or task.adoption is not None
        if paused != task.paused:
            task.paused = paused
            self.engine.pause(task.request, paused=paused)

    def _guard(self, task: Task, work: Callable[[], None]) -> None:
        try:
            work()
        except FleetError as error:
            self._fail(task, error)
        except Exception as error:  # the process loop: this request fails, the others go on
            log.exception("request %s failed", task.request)
            self._fail(task, EngineError(f"stage {self.stage}: {error}"))

    def _fail(self, task: Task, error: FleetError) -> None:
        self._report(task.request, task.stage, task.epoch, error)
        self._drop(task.request)

    def _report(self, request: RequestId, stage: StageName, epoch: Epoch, error: FleetError) -> None:
        log.warning("request %s fails in %s: %s", request, stage, error.message)
        event = TaskFailed(
            request=request, stage=stage, epoch=epoch, code=error.code, message=error.message, param=error.param
        )
        self.failures.append(event)

    def _finish(self, task: Task) -> None:
        """Our part is done; published tensors stay until the request ends, for its consumers may still pull them."""
        self.engine.finish(task.request)
        self.receiver.forget(task.request)
        self.tasks.pop(task.request, None)
        if self.sender.published(task.request):
            self.lingering.add(task.request)

    def _drop(self, request: RequestId) -> None:
        """Forget a request at once, whatever it was doing, and free all it held."""
        self.engine.abort(request)
        self.receiver.forget(request)
        self.sender.release(request)
        self.offers.free(request)
        task = self.tasks.pop(request, None)
        if task is not None and task.adoption is not None:
            task.adoption.cancel()
        self.lingering.discard(request)


def _ignore(_reply: Reply) -> None:
    """A write whose refusal only says that somebody else has the right now; the end of the task is told by other means."""


def _assign_walks(task: Task, fields: dict[str, bytes]) -> None:
    """Walks the conductor set before this worker claimed: fields `walk:{edge}:{index}` of the task's hash."""
    for field, walk in fields.items():
        head, _, rest = field.partition(":")
        edge, _, index = rest.rpartition(":")
        if head == "walk" and edge in task.inbound:
            task.inbound[EdgeName(edge)].assign(int(index), Walk(text(walk)))
