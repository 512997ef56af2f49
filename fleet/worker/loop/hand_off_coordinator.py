"""Hand-offs of tasks between the roles of a split stage, from prefill to decode, at both ends of a
hand-off.

The source ends a task in its engine with the first output of the next role's walk, and hands it off
after that output is appended. The new owner opens the task from its logs, as any owner does, and
resumes it once the KV blocks are imported or cannot arrive.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.clock import now_us
from fleet.core.errors import TransferError
from fleet.core.hand_off import HandOff, encode_hand_off
from fleet.core.ids import RequestId, WorkerId
from fleet.engine.base import EngineOutput
from fleet.engine.capabilities import KVBlocks, KVPages
from fleet.telemetry.counts import KV
from fleet.worker.context import WorkerContext
from fleet.worker.loop.parts import WorkerParts
from fleet.worker.task.hand_off import ImportState, KVImport, Offer
from fleet.worker.task.pending_calls import PendingCall, ignore_reply, statistics_calls
from fleet.worker.task.task import Task, TaskPhase

log = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Interval at which a decode worker looks for new source (prefill) workers."""
METADATA = "hand_off"


@dataclass(slots=True, kw_only=True)
class _PendingHandOff:
    """Hand-off that is not written yet. `awaited`: number of copies on offer when there was no room
    for this task's copy; the hand-off is tried again once fewer are on offer. 0 before the first
    try.
    """

    task: Task
    blocks: KVBlocks | KVPages | None
    prefilled_us: int
    awaited: int = 0


