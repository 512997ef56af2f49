"""The end of a request: the script that ends its last task closes it, in any order of the tasks'
ends, and closes it once. The answer is retained for a while.
"""

import pytest

from fleet.control import keys
from fleet.core.errors import NotFound
from fleet.core.events import RequestEnded
from fleet.core.ids import CLIENT, EdgeName, Epoch
from tests.control_plane import OTHER, REQUEST, STAGE, TEXT, Control
from tests.harness import answer, assert_same, collected, fake_spec, open_fleet, wait_ended


def is_live(control: Control) -> bool:
    live = bool(control.client.sismember(keys.LIVE, REQUEST))
    assert live is (not control.events_of(RequestEnded))
    return live


def assert_closed(control: Control) -> None:
    assert not is_live(control)
    (ended,) = control.events_of(RequestEnded)
    assert ended.state == "finished"
    assert control.client.hget(keys.request(REQUEST), "state") == b"finished"
    assert {control.task(stage)["state"] for stage in (STAGE, CLIENT)} == {"finished"}


def test_delivery_after_the_last_chunk_closes_the_request(control: Control) -> None:
    assert control.append(control.own(), finish=True) == "ok"
    assert is_live(control), "its answer is not delivered"
    assert control.acknowledge(delivered=True) == "ok"
    assert_closed(control)
    assert control.acknowledge(delivered=True) == "ended"


def test_last_chunk_after_the_delivery_closes_the_request(control: Control) -> None:
    """The client may acknowledge the whole answer before the stage has finished its task; the
    request stays live until the stage's last chunk.
    """
    epoch = control.own()
    assert control.acknowledge(delivered=True) == "ok"
    assert is_live(control)
    assert control.append(epoch, finish=True) == "ok"
    assert_closed(control)
    assert control.append(epoch, finish=True) == "stale"


def recompute(control: Control) -> Epoch:
    """Report the finished task's tensors lost, and claim the task for another worker; return the
    epoch.
    """
    assert control.append(control.own(), finish=True) == "ok"
    control.register(OTHER)
    assert [control.lose_tensors(), control.claim(worker=OTHER)] == ["ok", "ok"]
    return control.epoch()


def test_delivery_during_a_recomputation_waits_for_its_end(control: Control) -> None:
    """A request whose answer is delivered while its task is recomputed stays live until that task
    ends. If the worker that recomputes is lost, its successor ends the request.
    """
    recompute(control)
    assert control.acknowledge(delivered=True) == "ok"
    assert is_live(control), "a worker still runs the task"
    control.kill(OTHER)
    assert control.claim() == "ok" and is_live(control)
    assert control.append(control.epoch(), finish=True) == "duplicate"
    assert_closed(control)


def test_delivery_after_a_recomputation_closes_the_request(control: Control) -> None:
    epoch = recompute(control)
    assert [control.append(epoch, finish=True) for _ in range(2)] == ["duplicate"] * 2
    assert is_live(control)
    assert control.acknowledge(delivered=True) == "ok"
    assert_closed(control)


def test_new_owner_of_a_complete_log_closes_the_request(control: Control) -> None:
    """Redis lost the end of the task but not its last chunk; the next owner appends that chunk
    again, which closes the request.
    """
    assert control.append(control.own()) == "ok"
    assert control.acknowledge(delivered=True) == "ok"
    control.kill()
    control.register(OTHER)
    assert control.claim(worker=OTHER) == "ok"
    assert control.append(control.epoch(), finish=True) == "duplicate"
    assert_closed(control)


def test_closed_request_is_retained_as_submitted(control: Control) -> None:
    hash_of, retention_s = keys.request(REQUEST), 77
    control.client.hset(hash_of, "retention_s", retention_s)
    assert control.append(control.own(), finish=True) == "ok"
    assert control.acknowledge(delivered=True) == "ok"
    for key in (hash_of, keys.task(REQUEST, STAGE), keys.edge(REQUEST, TEXT), keys.trace(REQUEST)):
        assert retention_s - 5 <= control.client.ttl(key) <= retention_s


async def test_ended_answer_can_be_read_until_its_audio_is_deleted(redis_url: str) -> None:
    """An ended answer can be read as long as all its logs exist; the log of the audio expires
    before the log of the text.
    """
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        expected = await answer(client, spec)
        await wait_ended(client, spec.id)
        text_key, audio_key = (keys.edge(spec.id, EdgeName(name)) for name in ("text", "audio"))
        redis = fleet.clients[0]
        assert redis.ttl(audio_key) <= 60 < redis.ttl(text_key) <= fleet.config.retention_s
        resumed = await client.requests.resume(spec.id)
        assert resumed is not None
        assert_same(await collected(resumed[1], spec), expected)
        redis.delete(audio_key)
        with pytest.raises(NotFound, match="deleted after a minute"):
            await client.requests.resume(spec.id)
