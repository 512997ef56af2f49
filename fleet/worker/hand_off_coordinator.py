"""Tasks on their way from one worker to the next: what a turn of the loop does about them, at both ends. Knows no walk's work.

The source ends a task in its engine with the first output of the next role's walk, and gives it up after that output is appended.
The new owner opens it from the logs as any owner does, and goes on once the blocks are here and confirmed, or will not come.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from fleet.config.roles import Role
from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.clock import now_us
from fleet.core.errors import TransferError
from fleet.core.hand_off import HandOff, encode_hand_off
from fleet.core.ids import RequestId, RoleName, Walk, WorkerId
from fleet.core.pulls import KV, PullTally
from fleet.core.receipts import TOLD as RECEIVED
from fleet.engine.base import Engine, EngineOutput, KVBlocks, KVPages
from fleet.transfer.base import Transfer
from fleet.worker.hand_off import KVImport, Offer, Offers
from fleet.worker.task import Task

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""How long an offer stands that nobody takes."""
MEET_S = 2.0
"""How often workers are looked for that have not been met."""
TOLD = "hand_off"
PendingCall = tuple[scripts.Call, Callable[[Reply], None]]
"""A script to run, and what to do with its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingHandOff:
    task: Task
    blocks: KVBlocks | KVPages | None
    prefilled_us: int


class HandOffCoordinator:
    """Both ends, for one worker. `tasks` are the loop's own, and `finish` and `drop` are what it does when one ends.

    `source`: the role that hands off to this one. `walks`: of the stage, in order.
    """

    def __init__(
        self, worker: WorkerId, serves: Role, source: RoleName | None, walks: tuple[Walk, ...], engine: Engine,
        transfer: Transfer, tasks: Mapping[RequestId, Task], finish: Callable[[Task], None], drop: Callable[[RequestId], None],
        tally: PullTally,
    ) -> None:  # fmt: skip
        self._worker, self._serves, self._source, self._walks = worker, serves, source, walks
        self._engine, self._transfer = engine, transfer
        self._tasks, self._finish, self._drop = tasks, finish, drop
        self._tally = tally
        self._giving: list[_PendingHandOff] = []
        self._told: list[scripts.Call] = []
        self._abandoned: list[KVImport] = []
        self._met: set[WorkerId] = set()
        self._meet_again_s = 0.0
        self.offers = Offers(engine, transfer, worker, LEASE_S)

    def confirms(self, posts: Sequence[PendingCall]) -> bool:
        """Whether a task goes on with the answers to these."""
        return any(call.script == "confirm" for call, _ in posts)

    def connect_to_sources(self, workers_of: Callable[[RoleName], list[WorkerId]], peer: Callable[[WorkerId], bytes]) -> None:
        """Make ready to read from a worker of the role before this one: the first read of all would else take long (0.2 s of
        computing, measured). Called while there is nothing else to do; one worker at a time, and now and then.
        """
        now = time.monotonic()
        if self._source is None or now < self._meet_again_s:
            return
        self._meet_again_s = now + MEET_S
        listed = workers_of(self._source)
        self._met &= set(listed)
        stranger = next((worker for worker in listed if worker not in self._met), None)
        if stranger is None:
            return
        self._meet_again_s = now
        self._met.add(stranger)
        try:
            self._transfer.connect(stranger, peer(stranger))
        except TransferError as error:
            log.info("%s could not be met: %s", stranger, error.message)

    def consider_giving(self, task: Task, output: EngineOutput, ended_us: int) -> None:
        """This role's walks are over with the first outputs of the next one: another worker goes on from here. `output` is the
        task's last one of this step, since an answer's given tokens come in one, its end with them.
        """
        is_next = self._serves.next is not None and output.walk == self._walks[-1]
        if not is_next or output.final or task.handed_off or task.all_ended() or task.request not in self._tasks:
            return
        task.handed_off = True
        self._giving.append(_PendingHandOff(task=task, blocks=self.offers.finish(task.request), prefilled_us=ended_us))

    def tell(self, task: Task, resumed_us: int) -> None:
        """If this is the first step of a task that came from another worker, the way here can be told."""
        if task.timings is not None and task.kv_import is None:
            line = encode_hand_off(msgspec.structs.replace(task.timings, resumed_us=resumed_us))
            self._told.append(scripts.set_task_metadata(task.request, task.stage, task.epoch, TOLD, line))
            task.timings = None

    def stories(self) -> list[PendingCall]:
        """To be written before the chunk that may end the task."""
        told, self._told = self._told, []
        return [(call, _ignore) for call in told]

    def posts(self) -> list[PendingCall]:
        """Offers that nobody took in time, blocks that are here, and hand-offs: after a task's chunks."""
        self._abandoned = [adoption for adoption in self._abandoned if not adoption.free_pages()]
        stage = self._serves.stage
        posts: list[PendingCall] = [
            (scripts.release(request, stage, self._worker), partial(self._withdrawn, request))
            for request in self.offers.overdue()
        ]
        for task in self._arrived():
            posts.append((scripts.confirm(task.request, task.stage, task.epoch), partial(self._adopt, task)))
        return posts + self._gifts()

    def _withdrawn(self, request: RequestId, _reply: Reply) -> None:
        """Nobody can take it any more; or it was taken, and the notice of that is on its way."""
        self.offers.free(request)

    def _gifts(self) -> list[PendingCall]:
        """Hand-offs of tasks that have come to the end of this role's walks."""
        giving, self._giving = self._giving, []
        posts: list[PendingCall] = []
        for gift in giving:
            task, role = gift.task, self._serves.next
            if self._tasks.get(task.request) is not task or role is None:
                if isinstance(gift.blocks, KVPages):
                    self._engine.free_pages(gift.blocks)
                continue
            assert not task.unsent, "what was made here goes before the hand-off, or nobody would make it"
            posts += [(call, _ignore) for call in told_of(task, self._worker)]
            offer = self.offers.publish(task.request, gift.blocks)
            call = scripts.hand_off(
                task.request, task.stage, task.epoch, self._worker, role, prefilled_us=gift.prefilled_us,
                num_rows=offer.num_rows if offer else 0, pages=offer.pages if offer else None,
                location=offer.location if offer else None, data=offer.data if offer else b"",
            )  # fmt: skip
            posts.append((call, partial(self._settle_gift, task)))
        return posts

    def _settle_gift(self, task: Task, reply: Reply) -> None:
        if text(cast("list[Reply]", reply)[0]) != "ok":
            self.offers.free(task.request)
            self._drop(task.request)
        elif self._tasks.get(task.request) is task:
            self._finish(task)

    def arrive(
        self, task: Task, offer: Offer, fields: Mapping[str, bytes], peer: Callable[[WorkerId], bytes], deadline_s: float
    ) -> None:
        """A task was opened that comes with blocks: begin to pull them. `fields`: what its hash says."""
        before = {name: int(fields[name]) for name in ("prefilled_us", "handed_us", "claimed_us")}
        task.timings = HandOff(**before, opened_us=now_us())
        task.kv_import = KVImport(offer, self._engine, self._transfer, peer, deadline_s)
        task.kv_import.poll()

    def _arrived(self) -> list[Task]:
        """Tasks whose blocks are here, and whose input reaches as far as it did when they were opened: to be confirmed."""
        due: list[Task] = []
        for task in self._tasks.values():
            if task.kv_import is None:
                continue
            task.kv_import.poll()
            if task.kv_import.failed:
                self._tally.failed(KV)
                log.warning("request %s: what %s computed could not be pulled; it is computed here", task.request, task.stage)
                self.forget(task)
            elif task.kv_import.blocks is not None and task.has_read_logs():
                due.append(task)
        return due

    def _adopt(self, task: Task, reply: Reply) -> None:
        """The blocks are ours if they were still on offer; if not, they are computed here."""
        adoption, task.kv_import = task.kv_import, None
        if adoption is None:
            return
        is_ours = self._tasks.get(task.request) is task and text(reply) == "ok"
        if not is_ours or not adoption.import_into(task.request):
            self._abandoned.append(adoption)
            return
        self._note_pull(task, adoption)
        if task.timings is not None:
            task.timings = msgspec.structs.replace(task.timings, pulled_us=adoption.pulled_us, confirmed_us=now_us())
        task.adopted(self._walks[:-1])

    def _note_pull(self, task: Task, adoption: KVImport) -> None:
        if task.timings is not None and adoption.pulled_us is not None:
            self._tally.ended(KV, adoption.num_bytes, max(0, adoption.pulled_us - task.timings.opened_us))

    def forget(self, task: Task) -> None:
        """Its blocks are not wanted any more."""
        if task.kv_import is not None:
            task.kv_import.cancel()
            self._abandoned.append(task.kv_import)
            task.kv_import = None

    def close(self) -> None:
        """The incarnation has lost its rights and its transfer is closed: nobody reads from our pages or writes into them."""
        giving, self._giving = self._giving, []
        for gift in giving:
            if isinstance(gift.blocks, KVPages):
                self._engine.free_pages(gift.blocks)
        for task in self._tasks.values():
            self.forget(task)
        abandoned, self._abandoned = self._abandoned, []
        for adoption in abandoned:
            assert adoption.free_pages(), "a read goes on although its transfer is closed"
        for request in self.offers.open_requests():
            self.offers.free(request)


def told_of(task: Task, worker: WorkerId) -> list[scripts.Call]:
    """What its owner tells of a task when it has done with it, while it still has the right to."""
    line = task.receipts.line(worker)
    return [scripts.set_task_metadata(task.request, task.stage, task.epoch, f"{RECEIVED}:{task.epoch}", line)] if line else []


def _ignore(_reply: Reply) -> None:
    """A story that is refused is another owner's to tell."""
