"""Fencing: a write that needs a right is refused, in the same script, once a higher epoch has been granted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import fakeredis
import pytest
import redis

from fleet.control import keys, scripts
from fleet.control.connect import connect, load_scripts, run, text
from fleet.core.chunk import Chunk
from fleet.core.events import TaskFailed
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, RoleName, StageName, Walk, WorkerId
from fleet.core.request import RequestSpec

STAGE, ROLE, TEXT = StageName("lm"), RoleName("lm"), EdgeName("text")
REQUEST, WORKER, GATEWAY = RequestId("req-1"), WorkerId("lm@test:1:a"), WorkerId("gateway@test:1:a")
KEEP = scripts.Retention()


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

    def grant(self, expected: Epoch) -> str:
        return self.run(scripts.grant(self.leader, REQUEST, STAGE, ROLE, expected))

    def claim(self, epoch: Epoch, worker: WorkerId = WORKER) -> str:
        return self.run(scripts.claim(worker, ROLE, "0-1", REQUEST, STAGE, epoch))

    def append(self, epoch: Epoch, index: int = 0, *, finish: bool = False) -> str:
        chunk = Chunk(request=REQUEST, edge=TEXT, index=index, epoch=epoch)
        item = scripts.Append(
            stage=STAGE, consumer=CLIENT, chunk=chunk, location={}, event=None, finish=finish, num_items=1
        )
        return self.run(scripts.append([item]))

    def own(self) -> Epoch:
        """Grant and claim; the epoch the worker then holds."""
        self.grant(self.epoch())
        epoch = self.epoch()
        assert self.claim(epoch) == "ok"
        return epoch


@pytest.fixture(params=["redis", "fakeredis"])
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    """On the real server, and on the fake that unit tests of the control plane may use: both must answer alike."""
    if request.param == "fakeredis":
        client: redis.Redis = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(6, 2)))
        load_scripts(client)
    else:
        client = connect(request.getfixturevalue("redis_url"))
    leader = text(run(client, scripts.lead(WorkerId("conductor@test"), "", 60_000)))
    for worker, role in ((GATEWAY, ""), (WORKER, "lm")):
        run(client, scripts.register(worker, role, 60_000_000, {"kind": "test"}))
    spec = RequestSpec(id=REQUEST, graph="text", prompt_ids=(1,), outputs=(TEXT,))
    submit = scripts.submit(spec, None, bound=8, stages=[STAGE], edges=[TEXT], gateway=GATEWAY)
    control = Control(client, leader)
    assert control.run(submit) == "ok"
    yield control
    client.close()


def test_a_grant_on_an_old_epoch_is_refused(control: Control) -> None:
    old = control.epoch()
    assert control.grant(old) == "ok"
    assert control.grant(old) == "stale"


def test_a_task_that_is_owned_is_not_granted_away(control: Control) -> None:
    """An overdue grant that was claimed at the last moment stays its owner's."""
    assert control.grant(control.own()) == "owned"


def test_a_grant_by_a_deposed_leader_is_refused(control: Control) -> None:
    control.client.delete(keys.CONDUCTOR)
    run(control.client, scripts.lead(WorkerId("conductor@other"), "", 60_000))
    assert control.grant(control.epoch()) == "not_leader"


def test_epochs_only_rise_and_follow_redis_time(control: Control) -> None:
    seen = [control.epoch()]
    for _ in range(3):
        control.grant(seen[-1])
        seen.append(control.epoch())
    seconds, _ = control.client.time()
    assert seen == sorted(set(seen))
    assert abs(seen[-1] / 1e6 - seconds) < 5


def test_a_second_claim_of_one_grant_is_refused(control: Control) -> None:
    epoch = control.own()
    assert control.claim(epoch, WorkerId("lm@test:2:b")) == "unlisted"
    run(control.client, scripts.register(WorkerId("lm@test:2:b"), "lm", 60_000_000, {"kind": "test"}))
    assert control.claim(epoch, WorkerId("lm@test:2:b")) == "stale"


def test_a_stale_append_finish_ack_and_failure_change_nothing(control: Control) -> None:
    old = control.own()
    assert control.append(old) == "ok"
    control.client.zadd(keys.WORKERS, {WORKER: 1})
    assert control.run(scripts.fence_worker(control.leader, WORKER)) == "ok"
    assert control.grant(control.epoch()) == "ok"
    assert control.append(old, 1) == "stale"
    assert control.append(old, 1, finish=True) == "stale"
    failed = TaskFailed(request=REQUEST, stage=STAGE, epoch=old, code="engine_error", message="late")
    assert control.run(scripts.fail(failed)) == "stale"
    stale_ack = scripts.Ack(request=REQUEST, stage=CLIENT, epoch=Epoch(1), edge=TEXT, consumed=1, producer=STAGE)
    assert control.run(scripts.ack([stale_ack])) == "stale"
    task = cast("dict[bytes, bytes]", control.client.hgetall(keys.task(REQUEST, STAGE)))
    assert task[b"state"] == b"granted"
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 1


