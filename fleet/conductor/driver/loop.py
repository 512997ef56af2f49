"""Process loop of the conductor: acquires leadership, reads the stream of events, runs commands,
and watches leases and overdue grants.

Any number of conductors may run; one leads, the rest stand by. The leader fences a worker once it
has seen the worker's lease unrenewed for the lease's whole duration on its own clock
(`fleet.conductor.leases`). That duration begins again when leadership changes, when Redis returns,
and when this process was suspended.
"""

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from fleet.conductor.driver.snapshot import lost_grants, missed_facts, read_live, read_request
from fleet.conductor.invariants import violations
from fleet.conductor.leases import ClockComparison, LeaseWatch
from fleet.conductor.state import ConductorState, TaskState
from fleet.conductor.step import granted_role, step
from fleet.config import FleetConfig
from fleet.config.schema import RENEWALS
from fleet.control import keys, scripts
from fleet.control.connect import (
    Reply,
    connect,
    exchange,
    first_text,
    run,
    stream_entries,
    text,
    texts,
    worker_ids,
)
from fleet.control.outage import Outage, cause_of, is_away
from fleet.control.redis_status import memory_of
from fleet.core import events as ev
from fleet.core.commands import AbandonRequest, Command, EndRequest, FenceWorker, GrantTask, SetWalk
from fleet.core.errors import TransitionError
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, StageName, WorkerId, new_worker_id
from fleet.process.gc_freeze import freeze_gc

log = logging.getLogger(__name__)

TICK_MS = 200
BATCH = 256
BEFORE_ALL = "0-0"
"""Stream position before every event, for a leader that found `events` empty."""
SWEEP_S = 1.0
EARLY_PERCENT, SWEPT_EARLY = 5.0, 20
"""Early deletion of retained audio. `EARLY_PERCENT`: distance below
`limits.max_redis_memory_percent` at which it begins, in percentage points. `SWEPT_EARLY`: number of
requests whose audio one call deletes.
"""
WATCH_SLICE = 500
"""Number of overdue grants handled in one turn. Between two turns leadership is renewed and events
are read.
"""


