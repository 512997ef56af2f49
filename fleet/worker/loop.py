"""The worker's loop, on one screen: step the engine, send what it made, take in what came, feed it.

One pipelined round trip per turn; no wait for the conductor. A failure of one request is that request's; the loop goes on. Raises
redis's errors: without the line to it there is no right to anything, and whoever runs the loop begins a new incarnation.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import psutil
from redis.exceptions import RedisError

from fleet.config import FleetConfig
from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.control.notices import (
    ChunkNotice,
    CreditNotice,
    EndNotice,
    FreeNotice,
    Notice,
    OrderNotice,
    PromotionNotice,
    RelocationNotice,
    TakenNotice,
    WalkNotice,
)
from fleet.core.clock import now_us
from fleet.core.errors import ChunkOrderError, FleetError, failure_of
from fleet.core.events import TaskFailed
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.pulls import PullTally
from fleet.core.telemetry import WorkerOrder
from fleet.engine.base import EngineOutput
from fleet.stages.base import BuiltStage
from fleet.transfer.base import Transfer
from fleet.worker.cached_sessions import CachedSessions
from fleet.worker.claim import parse_claim
from fleet.worker.hand_off_coordinator import HandOffCoordinator, PendingCall, told_of
from fleet.worker.receive import Receiver
from fleet.worker.redis_link import Grant, RedisLink
from fleet.worker.send import Sender
from fleet.worker.task import Task, made_before, open_task

log = logging.getLogger(__name__)

IDLE_BLOCK_MS = 200
PULL_POLL_S = 0.0005
SLOW_POLL_S = 0.5
LEAVE_S = 60.0


class WorkerLoop:
    """Serves one role. `turn()` is the whole loop body; every attribute is touched by this thread only."""

    def __init__(
        self, config: FleetConfig, worker: WorkerId, role: RoleName, built: BuiltStage, link: RedisLink, transfer: Transfer
    ) -> None:
        self.config, self.worker, self.role, self.built = config, worker, role, built
        self.engine, self.link, self.transfer = built.engine, link, transfer
        self.serves = config.role(role)
        self.stage = self.serves.stage
        self.capacity = config.stage(self.stage).max_batch
        self.tasks: dict[RequestId, Task] = {}
        self.lingering: set[RequestId] = set()
        self.sender = Sender(transfer, worker)
        self.pulls = PullTally()
        self.receiver = Receiver(transfer, link, config.transfer.deadline_s, self.pulls)
        self.failures: list[TaskFailed] = []
        self.reserved: list[Grant] = []
        graph = config.graph_declaration()
        self.inputs = [edge.name for edge in graph.edges_to(self.stage)]
        self.outputs = {edge.name: edge.target for edge in graph.edges_from(self.stage)}
        walks = graph.stage(self.stage).walks
        source = next((other.name for other in config.roles_of(self.stage) if other.next == role), None)
        self.hand_offs = HandOffCoordinator(
            worker, self.serves, source, walks, self.engine, transfer, self.tasks, self._finish, self._drop, self.pulls
        )
        whole = len(config.roles_of(self.stage)) == 1  # between halves, who ends a task is not who begins the next
        most = config.limits.max_cached_conversations if whole else 0
        self.sessions = CachedSessions(self.engine, worker, keep_s=config.lease.prefix_cache_s, most=most)
        self.told: list[PendingCall] = []
        self.next_poll = 0.0
        self.vitals: dict[str, int | str] = {}
        self.draining = self.leaving = False
        self.standing_by = False
        self._process = psutil.Process()
        self._leave_by_s = math.inf

    def run(self, stopping: Callable[[], bool], progress: Callable[[], None]) -> None:
        while not stopping():
            self.turn()
            progress()
        self._take_vitals()

    def apply_order(self, order: WorkerOrder) -> None:
        """What people bid it: to take nothing new, to take tasks again, or to leave when it has done what it has. What they ask
        of it besides, its lease's thread answers: this one may be what hangs.
        """
        if order == "dump":
            return
        self.draining = order != "resume"
        self.standing_by = False
        if order == "stop":
            self.leaving = True
            self._leave_by_s = time.monotonic() + LEAVE_S

    def may_leave(self) -> bool:
        """Whether it was told to stop, and has done what it had or has had time enough: what is left goes on elsewhere."""
        return self.leaving and (not self.holds_anything() or time.monotonic() > self._leave_by_s)

    def holds_anything(self) -> bool:
        """Whether somebody waits for what is here: of a worker that leaves, at most for a while."""
        return bool(self.tasks or self.lingering or self.hand_offs.offers.open_requests())

    def turn(self) -> None:
        began_us = now_us()
        outputs = self._step()
        ended_us = now_us()
        last = {output.request_id: output for output in outputs}
        for output in outputs:
            task = self.tasks.get(output.request_id)
            if task is None:
                continue
            self.hand_offs.tell(task, began_us)
            if output.error is not None:
                self._fail(task, output.error)
            else:
                self._guard(task, lambda task=task, output=output: task.produced(output, len(self.tasks)))
                self._consider_end(task, output)
                if output is last[task.request]:
                    self.hand_offs.consider_giving(task, output, ended_us)
        self._exchange()
        self._feed()

    def _consider_end(self, task: Task, output: EngineOutput) -> None:
        """What the engine keeps of a task is told before its last chunk is, after which another may hold the right."""
        if task.adapter.is_stopped() and task.all_ended():
            self.engine.finish(task.request)
        elif not output.final:
            return
        self.sessions.ended(task)

    def _step(self) -> Sequence[EngineOutput]:
        if not self.engine.is_ready():
            return ()
        try:
            return self.engine.step()
        except Exception as error:  # the process loop: the batch is lost, the worker is not
            log.exception("a batch of %d failed", len(self.tasks))
            self._lose_batch(error)
            return ()

    def _lose_batch(self, error: Exception) -> None:
        """Nobody can tell whose fault it was, nor what the engine has left of those that took part: each goes on from its log,
        as if this worker had died. So the one at fault comes to run alone, and fails alone.
        """
        held = list(self.tasks.values())
        took_part = [task for task in held if not task.paused] or held
        if len(took_part) == 1:
            self._fail(took_part[0], failure_of("the engine failed the request", error))
            return
        for task in took_part:
            self.told.append((scripts.lose_task(task.request, task.stage, task.epoch), _ignore))
            self.engine.abort(task.request)
            self._finish(task)

    def _exchange(self) -> None:
        """The turn's one round trip: every write out; answers, notices and grants in."""
        posts = self._posts()
        ask = self._poll_due()
        mail = self.link.exchange(
            [call for call, _ in posts],
            free_slots=self._free_slots(),
            block_ms=self._block_ms(bool(self.failures) or self.hand_offs.confirms(posts)),
            ask_live=ask,
        )
        self.failures, self.receiver.lost = [], []
        for (_, settle), reply in zip(posts, mail.replies, strict=True):
            settle(reply)
        for notice in mail.notices:
            self._deliver(notice)
        for request, live in zip(ask, mail.still_live, strict=True):
            if not live:
                self._drop(request, keep=True)
        self._take(mail.grants)

    def _posts(self) -> list[PendingCall]:
        """What this turn writes, in order: a task's chunks go before its hand-off."""
        appends, relocations = self._collected()
        acks = [ack for task in self.tasks.values() if task.ack_due for ack in task.acks_due()]
        posts: list[PendingCall] = [(scripts.ack(acks), _ignore)] if acks else []
        told, self.told = self.told, []
        posts += told + self.hand_offs.stories() + self.sessions.posts()
        # Before the chunk that may end the task: whoever waits for these tensors would not be told of another.
        posts += [(scripts.relocate(relocation), _ignore) for relocation in relocations]
        ending = [self.tasks[item.chunk.request] for item in appends if item.finish]
        posts += [(call, _ignore) for task in ending for call in told_of(task, self.worker)]
        if appends:
            posts.append((scripts.append(appends), partial(self._settle_appends, appends)))
        posts += self._rests() + [(scripts.fail(event), _ignore) for event in self.failures]
        lost = [(task, task.producers[edge]) for task, edge in self.receiver.lost]
        posts += [(scripts.lose_tensors(task.request, task.stage, task.epoch, producer), _ignore) for task, producer in lost]
        return posts + self.hand_offs.posts()

    def _collected(self) -> tuple[list[scripts.Append], list[scripts.Relocation]]:
        appends: list[scripts.Append] = []
        relocations: list[scripts.Relocation] = []
        for task in [task for task in self.tasks.values() if task.unsent]:
            self._guard(task, lambda task=task: self.sender.collect(task, appends, relocations))
        return appends, relocations

    def _rests(self) -> list[PendingCall]:
        """Of a task that runs alone, since only such a one is condemned: whether its death from now on would be its own."""
        idle = [task for task in self.tasks.values() if task.alone and self.engine.due_in_s() == math.inf]
        due = [(task, task.rest_due()) for task in idle]
        return [(scripts.report_idle(task.request, task.stage, task.epoch, taken), _ignore) for task, taken in due if taken]

    def _block_ms(self, hurry: bool) -> int:
        due_ms = math.ceil(min(self.engine.due_in_s() * 1000, IDLE_BLOCK_MS))
        if hurry or not due_ms or self.receiver.can_advance(self.tasks.values()):
            return 0
        pulling = self.receiver.pulling() or any(task.kv_import is not None for task in self.tasks.values())
        if not pulling:
            return due_ms
        # Redis looks at the time ten times a second while nothing happens: a block of 1 ms would be one of 100 (measured).
        time.sleep(PULL_POLL_S)
        return 0

    def _free_slots(self) -> int:
        closed = self.draining or self.standing_by or self._is_for_one()
        return 0 if closed else max(0, self.capacity - len(self.tasks))

    def _is_for_one(self) -> bool:
        return bool(self.reserved) or any(task.alone for task in self.tasks.values())

    def _take(self, grants: Sequence[Grant]) -> None:
        """Claim what came; a task that is to run alone waits until nothing else runs here, and nothing new is taken meanwhile.
        What was put to this worker then is left, and granted to another when it is overdue.

        The task waits in this worker's name: granted to another as overdue, it would close that one as well, and so on.
        """
        suspects = [grant for grant in grants if grant.alone]
        self.reserved += suspects
        due = [grant for grant in grants if not grant.alone and (grant.entry or not self._is_for_one())]
        if self.reserved and not self.tasks and not due:
            due.append(self.reserved.pop(0))
        if due or suspects:
            self._claim(due)

    def _reservations(self) -> list[PendingCall]:
        return [
            (scripts.reserve(self.worker, self.role, g.entry, g.request, g.stage, g.epoch), partial(self._settle_reservation, g))
            for g in self.reserved
        ]

    def _settle_reservation(self, grant: Grant, reply: Reply) -> None:
        """One that is over must not keep this worker closed: the task has ended, or was granted anew."""
        if text(reply) != "ok" and grant in self.reserved:
            self.reserved.remove(grant)

    def _poll_due(self) -> list[RequestId]:
        """The slow poll that covers a lost notice: is what we hold still live?"""
        now = time.monotonic()
        if now < self.next_poll:
            return []
        self.next_poll = now + SLOW_POLL_S
        self._take_vitals()
        self.sessions.expire()
        self._forget_the_gone()
        self._look_for_consumers()
        for task in self.tasks.values():
            task.dirty = task.ack_due = True
        self.told += self._reservations()
        if not self.tasks:
            self.hand_offs.connect_to_sources(self.link.find_workers, self.receiver.peer)
        return list({*self.tasks, *self.lingering, *self.hand_offs.offers.open_requests()})

    def _look_for_consumers(self) -> None:
        """Who waits for credit holds a slot; the consumer that should give it may itself wait for one, and so on in a ring."""
        ahead = [(task, name) for task in self.tasks.values() for name, edge in task.outbound.items() if edge.is_ahead()]
        owners = self.link.find_owners([(task.request, self.outputs[name]) for task, name in ahead])
        for (task, name), owner in zip(ahead, owners, strict=True):
            task.outbound[name].consumer_unassigned = not owner

    def _forget_the_gone(self) -> None:
        """A frozen worker may owe us a read for ever; once it has lost its right, what it would write into is free again."""
        for peer in self.transfer.stalled_peers():
            if not self.link.is_registered(peer):
                self.transfer.forget_peer(peer)

    def _take_vitals(self) -> None:
        """Counts for the lease thread to publish; taken here because the engine is this thread's."""
        stats = self.engine.stats()
        self.vitals = {
            "running": len(self.tasks),
            "pages_used": stats.pages_used,
            "pages_total": stats.pages_total,
            "pages_kept": stats.pages_cached,
            "rows_reused": stats.rows_reused,
            "slots_used": self.transfer.used_slots(),
            "hops": self.link.hops.encoded(),
            "pulls": self.pulls.encoded(self.receiver.in_flight()),
            "used_bytes": self.transfer.used_bytes(),
            "memory_bytes": self._process.memory_info().rss,
        }

    def _settle_appends(self, appends: list[scripts.Append], reply: Reply) -> None:
        for item, raw in zip(appends, cast("list[bytes]", reply), strict=True):
            answer, task = text(raw), self.tasks.get(item.chunk.request)
            if task is None:
                continue
            if answer == "gap":
                self._fail(task, ChunkOrderError(f"edge {item.chunk.edge}: chunk {item.chunk.index} left a gap"))
            elif answer in ("stale", "ended"):
                self._drop(task.request, keep=True)
            elif item.finish:
                self._finish(task)

    def _deliver(self, notice: Notice) -> None:
        match notice:
            case ChunkNotice(chunk=chunk, location=location):
                task = self.tasks.get(chunk.request)
                if task is not None and chunk.edge in task.inbound:
                    task.receipts.arrived(chunk.edge, now_us(), chunk.made_us)
                    task.inbound[chunk.edge].put(chunk, location)
            case CreditNotice(request=request, edge=edge, consumed=consumed):
                task = self.tasks.get(request)
                if task is not None:
                    task.credited(edge, consumed)
            case RelocationNotice(request=request, edge=edge, index=index, location=location):
                task = self.tasks.get(request)
                if task is not None and edge in task.inbound:
                    task.inbound[edge].relocate(index, location)
            case WalkNotice(request=request, edge=edge, from_index=index, walk=walk):
                task = self.tasks.get(request)
                if task is not None and edge in task.inbound:
                    task.inbound[edge].assign_walk(index, walk)
            case TakenNotice():
                self._let_go(notice)
            case OrderNotice(order=order):
                self.apply_order(order)
            case PromotionNotice():
                log.info("worker %s stood by, and takes tasks from now on", self.worker)
                self.standing_by = False
            case FreeNotice(request=request):
                self.hand_offs.offers.free(request)
            case EndNotice(request=request, state=state):
                self._drop(request, keep=state == "aborted")

    def _claim(self, grants: list[Grant]) -> None:
        calls = [
            scripts.claim(self.worker, self.role, g.entry, g.request, g.stage, g.epoch, self.inputs, self.outputs) for g in grants
        ]
        kept = self._reservations()
        mail = self.link.exchange([*calls, *(call for call, _ in kept)], free_slots=0, block_ms=0)
        for (_, settle), reply in zip(kept, mail.replies[len(calls) :], strict=True):
            settle(reply)
        for grant, reply in zip(grants, mail.replies[: len(calls)], strict=True):
            answer = cast("list[Reply]", reply)
            if text(answer[0]) == "ok":
                self._open(grant, answer)
            else:
                log.info("grant of %s for %s: %s", grant.stage, grant.request, text(answer[0]))
        for notice in mail.notices:  # only now: some may be for the tasks just opened
            self._deliver(notice)
        self._take(mail.grants)

    def _open(self, grant: Grant, answer: Sequence[Reply]) -> None:
        """Begin a claimed task, or go on where an earlier owner's log ends: the logs as the claim saw them, then the inbox; the
        index removes repeats.
        """
        try:
            claimed = parse_claim(answer, self.inputs, list(self.outputs))
            spec, fields, logs = claimed.spec, claimed.fields, claimed.logs
            adapter = self.built.adapter(spec, logs.blob)
            task = open_task(spec, grant.stage, grant.epoch, adapter, self.config, logs=logs, alone=grant.alone)
            for edge, arrived in logs.inputs.items():
                for chunk, location in arrived:
                    task.inbound[edge].put(chunk, location)
            _assign_walks(task, fields)
            request, first = adapter.open(made_before(logs))
            self.engine.submit(self.sessions.joined(request, spec.session))
            self.tasks[grant.request] = task
            for piece in first:
                task.cached_rows += self.engine.feed(grant.request, piece)
            if logs.offer is not None:
                self.hand_offs.arrive(task, logs.offer, fields, self.receiver.peer, self.config.transfer.deadline_s)
                self.engine.pause(grant.request, paused=True)
                task.paused = True
        except RedisError:
            raise  # the connection's, not the request's: it goes on in another incarnation
        except FleetError as error:
            self._report(grant.request, grant.stage, grant.epoch, error)
            self._drop(grant.request)
        except Exception as error:  # the process loop: this request fails, the others go on
            log.exception("request %s could not be opened", grant.request)
            self._report(grant.request, grant.stage, grant.epoch, failure_of("the request could not be opened", error))
            self._drop(grant.request)

    def _feed(self) -> None:
        """Move arrived chunks into the engine, and tell it who has no credit. Tasks for which nothing came are passed over."""
        for task in [task for task in self.tasks.values() if task.may_move()]:
            self._guard(task, lambda task=task: self._feed_one(task))

    def _feed_one(self, task: Task) -> None:
        task.dirty = False
        for edge, walk, arrays, final in self.receiver.advance(task):
            task.ack_due = True
            for piece in task.adapter.consume(edge, walk, arrays, final=final):
                task.cached_rows += self.engine.feed(task.request, piece)
        if task.adapter.is_stopped() and task.all_ended():
            self.engine.finish(task.request)
        paused = not task.has_credit() or task.kv_import is not None
        if paused != task.paused:
            task.paused = paused
            self.engine.pause(task.request, paused=paused)

    def _guard(self, task: Task, work: Callable[[], None]) -> None:
        try:
            work()
        except RedisError:
            raise
        except FleetError as error:
            self._fail(task, error)
        except Exception as error:  # the process loop: this request fails, the others go on
            log.exception("request %s failed", task.request)
            self._fail(task, failure_of(f"stage {self.stage} failed the request", error))

    def _fail(self, task: Task, error: FleetError) -> None:
        self._report(task.request, task.stage, task.epoch, error)
        self._drop(task.request)

    def _report(self, request: RequestId, stage: StageName, epoch: Epoch, error: FleetError) -> None:
        log.warning("request %s fails in %s: %s", request, stage, error.message)
        event = TaskFailed(request=request, stage=stage, epoch=epoch, code=error.code, message=error.message, param=error.param)
        self.failures.append(event)

    def _finish(self, task: Task) -> None:
        """Our part is done; published tensors stay until the request ends, for its consumers may still pull them."""
        self.engine.finish(task.request)
        self.receiver.forget(task.request)
        self.hand_offs.forget(task)
        self.tasks.pop(task.request, None)
        if self.sender.published(task.request):
            self.lingering.add(task.request)
        self._note_idle()

    def _let_go(self, taken: TakenNotice) -> None:
        """People took a task back: it goes on from its log wherever it is granted next, here or elsewhere."""
        task = self.tasks.get(taken.request)
        if task is not None and task.stage == taken.stage and task.epoch < taken.epoch:
            log.warning("request %s is taken back from %s", task.request, self.worker)
            self.engine.abort(task.request)
            self._finish(task)

    def _drop(self, request: RequestId, *, keep: bool = False) -> None:
        """Forget a request at once, whatever it was doing, and free all it held; but, to `keep`, not what its session had lent
        it: what was computed is as good as that of a turn that came to its end, and the next one begins with it.
        """
        task = self.tasks.get(request)
        if keep and task is not None and self.sessions.keeps(task.spec.session):
            self.engine.finish(request)
        else:
            self.engine.abort(request)
        self.receiver.forget(request)
        self.sender.release(request)
        self.hand_offs.offers.expire(request)
        task = self.tasks.pop(request, None)
        if task is not None:
            self.hand_offs.forget(task)
        self.lingering.discard(request)
        self._note_idle()

    def _note_idle(self) -> None:
        """Whoever waits for all stages to be idle need not wait for the slow poll."""
        if not self.tasks:
            self._take_vitals()


def _ignore(_reply: Reply) -> None:
    """A write whose refusal only says that somebody else has the right now; the end of the task is told by other means."""


def _assign_walks(task: Task, fields: dict[str, bytes]) -> None:
    """Walks the conductor set before this worker claimed: fields `walk:{edge}:{index}` of the task's hash."""
    for field, walk in fields.items():
        head, _, rest = field.partition(":")
        edge, _, index = rest.rpartition(":")
        if head == "walk" and edge in task.inbound:
            task.inbound[EdgeName(edge)].assign_walk(int(index), Walk(text(walk)))
