"""Operator orders apply immediately, are accepted only by live workers, and end with the worker's
incarnation.
"""

from fleet.control import keys, scripts
from fleet.control.connect import text
from fleet.core.ids import RequestId, WorkerId
from fleet.telemetry.views import WorkerOrder
from tests.control_plane import GATEWAY, OTHER, REQUEST, WORKER, Control
from tests.support import stream_entries


def state(control: Control, worker: WorkerId = WORKER) -> tuple[str, str]:
    """Return the fields `draining` and `leaving` of the worker."""
    draining, leaving = control.client.hmget(keys.worker(worker), ["draining", "leaving"])  # pyright: ignore[reportGeneralTypeIssues]
    return text(draining), text(leaving)


def order(control: Control, name: WorkerOrder, worker: WorkerId = WORKER) -> str:
    return control.run(scripts.order(worker, name))


def notices(control: Control, worker: WorkerId = WORKER) -> list[str]:
    entries = stream_entries(control.client, keys.inbox(worker))
    return [text(fields[b"o"]) for _, fields in entries if fields[b"k"] == b"o"]


def test_orders_apply_immediately_and_may_be_repeated(control: Control) -> None:
    assert [order(control, "drain"), order(control, "drain"), state(control)] == [
        "ok",
        "ok",
        ("1", ""),
    ]
    assert [order(control, "resume"), order(control, "resume"), state(control)] == [
        "ok",
        "ok",
        ("", ""),
    ]
    assert [order(control, "stop"), order(control, "stop"), order(control, "drain")] == [
        "ok",
        "ok",
        "ok",
    ]
    assert order(control, "resume") == "leaving" and state(control) == ("1", "1"), (
        "a leaving worker cannot be resumed"
    )
    assert notices(control) == ["drain", "drain", "resume", "resume", "stop"]


def test_leaving_worker_refuses_resume(control: Control) -> None:
    assert control.run(scripts.drain(WORKER)) == "ok"
    assert order(control, "resume") == "leaving" and notices(control) == []


def test_orders_are_accepted_only_by_listed_workers_of_a_role(control: Control) -> None:
    assert order(control, "drain", OTHER) == "unlisted"
    assert order(control, "drain", GATEWAY) == "gateway"
    control.kill()
    assert order(control, "drain") == "gone"
    assert control.client.exists(keys.worker(WORKER), keys.inbox(WORKER)) == 0, (
        "an order to a gone worker leaves no keys"
    )


def test_drain_promotes_a_standby_worker(control: Control) -> None:
    assert (
        control.run(
            scripts.register(OTHER, "lm", 60_000_000, {"kind": "test"}, replicas=1, standby=1)
        )
        == "standby"
    )
    order(control, "drain")
    assert control.client.hget(keys.worker(OTHER), "standby") == b""
    order(control, "drain")
    assert control.client.xlen(keys.inbox(OTHER)) == 1, "promoted once"


def test_playback_report_is_written_only_for_a_known_request(control: Control) -> None:
    assert control.run(scripts.record_playback(REQUEST, 10, 1)) == "ok"
    assert text(control.client.hget(keys.request(REQUEST), "playback")).startswith("10,1,")
    assert control.run(scripts.record_playback(RequestId("req-2"), 10, 1)) == "unknown"
    assert control.client.exists(keys.request(RequestId("req-2"))) == 0


def test_gateways_add_metrics_to_one_step_that_expires(control: Control) -> None:
    for _ in range(2):
        assert control.run(scripts.record_metrics({"underruns": 2}, {"running:lm": 5})) == "ok"
    steps = list(control.client.keys(keys.PREFIX + "series:*"))  # pyright: ignore[reportGeneralTypeIssues]
    series = [control.client.hgetall(key) for key in steps]
    assert sum(int(fields.get(b"underruns", 0)) for fields in series) == 4  # pyright: ignore[reportAttributeAccessIssue]
    assert {fields[b"running:lm"] for fields in series if b"running:lm" in fields} == {b"5"}  # pyright: ignore[reportGeneralTypeIssues]
    assert all(0 < control.client.ttl(key) <= 1000 for key in steps)