class Driver:
    """A conductor process. `turn()` reads events, decides and acts once; `run()` repeats it until
    `stopping` is set. `me`: id of this process. `clock`: monotonic time in seconds.
    """

    def __init__(
        self,
        config: FleetConfig,
        client: Redis,
        me: WorkerId,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.client = client
        self.me = me
        self._clock = clock
        self.leader = ""
        self.last_id = "0-0"
        self.state = self.checked = self._empty()
        """`checked`: the state as it was when its invariants were last checked."""
        self.granted_at: dict[tuple[RequestId, StageName], float] = {}
        self.took_over_at = 0.0
        """Start of this conductor's leadership, or the last time that Redis's clock was set. Absent
        workers were not observed before this time.
        """
        self.orphans: dict[RequestId, tuple[float, Epoch]] = {}
        """Requests whose gateway is lost: time of the loss, and the epoch of the client edges."""
        self._leases = LeaseWatch()
        self._redis_clock = ClockComparison()
        self.led_at = clock()
        self.next_watch = self._next_sweep = 0.0
        self.stopping = False
        self._outage = Outage(f"conductor {me}")
        self._must_read = False
        """True after a turn that ended with a Redis error: the state may be ahead of what was
        written, so the next turn reads it again.
        """

    def _empty(self) -> ConductorState:
        graph = self.config.graph_declaration()
        driven = {
            s.name
            for s in graph.all_stages
            if self.config.transition_source_of(s.name) == "conductor"
        }
        first = {stage.name: self.config.roles_of(stage.name)[0].name for stage in graph.all_stages}
        return ConductorState(conductor_driven=frozenset(driven), first_roles=first)

    def run(self) -> None:
        while not self.stopping:
            try:
                self.turn()
                self._outage.end()
            except RedisError as error:
                if not is_away(error):
                    raise
                self._must_read = True
                time.sleep(self._outage.add(error))

    def resign(self) -> None:
        """Give up leadership. If Redis does not answer, the leadership lapses on its own."""
        try:
            if self.leader:
                run(self.client, scripts.lead(self.me, self.leader, 1))
        except RedisError as error:
            log.warning(
                "the lead of %s lapses, since it could not be given up: %s",
                self.me,
                cause_of(error),
            )

    def turn(self) -> None:
        """Run one turn: renew leadership, read events, decide and act. A conductor that does not
        lead only waits.
        """
        if not self._lead():
            time.sleep(TICK_MS / 1000)
            return
        for event in self._read():
            if not self._still_leads():
                return
            self._apply(event)
        if self._clock() >= self.next_watch:
            self._watch()

    def _lead(self) -> bool:
        lease_ms = int(self.config.lease.conductor_ttl_s * 1000)
        value = text(run(self.client, scripts.lead(self.me, self.leader, lease_ms)))
        self.led_at = self._clock()
        if value and (value != self.leader or self._must_read):
            self.leader = value
            self._must_read = False
            self._take_over()
        elif not value:
            self.leader = ""
        return bool(value)

    def _still_leads(self) -> bool:
        """Return True if this process still leads. Renews leadership if due, for loops that may
        outlast its lease.
        """
        leader = self.leader
        if self._clock() - self.led_at <= self.config.lease.conductor_ttl_s / RENEWALS:
            return True
        return self._lead() and self.leader == leader

    def _take_over(self) -> None:
        self._leases = LeaseWatch()
        self._redis_clock = ClockComparison()
        self.orphans = {}
        self.took_over_at = self._clock()
        live = self._read_state()
        log.info("conductor %s leads now; %d live requests", self.me, live)

    def _read_state(self) -> int:
        """Replace the state by one read from the hashes of all live requests; return their number.

        Events after the saved position may repeat facts that were just read; a repeated fact
        changes nothing.
        """
        last = cast("list[tuple[bytes, object]]", self.client.xrevrange(keys.EVENTS, count=1))
        self.last_id = text(last[0][0]) if last else BEFORE_ALL
        self.state = self._empty()
        self.granted_at = {}
        live = read_live(self.client)
        for request in live:
            if not self._still_leads():
                break
            record = read_request(self.client, request)
            if record is None:
                continue
            self.state = self.state.with_request(record)
            for task in record.tasks.values():
                if task.state is TaskState.GRANTED:
                    self.granted_at[record.id, task.stage] = self._clock()
            for fact in missed_facts(
                self.client, record, drives_walks=bool(self.state.conductor_driven)
            ):
                self._apply(fact)
        return len(live)

    def _read(self) -> list[ev.AnyEvent]:
        """Return the next events. If Redis trimmed events before they were read, read the whole
        state from the hashes instead, and return an empty list.

        Trimming removes the oldest entries, so nothing is missing as long as the last event that
        was read is still stored.
        """
        # Not beyond the next deadline: clients wait as long as a lapsed lease is not noticed.
        block_ms = min(TICK_MS, math.ceil((self.next_watch - self._clock()) * 1000))
        # Redis ends even the shortest wait only at its next tick, up to 100 ms later.
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        last = self.last_id
        read = ("XREAD", "COUNT", BATCH, *block, "STREAMS", keys.EVENTS, last)
        reply, last_read = exchange(self.client, (), read, ("XRANGE", keys.EVENTS, last, last))
        streams = cast("list[tuple[bytes, Reply]]", reply or [])
        if streams and not last_read:
            if last != BEFORE_ALL:
                log.warning(
                    "events after %s were trimmed before this conductor read them; it reads the "
                    "live requests again",
                    last,
                )
            self._read_state()
            return []
        found: list[ev.AnyEvent] = []
        for _, entries in streams:
            for entry_id, fields in stream_entries(entries):
                self.last_id = entry_id
                found.append(ev.decode_event(fields["e"]))
        return found

    def _apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.TaskGranted | ev.TaskHandedOff):
            self.granted_at[event.request, event.stage] = self._clock()
        elif isinstance(event, ev.TaskClaimed):
            self.granted_at.pop((event.request, event.stage), None)
            if event.stage == CLIENT:
                self.orphans.pop(event.request, None)
        elif isinstance(event, ev.TaskLost) and event.stage == CLIENT:
            if event.epoch != self.orphans.get(event.request, (0.0, None))[1]:
                self.orphans[event.request] = (self._clock(), event.epoch)
        elif isinstance(event, ev.WorkerLeft):
            self.next_watch = 0.0  # it may have left tasks to fence
        elif isinstance(event, ev.RequestEnded):
            self.orphans.pop(event.request, None)
            ended = self.state.requests.get(event.request)
            for stage in ended.tasks if ended else ():
                self.granted_at.pop((event.request, stage), None)
        try:
            self.state, commands = step(self.state, event)
        except TransitionError as error:
            log.error("the event %s is ignored: %s", event, error)
            return
        self._carry_out(commands)

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        """Run the commands. If leadership turns out to be lost, drop them: the next leader decides
        again.
        """
        if not self.leader:
            return
        calls = [self._call(command) for command in commands]
        for command, reply in zip(commands, exchange(self.client, calls), strict=True):
            answer = first_text(reply)
            if answer == "not_leader":
                self.leader = ""
            elif answer not in ("ok", "ended", "duplicate", "stale", "owned", "alive"):
                log.error("the command %s failed: Redis answered %s", command, answer)

    def _call(self, command: Command) -> scripts.Call:
        match command:
            case GrantTask(request=request, stage=stage, role=role, expected_epoch=at, alone=alone):
                return scripts.grant(self.leader, request, stage, role, at, alone=alone)
            case SetWalk(request=request, stage=stage, edge=edge, from_index=index, walk=walk):
                return scripts.set_walk(self.leader, request, stage, edge, index, walk)
            case EndRequest(
                request=request,
                state=state,
                code=code,
                message=message,
                param=param,
                dead_stage=dead,
            ):
                return scripts.end_request(
                    self.leader, request, state, code, message, param, dead_stage=dead
                )
            case AbandonRequest(request=request, client_epoch=epoch):
                return scripts.abort(request, epoch, "the gateway that held the client is gone")
            case FenceWorker(worker=worker, deadline_us=deadline):
                return scripts.fence_worker(self.leader, worker, deadline_us=deadline)
            case _:
                raise TypeError(f"no script for {command}")

    def _watch(self) -> None:
        """Turn elapsed times into events: lapsed leases, requests without a gateway, unclaimed
        grants.
        """
        broken, self.checked = violations(self.state, self.checked), self.state
        if broken:
            log.error("invariants of the conductor's state are broken: %s", "; ".join(broken))
        for worker, deadline_us in self._observe_leases().items():
            self._apply(ev.WorkerExpired(worker=worker, deadline_us=deadline_us))
        now = self._clock()
        self.next_watch = min(now + TICK_MS / 1000, self._leases.due_s(now))
        for request, (since, epoch) in list(self.orphans.items()):
            if now - since > self.config.lease.gateway_timeout_s:
                del self.orphans[request]
                self._apply(ev.ClientGone(request=request, epoch=epoch))
        self._fence_tasks()
        self._sweep(now)
        self._watch_grants(now)

    def _observe_leases(self) -> dict[WorkerId, int]:
        """Read all leases; return the lapsed ones: deadline in microseconds of Redis's clock, by
        worker.
        """
        asked_s = self._clock()
        redis_us, *listed = texts(run(self.client, scripts.leases()))
        answered_s = self._clock()
        step_s = self._redis_clock.step_s(asked_s, answered_s, int(redis_us))
        if step_s:
            log.warning(
                "the clock of Redis was set %s by %.1f s",
                "forward" if step_s > 0 else "back",
                abs(step_s),
            )
            self.took_over_at = answered_s
        found = zip(listed[::3], listed[1::3], listed[2::3], strict=True)
        usual_us = int(self.config.lease.worker_ttl_s * 1e6)
        leases = {
            WorkerId(worker): (int(deadline), int(duration or usual_us))
            for worker, deadline, duration in found
        }
        return self._leases.observe(answered_s, int(redis_us), leases)

    def _fence_tasks(self) -> None:
        """Revoke a limited number of tasks of each fenced worker and gateway. Remaining tasks
        follow in the next turn.
        """
        for worker in worker_ids(self.client.hkeys(keys.FENCING)):
            answer = text(run(self.client, scripts.fence_tasks(self.leader, worker)))
            if answer == "not_leader":
                self.leader = ""
                return
            if answer == "more":
                self.next_watch = 0.0

    def _sweep(self, now: float) -> None:
        """Delete audio whose retention is over. If Redis's memory is scarce, also delete the oldest
        retained audio, before Redis has to refuse requests.
        """
        if now < self._next_sweep:
            return
        used, most = memory_of(cast("dict[str, int]", self.client.info("memory")))
        is_scarce = (
            most > 0
            and 100 * used / most >= self.config.limits.max_redis_memory_percent - EARLY_PERCENT
        )
        answer = text(run(self.client, scripts.sweep(self.leader, SWEPT_EARLY if is_scarce else 0)))
        if answer == "not_leader":
            self.leader = ""
        self._next_sweep = now if answer == "more" or is_scarce else now + SWEEP_S

    def _watch_grants(self, now: float) -> None:
        """Handle grants that were not claimed within `claim_timeout_s`: at most `WATCH_SLICE` now,
        and the rest in the next turns.
        """
        overdue = [
            key
            for key, at in self.granted_at.items()
            if now - at > self.config.lease.claim_timeout_s
        ]
        if len(overdue) > WATCH_SLICE:
            self.next_watch = now
        overdue = overdue[:WATCH_SLICE]
        if not overdue:
            return
        deserted, lost = self._deserted(overdue), lost_grants(self.client, overdue)
        for request, stage in overdue:
            if not self._still_leads():
                return
            if (request, stage) in self.granted_at:
                self.granted_at[request, stage] = now
                self._overdue(request, stage, deserted, is_lost=(request, stage) in lost)

    def _overdue(
        self, request: RequestId, stage: StageName, deserted: frozenset[RoleName], *, is_lost: bool
    ) -> None:
        task = self.state.task(request, stage)
        if task is None:
            self.granted_at.pop((request, stage), None)
            return
        if granted_role(self.state, task) in deserted:
            self._apply(ev.RoleDeserted(request=request, stage=stage, epoch=task.epoch))
        elif is_lost:
            self._apply(ev.GrantOverdue(request=request, stage=stage, epoch=task.epoch))

    def _deserted(self, overdue: Sequence[tuple[RequestId, StageName]]) -> frozenset[RoleName]:
        """Return the roles of overdue grants that have no worker and expect none, by the rule of
        `availability` in `common.lua`. `overdue`: (request, stage) of each grant.

        Empty until this conductor has led for `no_worker_timeout_s` without a change of Redis's
        clock. Before that, Redis may have been away, or its recorded times may look older than they
        are.
        """
        grace_s = self.config.lease.no_worker_timeout_s
        tasks = [self.state.task(request, stage) for request, stage in overdue]
        roles = sorted({granted_role(self.state, task) for task in tasks if task is not None})
        if not roles or self._clock() - self.took_over_at <= grace_s:
            return frozenset()
        reply = run(self.client, scripts.availability(int(grace_s * 1e6), roles))
        found = cast("list[tuple[bytes, bytes, int, int | bytes]]", reply)
        return frozenset(
            role for role, (_, keeps, *_) in zip(roles, found, strict=True) if not keeps
        )


def run_conductor(config: FleetConfig, redis_url: str) -> None:
    """Run one conductor until SIGTERM or SIGINT."""
    client = connect(redis_url, one_connection=True)
    driver = Driver(config, client, new_worker_id("conductor", socket.gethostname(), os.getpid()))

    def stop(_signum: int, _frame: object) -> None:
        driver.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    log.info("conductor %s is up", driver.me)
    freeze_gc()
    driver.run()
    driver.resign()
    client.close()