def test_an_index_is_appended_once_and_in_order(control: Control) -> None:
    epoch = control.own()
    assert [control.append(epoch, i) for i in (0, 0, 2, 1)] == ["ok", "duplicate", "gap", "ok"]
    assert control.client.xlen(keys.edge(REQUEST, TEXT)) == 2


def test_consumed_only_grows(control: Control) -> None:
    control.own()
    for consumed in (5, 3):
        ack = scripts.Ack(
            request=REQUEST, stage=CLIENT, epoch=control.epoch(CLIENT), edge=TEXT, consumed=consumed, producer=STAGE
        )
        control.run(scripts.ack([ack]))
    assert control.client.hget(keys.task(REQUEST, CLIENT), "consumed:text") == b"5"


def test_a_stale_gateway_aborts_nothing(control: Control) -> None:
    """After another gateway attached, the first one's late disconnect is without effect."""
    old = control.epoch(CLIENT)
    other = WorkerId("gateway@test:2:b")
    run(control.client, scripts.register(other, "", 60_000_000, {"kind": "test"}))
    assert control.run(scripts.attach(REQUEST, other)) == "ok"
    assert control.run(scripts.abort(REQUEST, old, "client left", KEEP)) == "stale"
    assert control.run(scripts.abort(REQUEST, control.epoch(CLIENT), "client left", KEEP)) == "ok"
    assert control.run(scripts.abort(REQUEST, scripts.API_RIGHT, "again", KEEP)) == "ended"


def test_nothing_is_written_for_a_request_that_has_ended(control: Control) -> None:
    epoch = control.own()
    control.run(scripts.abort(REQUEST, scripts.API_RIGHT, "stop", KEEP))
    assert control.append(control.epoch()) == "ended"
    assert control.append(epoch) == "stale"
    assert control.grant(control.epoch()) == "ended"
    assert control.run(scripts.attach(REQUEST, GATEWAY)) == "ended"
    assert control.run(scripts.set_walk(control.leader, REQUEST, STAGE, TEXT, 0, Walk("decode"))) == "ended"


def test_a_worker_is_fenced_only_after_its_lease(control: Control) -> None:
    epoch = control.own()
    assert control.run(scripts.fence_worker(control.leader, WORKER)) == "alive"
    control.client.zadd(keys.WORKERS, {WORKER: 1})
    assert control.run(scripts.fence_worker("somebody|1", WORKER)) == "not_leader"
    assert control.run(scripts.fence_worker(control.leader, WORKER)) == "ok"
    assert control.append(epoch) == "stale"
    assert control.run(scripts.renew(WORKER, 1_000_000, {})) == "unlisted"
    assert text(control.client.hget(keys.task(REQUEST, STAGE), "state")) == "lost"


def test_a_walk_is_set_once_for_an_index_and_only_by_the_leader(control: Control) -> None:
    def set_walk(leader: str, walk: str) -> str:
        return control.run(scripts.set_walk(leader, REQUEST, STAGE, TEXT, 3, Walk(walk)))

    assert set_walk("somebody|1", "decode") == "not_leader"
    assert set_walk(control.leader, "decode") == "ok"
    assert set_walk(control.leader, "prefill") == "duplicate"


def test_the_queue_bound_is_compared_where_the_request_is_written(control: Control) -> None:
    spec = RequestSpec(id=RequestId("req-2"), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    full = scripts.submit(spec, None, bound=1, stages=[STAGE], edges=[TEXT], gateway=GATEWAY)
    assert control.run(full) == "full"
    assert control.client.exists(keys.request(RequestId("req-2"))) == 0


def test_only_one_leads_and_a_new_term_is_above_the_old(control: Control) -> None:
    assert text(run(control.client, scripts.lead(WorkerId("conductor@other"), "", 60_000))) == ""
    control.client.delete(keys.CONDUCTOR)
    second = text(run(control.client, scripts.lead(WorkerId("conductor@other"), "", 60_000)))
    assert int(second.rpartition("|")[2]) > int(control.leader.rpartition("|")[2])
