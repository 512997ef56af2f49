"""A bare control plane for tests of its scripts: no conductor and no worker runs, the test calls every script itself."""

from dataclasses import dataclass
from typing import cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.chunk import Chunk, Location, TensorRef
from fleet.core.events import Event, decode_event
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId

STAGE, ROLE, TEXT = StageName("lm"), RoleName("lm"), EdgeName("text")
REQUEST, WORKER, GATEWAY = RequestId("req-1"), WorkerId("lm@test:1:a"), WorkerId("gateway@test:1:a")
KEEP = scripts.Retention()
OTHER = WorkerId("lm@test:2:b")


@dataclass(slots=True)
class Control:
    """A bare control plane: a leader, a gateway, a worker, one submitted request."""

    client: redis.Redis
    leader: str

    def run(self, call: scripts.Call) -> str:
        reply = run(self.client, call)
        return text(cast("list[bytes]", reply)[0] if isinstance(reply, list) else reply)

    def epoch(self, stage: StageName = STAGE) -> Epoch:
        return Epoch(int(text(self.client.hget(keys.task(REQUEST, stage), "epoch"))))

    def grant(self, expected: Epoch, *, alone: bool = False, remake: bool = False) -> str:
        return self.run(scripts.grant(self.leader, REQUEST, STAGE, ROLE, expected, alone=alone, remake=remake))

    def claim(self, epoch: Epoch, worker: WorkerId = WORKER) -> str:
        return self.run(scripts.claim(worker, ROLE, "0-1", REQUEST, STAGE, epoch))

    def append(self, epoch: Epoch, index: int = 0, *, finish: bool = False) -> str:
        chunk = Chunk(request=REQUEST, edge=TEXT, index=index, epoch=epoch)
        item = scripts.Append(stage=STAGE, consumer=CLIENT, chunk=chunk, location={}, event=None, finish=finish, num_items=1)
        return self.run(scripts.append([item]))

    def own(self, worker: WorkerId = WORKER, *, alone: bool = False, remake: bool = False) -> Epoch:
        """Grant and claim the task; return the epoch at which the worker owns it."""
        assert self.grant(self.epoch(), alone=alone, remake=remake) == "ok"
        epoch = self.epoch()
        assert self.claim(epoch, worker) == "ok"
        return epoch

    def register(self, worker: WorkerId, role: str = "lm") -> str:
        return self.run(scripts.register(worker, role, 60_000_000, {"kind": "test"}))

    def kill(self, worker: WorkerId = WORKER) -> None:
        """Let the worker's lease lapse and have the leader fence it."""
        self.client.zadd(keys.WORKERS, {worker: 1})
        assert self.run(scripts.fence_worker(self.leader, worker)) == "ok"

    def depose(self) -> str:
        """Make another conductor the leader; return the former leader's token."""
        old = self.leader
        self.client.delete(keys.CONDUCTOR)
        self.leader = self.run(scripts.lead(WorkerId("conductor@other"), "", 60_000))
        return old

    def relocate(self, epoch: Epoch, agent: WorkerId, index: int = 0) -> str:
        moved = scripts.Relocation(
            request=REQUEST, stage=STAGE, epoch=epoch, edge=TEXT, consumer=CLIENT, index=index, location=place(agent)
        )
        return self.run(scripts.relocate(moved))

    def task(self, stage: StageName = STAGE) -> dict[str, str]:
        fields = cast("dict[bytes, bytes]", self.client.hgetall(keys.task(REQUEST, stage)))
        return {text(name): text(value) for name, value in fields.items()}

    def events_of(self, kind: type[Event]) -> list[Event]:
        """Return every event of a kind, oldest first."""
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", self.client.xrange(keys.EVENTS))
        events = [decode_event(fields[b"e"]) for _, fields in entries]
        return [event for event in events if isinstance(event, kind)]


def place(agent: WorkerId) -> Location:
    return {"rows": TensorRef(agent=agent, address=0, length_bytes=4, device_id=0, generation=1, checksum=0, slot=0)}
