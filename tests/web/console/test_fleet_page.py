"""The first page of the room Fleet: stages and edges, ordered numbers of workers, conversations;
and the route by which a number is ordered.
"""

import re
from collections import Counter

import msgspec
import pytest

from fleet.telemetry.views import RoleQueue
from tests.web.conftest import Loaded, ServedGateway, bounded, serving
from tests.web.console.busy_gateway import fill
from tests.web.fake_telemetry import FakeTelemetry


@pytest.fixture
def telemetry(gateway: ServedGateway) -> FakeTelemetry:
    fill(gateway)
    return gateway.client.telemetry


def element(gateway: ServedGateway, tag: str, name: str, path: str = "/fleet") -> str:
    """Return the HTML of the element with the id `name`, up to the first end of `tag`."""
    _, found, rest = gateway.http.get(path).text.partition(f'id="{name}"')
    assert found, f"no element {name}"
    return rest.partition(f"</{tag}>")[0]


def change_role(telemetry: FakeTelemetry, role: str, **fields: object) -> None:
    telemetry.queue_list = [
        msgspec.convert({**msgspec.to_builtins(queue), **fields}, RoleQueue)
        if queue.role == role
        else queue
        for queue in telemetry.queue_list
    ]


def test_every_edge_is_shown_with_its_traffic_and_leads_to_it(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    for flow in telemetry.transfer_view.flows:
        shown = element(gateway, "p", f"flow-{flow.edge}")
        assert f'href="/transfers#flow-{flow.edge}"' in shown
        assert re.search(r"chunks/s.*[kM]?B/s", shown, re.DOTALL)
        assert ("full: 3 wait" in shown) == ("paused: 2" in shown) == bool(flow.num_waiting)
        assert f">{flow.source}<" in element(gateway, "tr", f"flow-{flow.edge}", "/transfers")


def test_stage_before_a_full_edge_is_slowed_and_leads_to_its_workers(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    (full,) = [flow for flow in telemetry.transfer_view.flows if flow.num_waiting]
    for stage in gateway.config.graph_declaration().stages:
        shown = element(gateway, "li", f"stage-{stage.name}")
        assert f'href="/workers?role={stage.name}"' in shown
        assert ("slowed" in shown) == (stage.name == full.source)


def test_workers_of_divided_layers_are_not_counted_as_ready(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    ready = Counter(view.role for view in telemetry.worker_list if view.state == "ready")
    assert ready["thinker.span"]
    assert f'<b class="num">{ready["thinker"]}</b> ready' in element(gateway, "li", "stage-thinker")


def test_number_of_workers_has_buttons_within_its_bounds(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    def buttons() -> list[tuple[str, bool, bool]]:
        """Return the body of each button, whether it is off, and whether it asks."""
        shown = element(gateway, "tr", "role-talker")
        return [
            (body, " disabled" in rest, "hx-confirm" in rest)
            for body, rest in re.findall(r"data-body='([^']+)'([^>]*)>", shown)
        ]

    assert buttons() == [('{"replicas": 0}', False, True), ('{"replicas": 2}', False, False)]
    change_role(telemetry, "talker", wanted=64)
    assert buttons() == [('{"replicas": 63}', False, False), ('{"replicas": 65}', True, False)]
    change_role(telemetry, "talker", wanted=0)
    assert buttons() == [('{"replicas": -1}', True, False), ('{"replicas": 1}', False, False)]


def test_states_on_the_way_to_the_wanted_number_are_shown(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    change_role(telemetry, "talker", wanted=4, placed=3, starting=1, draining=2)
    shown = element(gateway, "tr", "role-talker")
    assert "1/4" in shown and "configured: 1" in shown and "1 not started" in shown
    numbers = dict(
        re.findall(r'data-label="(\w+)" class="right"><span class="num[^>]*">(\d+)', shown)
    )
    assert numbers == {"Starting": "1", "Draining": "2", "Standby": "1", "Dead": "0"}
    assert " of 4</b> ready" in element(gateway, "li", "stage-talker"), "the map says the same"
    assert "/4</b> up" in element(gateway, "li", "node-talker", "/now")


def test_unmanaged_workers_have_a_command_and_no_button(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    telemetry.queue_list = [
        msgspec.structs.replace(queue, managed=False) for queue in telemetry.queue_list
    ]
    shown = element(gateway, "section", "roles")
    assert "<code>fleet worker talker</code>" in shown and "hx-put" not in shown
    assert "kubectl -n fleet scale deployment/ROLE" in shown


def test_read_only_page_has_no_button(loaded: Loaded) -> None:
    with serving(bounded(loaded, read_only=True)) as gateway:
        fill(gateway)
        assert "hx-put" not in gateway.http.get("/fleet").text


def test_conversations_are_listed_by_process(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    worker = next(view for view in telemetry.worker_list if view.tasks)
    row = element(gateway, "li", f"c-{worker.id}")
    assert all(f'href="/requests/{task.request}"' in row for task in worker.tasks)
    of_gateway = next(view for view in telemetry.worker_list if not view.role)
    sessions = element(gateway, "li", f"c-{of_gateway.id}")
    assert sessions.count("sess_") == 2 and "speaking" in sessions and "listening" in sessions


def test_number_is_ordered_through_the_api(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    answer = gateway.http.put("/v1/fleet/roles/talker", json={"replicas": 3})
    assert answer.json() == {"id": "talker", "object": "fleet.role", "replicas": 3}
    assert telemetry.scaled == [("talker", 3, "")]
    change_role(telemetry, "talker", managed=False)
    refused = gateway.http.put("/v1/fleet/roles/talker", json={"replicas": 3})
    assert refused.status_code == 409
    assert "fleet worker talker" in refused.json()["error"]["message"]
    assert gateway.http.put("/v1/fleet/roles/no", json={"replicas": 3}).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"replicas": "3"},
        {"replicas": 65},
        {"replicas": -1},
        {"replicas": 1.5},
        {"replicas": 1, "by": "x"},
        [],
        None,
    ],
)
def test_number_out_of_bounds_is_refused_by_name(
    gateway: ServedGateway, telemetry: FakeTelemetry, body: object
) -> None:
    refused = gateway.http.put("/v1/fleet/roles/talker", json=body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "replicas"
    assert "from 0 to 64" in error["message"] and telemetry.scaled == []


def test_picture_of_a_benchmark_is_beside_its_job(
    gateway: ServedGateway, telemetry: FakeTelemetry
) -> None:
    drawn = next(job for job in telemetry.job_list if "report.png" in job.files)
    row = element(gateway, "tr", f"j-{drawn.id}", "/jobs")
    assert f'src="/v1/fleet/jobs/{drawn.id}/files/report.png"' in row and 'alt="Charts of' in row
    others = [job for job in telemetry.job_list if not job.files]
    assert all("<img" not in element(gateway, "tr", f"j-{job.id}", "/jobs") for job in others)
