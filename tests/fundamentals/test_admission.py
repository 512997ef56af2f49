"""Admission: a request is admitted if a place is free and workers serve its roles; the script that
admits a request also grants its tasks.
"""

from fleet.control import keys, scripts
from fleet.control.connect import run, texts
from fleet.core.events import Event, TaskGranted
from fleet.core.ids import RequestId, RoleName, StageName
from fleet.core.request import RequestSpec
from tests.control_plane import GATEWAY, HALVES, REQUEST, ROLE, TEXT, Control

RETRY_US = "5000000"
"""Time in us after which a refused client should try again, if nothing is known about starting
workers of the role.
"""


def test_submission_grants_a_task_of_each_stage_to_its_first_role(control: Control) -> None:
    stages, roles = [StageName("lm"), StageName("voice")], [HALVES[0], RoleName("voice")]
    spec = RequestSpec(id=RequestId("req-two"), graph="text", prompt_ids=(1,), outputs=(TEXT,))
    call = scripts.submit(
        spec, None, bound=8, stages=stages, edges=[TEXT], gateway=GATEWAY, first_roles=roles
    )
    assert texts(run(control.client, call))[0] == "ok"
    granted = [event for event in control.events_of(TaskGranted) if event.request == spec.id]
    assert [event.stage for event in granted] == stages
    assert [control.grants(role) for role in roles] == [
        [(event.stage, event.epoch, False)] for event in granted
    ]
    last = [type(event).__name__ for event in control.events_of(Event)][-3:]
    assert last == ["RequestSubmitted", "TaskGranted", "TaskGranted"], (
        "the conductor learns of the request first"
    )


def test_request_beyond_the_bound_is_refused_and_leaves_nothing(control: Control) -> None:
    assert control.submit(bound=1)[0] == "full"
    assert not control.client.exists(keys.request(RequestId("req-2")))


def test_request_of_a_known_id_or_a_fenced_gateway_is_refused(control: Control) -> None:
    assert control.submit(REQUEST)[0] == "exists"
    control.kill(GATEWAY)
    assert control.submit(roles=["ears"]) == ["stale"]
    assert not control.client.exists(keys.request(RequestId("req-2")))


def test_request_is_admitted_only_by_workers_that_serve(control: Control) -> None:
    assert control.order("drain") == "ok"
    assert control.submit(roles=[ROLE])[0] == "no_worker"
    assert control.order("resume") == "ok"
    assert control.submit(roles=[ROLE, "ears", "voice"]) == ["no_worker", RETRY_US, "ears", "voice"]
    assert control.submit(roles=[ROLE])[0] == "ok"


def test_worker_lost_a_moment_ago_is_expected_back(control: Control) -> None:
    control.kill()
    assert control.submit("req-2", roles=[ROLE], grace_us=30_000_000)[0] == "ok"
    assert control.submit("req-3", roles=[ROLE]) == ["no_worker", RETRY_US, ROLE]
