"""Process loop of the conductor: acquires leadership, tails `events`, runs commands, watches leases and overdue grants.

Any number may run; one leads, the others stand by. No worker is fenced within one lease time after leadership was gained, Redis
returned, or this process was suspended: live workers need that time to renew their leases.
"""

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import cast

import redis
from redis.exceptions import RedisError

from fleet.conductor.driver.snapshot import is_grant_lost, missed_facts, read_live, read_request
from fleet.conductor.invariants import violations
from fleet.conductor.state import ConductorState, TaskState
from fleet.conductor.step import granted_role, resume, step
from fleet.config import FleetConfig
from fleet.config.schema import RENEWALS
from fleet.control import keys, scripts
from fleet.control.connect import connect, exchange, first_text, run, text
from fleet.control.outage import Outage, cause_of, is_away
from fleet.core import events as ev
from fleet.core.commands import AbandonRequest, Command, EndRequest, FenceWorker, GrantTask, SetWalk
from fleet.core.errors import TransitionError
from fleet.core.gc_freeze import freeze_gc
from fleet.core.ids import CLIENT, Epoch, RequestId, RoleName, StageName, WorkerId, new_worker_id

log = logging.getLogger(__name__)

TICK_MS = 200
BATCH = 256


class Driver:
    """One conductor process. `turn()` is one pass; `run()` repeats it until `stopping` is set."""

    def __init__(self, config: FleetConfig, client: redis.Redis, me: WorkerId) -> None:
        self.config, self.client, self.me = config, client, me
        self.leader = ""
        self.last_id = "0-0"
        self.state = self._empty()
        self.granted_at: dict[tuple[RequestId, StageName], float] = {}
        self.took_over_at = 0.0
        self.orphans: dict[RequestId, tuple[float, Epoch]] = {}
        """Requests whose gateway is lost: time of the loss, and the epoch of the client edges."""
        self.spare_until = 0.0
        self.last_turn = self.led_at = time.monotonic()
        self.next_watch = 0.0
        self.stopping = False
        self._outage = Outage(f"conductor {me}")
        self._must_read = False
        """A turn ended with an error of Redis: the state may be ahead of what was written."""

    def _empty(self) -> ConductorState:
        graph = self.config.graph_declaration()
        driven = {s.name for s in graph.stages if self.config.transition_source_of(s.name) == "conductor"}
        first = {stage.name: self.config.roles_of(stage.name)[0].name for stage in graph.stages}
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
        """Give up the lead; while Redis is away, it lapses instead."""
        try:
            if self.leader:
                run(self.client, scripts.lead(self.me, self.leader, 1))
        except RedisError as error:
            log.warning("the lead of %s lapses, since it could not be given up: %s", self.me, cause_of(error))

    def turn(self) -> None:
        """Renew leadership, read events, decide, act."""
        if not self._lead():
            time.sleep(TICK_MS / 1000)
            return
        now = time.monotonic()
        if now - self.last_turn > self.config.lease.worker_ttl_s:
            self._spare()
        self.last_turn = now
        for event in self._read():
            if not self._still_leads():
                return
            self._apply(event)
        if time.monotonic() >= self.next_watch:
            self._watch()

    def _lead(self) -> bool:
        lease_ms = int(self.config.lease.conductor_ttl_s * 1000)
        value = text(run(self.client, scripts.lead(self.me, self.leader, lease_ms)))
        self.led_at = time.monotonic()
        if value and (value != self.leader or self._must_read):
            self.leader, self._must_read = value, False
            self._take_over()
        elif not value:
            self.leader = ""
        return bool(value)

    def _still_leads(self) -> bool:
        """Return True if this process still leads; renews the lease, for loops that may take longer than it lasts."""
        leader = self.leader
        if time.monotonic() - self.led_at <= self.config.lease.conductor_ttl_s / RENEWALS:
            return True
        return self._lead() and self.leader == leader

    def _take_over(self) -> None:
        """Read the state from the hashes. Events after the saved id may repeat what was read, and then change nothing."""
        self._spare()
        last = cast("list[tuple[bytes, object]]", self.client.xrevrange(keys.EVENTS, count=1))
        self.last_id = text(last[0][0]) if last else "0-0"
        self.state, self.orphans, self.took_over_at = self._empty(), {}, time.monotonic()
        live = read_live(self.client)
        log.info("conductor %s leads now; %d live requests", self.me, len(live))
        for request in live:
            if not self._still_leads():
                return
            record = read_request(self.client, request)
            if record is None:
                continue
            self.state, commands = resume(self.state, record)
            for task in record.tasks.values():
                if task.state is TaskState.GRANTED:
                    self.granted_at[record.id, task.stage] = time.monotonic()
            self._carry_out(commands)
            for fact in missed_facts(self.client, record, drives_walks=bool(self.state.conductor_driven)):
                self._apply(fact)

    def _spare(self) -> None:
        self.spare_until = time.monotonic() + self.config.lease.worker_ttl_s

    def _read(self) -> list[ev.AnyEvent]:
        # Not beyond the next deadline: clients wait as long as a lapsed lease is not noticed.
        block_ms = max(1, min(TICK_MS, math.ceil((self.next_watch - time.monotonic()) * 1000)))
        reply = self.client.xread({keys.EVENTS: self.last_id}, count=BATCH, block=block_ms)
        streams = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply or [])
        found: list[ev.AnyEvent] = []
        for _, entries in streams:
            for entry_id, fields in entries:
                self.last_id = text(entry_id)
                found.append(ev.decode_event(fields[b"e"]))
        return found

    def _apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.TaskGranted | ev.TaskHandedOff):
            self.granted_at[event.request, event.stage] = time.monotonic()
        elif isinstance(event, ev.TaskClaimed):
            self.granted_at.pop((event.request, event.stage), None)
            if event.stage == CLIENT:
                self.orphans.pop(event.request, None)
        elif isinstance(event, ev.TaskLost) and event.stage == CLIENT:
            self.orphans[event.request] = (time.monotonic(), event.epoch)
        elif isinstance(event, ev.RequestEnded):
            self.orphans.pop(event.request, None)
            self.granted_at = {key: at for key, at in self.granted_at.items() if key[0] != event.request}
        try:
            self.state, commands = step(self.state, event)
        except TransitionError as error:
            log.error("the event %s is ignored: %s", event, error)
            return
        self._carry_out(commands)

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        """Run the commands, unless leadership is lost, even within this turn: the next leader then decides again."""
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
            case GrantTask(request=request, stage=stage, role=role, expected_epoch=at, alone=alone, remake=remake):
                return scripts.grant(self.leader, request, stage, role, at, alone=alone, remake=remake)
            case SetWalk(request=request, stage=stage, edge=edge, from_index=index, walk=walk):
                return scripts.set_walk(self.leader, request, stage, edge, index, walk)
            case EndRequest(request=request, state=state, code=code, message=message, param=param, dead_stage=dead):
                keep_s = self.config.retention_s
                return scripts.end_request(self.leader, request, state, code, message, param, keep_s, dead_stage=dead)
            case AbandonRequest(request=request, client_epoch=epoch):
                return scripts.abort(request, epoch, "the gateway that held the client is gone", self.config.retention_s)
            case FenceWorker(worker=worker):
                return scripts.fence_worker(self.leader, worker)
            case _:
                raise TypeError(f"no script for {command}")

    def _watch(self) -> None:
        """Turn elapsed times into events: lapsed leases, requests without a gateway, unclaimed grants."""
        now = time.monotonic()
        self.next_watch = now + TICK_MS / 1000
        broken = violations(self.state)
        if broken:
            log.error("invariants of the conductor's state are broken: %s", "; ".join(broken))
        seconds, micros = self.client.time()
        now_us = seconds * 1_000_000 + micros
        for worker, deadline_us in cast("list[tuple[bytes, float]]", self.client.zrange(keys.WORKERS, 0, -1, withscores=True)):
            if deadline_us >= now_us:
                self.next_watch = min(self.next_watch, now + (deadline_us - now_us) / 1e6)
            elif now >= self.spare_until:
                self._apply(ev.WorkerExpired(worker=WorkerId(text(worker))))
        for request, (since, epoch) in list(self.orphans.items()):
            if now - since > self.config.lease.gateway_timeout_s:
                del self.orphans[request]
                self._apply(ev.ClientGone(request=request, epoch=epoch))
        self._watch_grants(now)

    def _watch_grants(self, now: float) -> None:
        """Handle each grant that was not claimed within `claim_timeout_s`; stop if leadership is lost."""
        overdue = [key for key, at in self.granted_at.items() if now - at > self.config.lease.claim_timeout_s]
        deserted = self._deserted(overdue)
        for request, stage in overdue:
            if not self._still_leads():
                return
            if (request, stage) in self.granted_at:
                self.granted_at[request, stage] = now
                self._overdue(request, stage, deserted)

    def _overdue(self, request: RequestId, stage: StageName, deserted: frozenset[RoleName]) -> None:
        task = self.state.task(request, stage)
        if task is None:
            self.granted_at.pop((request, stage), None)
            return
        if granted_role(self.state, task) in deserted:
            self._apply(ev.RoleDeserted(request=request, stage=stage, epoch=task.epoch))
        elif is_grant_lost(self.client, request, stage):
            self._apply(ev.GrantOverdue(request=request, stage=stage, epoch=task.epoch))

    def _deserted(self, overdue: Sequence[tuple[RequestId, StageName]]) -> frozenset[RoleName]:
        """Return the roles of these grants that have no worker and expect none, by the rule of `availability` in `common.lua`.

        Empty until this conductor has led for `no_worker_timeout_s`: Redis may have been away for longer than that.
        """
        grace_s = self.config.lease.no_worker_timeout_s
        tasks = [self.state.task(request, stage) for request, stage in overdue]
        roles = sorted({granted_role(self.state, task) for task in tasks if task is not None})
        if not roles or time.monotonic() - self.took_over_at <= grace_s:
            return frozenset()
        reply = run(self.client, scripts.availability(int(grace_s * 1e6), roles))
        found = cast("list[tuple[bytes, bytes, int, int | bytes]]", reply)
        return frozenset(role for role, (_, keeps, *_) in zip(roles, found, strict=True) if not keeps)


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
