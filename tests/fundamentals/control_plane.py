"""A bare control plane for tests of its scripts: no conductor and no worker runs, the test calls
every script itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis

from fleet.control import keys, scripts
from fleet.control.connect import first_text, run, text, texts
from fleet.core.chunk import Chunk, Location, TensorRef
from fleet.core.events import Event, decode_event
from fleet.core.ids import (
    CLIENT,
    EdgeName,
    Epoch,
    RequestId,
    RoleName,
    StageName,
    WorkerId,
    role_of,
)
from fleet.core.request import RequestSpec
from tests.support import stream_entries

STAGE, ROLE, TEXT = StageName("lm"), RoleName("lm"), EdgeName("text")
REQUEST, WORKER, GATEWAY = RequestId("req-1"), WorkerId("lm@test:1:a"), WorkerId("gateway@test:1:a")
KEEP_S, LEASE_US = 600, 60_000_000
OTHER = WorkerId("lm@test:2:b")
E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class Control:
    """A bare control plane: a leader, a gateway, a worker, one submitted request."""

    client: redis.Redis
    leader: str

    def run(self, call: scripts.Call) -> str:
        """Run a script; return the first word of its answer."""
        return first_text(run(self.client, call))

    def epoch(self, stage: StageName = STAGE) -> Epoch:
        return Epoch(int(text(self.client.hget(keys.task(REQUEST, stage), "epoch"))))

    def grant(self, expected: Epoch, *, alone: bool = False) -> str:
        return self.run(scripts.grant(self.leader, REQUEST, STAGE, ROLE, expected, alone=alone))

    def claim(self, epoch: Epoch, worker: WorkerId = WORKER) -> str:
        """Claim the grant of this epoch, and take its entry from the role's queue."""
        entry = self.task().get("entry", "") if epoch == self.epoch() else ""
        return self.run(scripts.claim(worker, ROLE, entry, REQUEST, STAGE, epoch))

    def append(self, epoch: Epoch, index: int = 0, *, finish: bool = False) -> str:
        chunk = Chunk(request=REQUEST, edge=TEXT, index=index, epoch=epoch)
        item = scripts.Append(
            stage=STAGE,
            consumer=CLIENT,
            chunk=chunk,
            location={},
            event=None,
            finish=finish,
            num_items=1,
        )
        return self.run(scripts.append([item]))

    def lose_tensors(self, epoch: Epoch | None = None) -> str:
        """Report as the client that the tensors of the task are lost: the client is its only
        consumer.
        """
        return self.run(
            scripts.lose_tensors(
                REQUEST, CLIENT, self.epoch(CLIENT) if epoch is None else epoch, STAGE
            )
        )

    def own(self, worker: WorkerId = WORKER, *, alone: bool = False) -> Epoch:
        """Grant and claim the task; return the epoch at which the worker owns it."""
        assert self.grant(self.epoch(), alone=alone) == "ok"
        epoch = self.epoch()
        assert self.claim(epoch, worker) == "ok"
        return epoch

    def register(self, worker: WorkerId, role: str = "lm") -> str:
        return self.run(scripts.register(worker, role, LEASE_US, {"kind": "test"}))

    def kill(self, worker: WorkerId = WORKER) -> None:
        """Let the worker's lease lapse and have the leader fence it."""
        assert self.fence(worker) == "ok"

    def fence(self, worker: WorkerId = WORKER) -> str:
        """Fence the worker as the leader that has seen its present deadline for the duration of its
        lease.
        """
        deadline_us = int(self.client.zscore(keys.WORKERS, worker) or 0)
        return self.run(scripts.fence_worker(self.leader, worker, deadline_us=deadline_us))

    def depose(self) -> str:
        """Make another conductor the leader; return the former leader's token."""
        old = self.leader
        self.client.delete(keys.CONDUCTOR)
        self.leader = self.run(scripts.lead(WorkerId("conductor@other"), "", 60_000))
        return old

    def relocate(self, epoch: Epoch, agent: WorkerId, index: int = 0) -> str:
        moved = scripts.Relocation(
            request=REQUEST,
            stage=STAGE,
            epoch=epoch,
            edge=TEXT,
            consumer=CLIENT,
            index=index,
            location=place(agent),
        )
        return self.run(scripts.relocate(moved))

    def task(self, stage: StageName = STAGE) -> dict[str, str]:
        fields = cast("dict[bytes, bytes]", self.client.hgetall(keys.task(REQUEST, stage)))
        return {text(name): text(value) for name, value in fields.items()}

    def submit(self, request: str = "req-2", **options: Any) -> list[str]:
        """Submit a request; return all words of the answer."""
        return texts(run(self.client, submission(request, **options)))

    def abort(self, request: RequestId = REQUEST, right: str | Epoch = scripts.API_RIGHT) -> str:
        return self.run(scripts.abort(request, right, "stop"))

    def leave(self, worker: WorkerId = WORKER, *, died: bool = False, cause: str = "") -> str:
        """End the worker's rights as it does itself or, with `died`, as its keeper does."""
        return self.run(scripts.fence_worker("", worker, died=died, cause=cause))

    def events_of(self, kind: type[E]) -> list[E]:
        """Return every event of a kind, oldest first."""
        events = [
            decode_event(fields[b"e"]) for _, fields in stream_entries(self.client, keys.EVENTS)
        ]
        return [event for event in events if isinstance(event, kind)]


def set_deadline(client: redis.Redis, worker: str, deadline_us: int) -> None:
    """Move the lease deadline of a listed worker, in the indexes too."""
    role, group = map(
        text,
        cast(
            "list[bytes | None]",
            client.hmget(keys.worker(WorkerId(worker)), ["role", "settings_group"]),
        ),
    )
    indexes = [
        *(keys.role_workers(RoleName(role), status) for status in keys.STATUSES),
        keys.settings_group(group),
    ]
    for key in (keys.WORKERS, *indexes):
        client.zadd(key, {worker: deadline_us}, xx=True)


def place(agent: WorkerId) -> Location:
    return {
        "rows": TensorRef(
            agent=agent, address=0, length_bytes=4, device_id=0, generation=1, checksum=0, slot=0
        )
    }


def submission(
    request: str, *, bound: int = 8, roles: Sequence[RoleName] = (), grace_us: int = 0
) -> scripts.Call:
    spec = RequestSpec(id=RequestId(request), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    return scripts.submit(
        spec,
        None,
        bound=bound,
        stages=[STAGE],
        edges=[TEXT],
        gateway=GATEWAY,
        roles=roles,
        grace_us=grace_us,
    )


def join(client: redis.Redis, worker: str, **fields: str) -> list[str]:
    """Register a worker of the role in its id; return "ok", or the kind of its refusal and the
    reason.
    """
    call = scripts.register(
        WorkerId(worker), role_of(WorkerId(worker)), LEASE_US, {"kind": "worker", **fields}
    )
    return texts(run(client, call))