class HandOffCoordinator:
    """Hand-offs of tasks from and to this worker: as the source it offers KV blocks, as the new
    owner it imports them.
    """

    def __init__(self, context: WorkerContext, parts: WorkerParts) -> None:
        self._worker, self._serves = context.worker, context.settings.serves
        roles = context.config.roles_of(context.stage)
        self._source = next((role.name for role in roles if role.next == self._serves.name), None)
        self._walks = context.graph.stage(context.stage).walks
        self._deadline_s = context.config.transfer.deadline_s
        self._kv = context.engine.kv
        self._transfer = context.transfer
        self._link = context.link
        self._tasks, self._receiver = parts.tasks, parts.receiver
        self._offers, self._imports = parts.offers, parts.imports
        self._tally = parts.pull_tally
        self._pending: list[_PendingHandOff] = []
        self._metadata: list[PendingCall] = []
        self._connected: set[WorkerId] = set()
        self._connect_again_s = 0.0

    def connect_to_sources(self) -> None:
        """Connect to one worker of the source role to which there is no connection yet. Without a
        connection, the first read from it takes 0.2 s longer (measured).

        Call while the worker is idle.
        """
        now = time.monotonic()
        if self._source is None or now < self._connect_again_s:
            return
        self._connect_again_s = now + CONNECT_S
        listed = self._link.find_workers(self._source)
        self._connected &= set(listed)
        new = next((worker for worker in listed if worker not in self._connected), None)
        if new is None:
            return
        self._connect_again_s = now
        self._connected.add(new)
        try:
            self._transfer.connect(new, self._receiver.peer(new))
        except TransferError as error:
            log.info("worker %s cannot be connected to ahead of a hand-off: %s", new, error.message)

    def has_room(self) -> bool:
        """Return False while blocks on offer leave this worker no room to offer further ones."""
        return self._offers.has_room()

    def start_if_due(self, task: Task, output: EngineOutput, ended_us: int) -> None:
        """Start a task's hand-off if `output` is the first one of the next role's walk. `ended_us`:
        time at which the engine's step ended.

        `output` must be the task's last one of this step: tokens of an answer that the request
        contains are all returned in one step.
        """
        is_next = self._serves.next is not None and output.walk == self._walks[-1]
        started = task.phase is TaskPhase.HANDED_OFF
        if (
            not is_next
            or output.final
            or started
            or task.all_ended()
            or task.request not in self._tasks
        ):
            return
        task.enter(TaskPhase.HANDED_OFF)
        task.release_held()
        self._pending.append(
            _PendingHandOff(
                task=task, blocks=self._offers.finish(task.request), prefilled_us=ended_us
            )
        )

    def record_resumption(self, task: Task, resumed_us: int) -> None:
        """Queue the write of a hand-off's timings, with the time `resumed_us` of the task's first
        step here.
        """
        if task.timings is not None and task.kv_import is None:
            line = encode_hand_off(msgspec.structs.replace(task.timings, resumed_us=resumed_us))
            self._metadata.append(
                (
                    scripts.set_task_metadata(task.request, task.stage, task.epoch, METADATA, line),
                    ignore_reply,
                )
            )
            task.timings = None

    def take_metadata_calls(self) -> list[PendingCall]:
        """Return, once, the writes of hand-off timings. Redis must run them before the chunk that
        may end the task.
        """
        calls, self._metadata = self._metadata, []
        return calls

    def take_calls(self) -> list[PendingCall]:
        """Return the scripts that withdraw offers, confirm or decline imports and hand tasks off,
        to run after the tasks' chunks are appended.
        """
        self._imports.free_pages()
        calls: list[PendingCall] = [
            (
                scripts.release(request, self._serves.stage, self._worker),
                partial(self._settle_release, request),
            )
            for request in self._offers.withdrawn()
        ]
        return calls + self._import_calls() + self._hand_off_calls()

    def _settle_release(self, request: RequestId, _reply: Reply) -> None:
        """Free a withdrawn offer's blocks. Either no worker can import them now, or one has
        imported them and its notice is on the way.
        """
        self._offers.free(request)

    def _hand_off_calls(self) -> list[PendingCall]:
        pending, self._pending = self._pending, []
        calls: list[PendingCall] = []
        for hand_off in pending:
            task, role = hand_off.task, self._serves.next
            if self._tasks.get(task.request) is not task or role is None:
                self._offers.free_blocks(hand_off.blocks)
                continue
            assert not task.unsent, (
                "chunks produced here go before the hand-off; the next owner does not produce them"
            )
            if hand_off.awaited and self._offers.num_copies() >= hand_off.awaited:
                self._pending.append(hand_off)
                continue
            offer = self._offers.publish(task.request, hand_off.blocks)
            hand_off.awaited = self._offers.num_copies()
            if hand_off.blocks is not None and offer is None and hand_off.awaited:
                self._pending.append(hand_off)
                continue
            calls += statistics_calls(task, self._worker)
            call = scripts.hand_off(
                task.request,
                task.stage,
                task.epoch,
                self._worker,
                role,
                prefilled_us=hand_off.prefilled_us,
                num_rows=offer.num_rows if offer else 0,
                pages=offer.pages if offer else None,
                location=offer.location if offer else None,
                data=offer.data if offer else b"",
                produced={name: edge.produced for name, edge in task.outbound.items()},
            )
            calls.append((call, partial(self._settle_hand_off, task)))
        return calls

    def _settle_hand_off(self, task: Task, reply: Reply) -> None:
        if text(cast("list[Reply]", reply)[0]) != "ok":
            self._offers.free(task.request)
            self._tasks.drop(task.request)
        elif self._tasks.get(task.request) is task:
            self._tasks.finish(task)

    def begin_import(self, task: Task, offer: Offer, fields: Mapping[str, bytes]) -> None:
        """Begin to pull the KV blocks offered with a task that was just opened. `fields`: the
        task's hash in Redis.
        """
        before = {name: int(fields[name]) for name in ("prefilled_us", "handed_us", "claimed_us")}
        task.timings = HandOff(**before, opened_us=now_us())
        kv_import = KVImport(offer, self._kv, self._transfer, self._receiver.peer, self._deadline_s)
        task.begin_import(kv_import)
        kv_import.poll()

    def _import_calls(self) -> list[PendingCall]:
        """Return the confirmations of imports whose blocks have arrived, once the tasks have
        consumed all inputs that were logged when they were opened. Abandon imports that have
        failed, and decline their offers.
        """
        calls: list[PendingCall] = []
        for task in self._tasks.values():
            if task.kv_import is None:
                continue
            task.kv_import.poll()
            key = (task.request, task.stage, task.epoch)
            if task.kv_import.state is ImportState.FAILED:
                self._tally.failed(KV)
                log.warning(
                    "request %s: the blocks of %s could not be pulled; it is computed here",
                    task.request,
                    task.stage,
                )
                self._imports.abandon(task.end_import())
                calls.append((scripts.decline(*key), ignore_reply))
            elif task.kv_import.state is ImportState.ARRIVED and task.has_read_logs():
                task.kv_import.enter(ImportState.CONFIRMING)
                calls.append((scripts.confirm(*key), partial(self._settle_confirm, task)))
        return calls

    def _settle_confirm(self, task: Task, reply: Reply) -> None:
        """Give a task's imported blocks to the engine if Redis confirms that they were still on
        offer; otherwise the engine computes the positions itself.
        """
        kv_import = task.end_import()
        if kv_import is None:
            return
        is_confirmed = self._tasks.get(task.request) is task and text(reply) == "ok"
        if not is_confirmed or not kv_import.import_into(task.request):
            self._imports.abandon(kv_import)
            return
        if task.timings is not None:
            pulled_us = kv_import.pulled_us or task.timings.opened_us
            self._tally.ended(KV, kv_import.num_bytes, max(0, pulled_us - task.timings.opened_us))
            task.timings = msgspec.structs.replace(
                task.timings, pulled_us=kv_import.pulled_us, confirmed_us=now_us()
            )
        task.skip_walks(self._walks[:-1])

    def close(self) -> None:
        """Free all blocks. Call once the incarnation has lost its rights and its transfer is
        closed, so that no peer reads or writes them.
        """
        pending, self._pending = self._pending, []
        for hand_off in pending:
            self._offers.free_blocks(hand_off.blocks)
        for task in self._tasks.values():
            self._imports.abandon(task.end_import())
        self._imports.close()
        for request in self._offers.open_requests():
            self._offers.free(request)
