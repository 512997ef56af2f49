"""The script that ends a request's last task closes it, in whichever order the tasks end and
however often.
"""

from fleet.control import keys, scripts
from fleet.core.events import RequestEnded
from fleet.core.ids import CLIENT, Epoch
from tests.fundamentals.control_plane import OTHER, REQUEST, STAGE, TEXT, Control


def deliver(control: Control) -> str:
    """Acknowledge the last chunk as the gateway that has read the whole answer."""
    ack = scripts.Ack(
        request=REQUEST,
        stage=CLIENT,
        epoch=control.epoch(CLIENT),
        edge=TEXT,
        consumed=1,
        producer=STAGE,
        delivered=True,
    )
    return control.run(scripts.ack([ack]))


def is_live(control: Control) -> bool:
    live = bool(control.client.sismember(keys.LIVE, REQUEST))
    assert live is (not control.events_of(RequestEnded))
    return live


def assert_closed(control: Control) -> None:
    assert not is_live(control)
    (ended,) = control.events_of(RequestEnded)
    assert (ended.state, control.client.hget(keys.request(REQUEST), "state")) == (
        "finished",
        b"finished",
    )
    assert {control.task(stage)["state"] for stage in (STAGE, CLIENT)} == {"finished"}


def test_delivery_after_the_last_chunk_closes_the_request(control: Control) -> None:
    assert control.append(control.own(), finish=True) == "ok"
    assert is_live(control), "its answer is not delivered"
    assert deliver(control) == "ok"
    assert_closed(control)
    assert deliver(control) == "ended"


def test_last_chunk_after_the_delivery_closes_the_request(control: Control) -> None:
    """A client that needs no more than it has ends first."""
    epoch = control.own()
    assert deliver(control) == "ok"
    assert is_live(control)
    assert control.append(epoch, finish=True) == "ok"
    assert_closed(control)
    assert control.append(epoch, finish=True) == "stale"


def recompute(control: Control) -> Epoch:
    """Lose the tensors of the finished task, and claim it again; return its epoch at the new
    owner.
    """
    assert control.append(control.own(), finish=True) == "ok"
    control.register(OTHER)
    assert control.lose_tensors() == "ok" and control.claim(control.epoch(), OTHER) == "ok"
    return control.epoch()


def test_delivery_during_a_recomputation_waits_for_its_end(control: Control) -> None:
    epoch = recompute(control)
    assert deliver(control) == "ok"
    assert is_live(control), "a worker still runs the task"
    assert control.append(epoch, finish=True) == "duplicate"
    assert_closed(control)


def test_delivery_after_a_recomputation_closes_the_request(control: Control) -> None:
    epoch = recompute(control)
    assert control.append(epoch, finish=True) == "duplicate"
    assert control.append(epoch, finish=True) == "duplicate", "it may be repeated"
    assert is_live(control)
    assert deliver(control) == "ok"
    assert_closed(control)


def test_recomputation_that_is_lost_ends_with_its_next_owner(control: Control) -> None:
    recompute(control)
    assert deliver(control) == "ok"
    control.kill(OTHER)
    assert control.claim(control.epoch()) == "ok" and is_live(control)
    assert control.append(control.epoch(), finish=True) == "duplicate"
    assert_closed(control)


def test_new_owner_of_a_complete_log_closes_the_request(control: Control) -> None:
    """Redis lost the end of the task and not its last chunk: the next owner finds the log complete,
    and repeats that chunk.
    """
    assert control.append(control.own()) == "ok" and deliver(control) == "ok"
    control.kill()
    control.register(OTHER)
    assert control.claim(control.epoch(), OTHER) == "ok"
    assert control.append(control.epoch(), finish=True) == "duplicate"
    assert_closed(control)


def test_closed_request_is_retained_as_submitted(control: Control) -> None:
    hash_of, retention_s = keys.request(REQUEST), 77
    control.client.hset(hash_of, "retention_s", retention_s)
    assert control.append(control.own(), finish=True) == "ok" and deliver(control) == "ok"
    for key in (hash_of, keys.task(REQUEST, STAGE), keys.edge(REQUEST, TEXT), keys.trace(REQUEST)):
        assert retention_s - 5 <= control.client.ttl(key) <= retention_s
