"""Sentences of the console about something absent appear only where it is absent, and name what is
expected soon.
"""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fleet.core.ids import RequestId, RoleName, StageName
from fleet.telemetry.views import LogLine, RoleQueue, RoleView, WorkerView
from tests.web.conftest import ServedGateway
from tests.web.console import html_audit
from tests.web.fake_client import worker_view
from web.console.missing_roles import describe_missing


def shown_on(gateway: ServedGateway, path: str, status: int = 200) -> str:
    answer = gateway.http.get(path)
    assert answer.status_code == status
    return " ".join(" ".join(html_audit.read(answer.text).text).split())


def change_talker(gateway: ServedGateway, **changes: object) -> None:
    telemetry = gateway.client.telemetry
    listed = asyncio.run(telemetry.workers())
    telemetry.worker_list = [
        replace(view, **changes) if view.role == "talker" else view for view in listed
    ]
    gateway.client.missing = ["talker"]


def test_draining_last_worker_is_not_called_absent(gateway: ServedGateway) -> None:
    change_talker(gateway, state="draining", running=3)
    shown = shown_on(gateway, "/workers")
    assert (
        "No worker accepts new tasks for talker (1 draining). Resume it, or start one: fleet "
        "worker talker" in shown
    )
    assert "No worker for" not in shown and "no worker" not in shown


def test_restarting_worker_needs_no_other_one(gateway: ServedGateway) -> None:
    change_talker(gateway, state="died", ended_us=1)
    starting = RoleQueue(
        role=RoleName("talker"), stage=StageName("talker"), starting=1, loaded_percent=40
    )
    gateway.client.telemetry.role_list, gateway.client.telemetry.queue_list = [starting], [starting]
    shown = shown_on(gateway, "/workers")
    assert "No worker accepts new tasks for talker (1 starting, 40 % loaded)." in shown
    assert (
        "fleet worker talker" not in shown
        and "No worker for" not in shown
        and "✕ no worker" not in shown
    )


def test_absent_worker_is_named_with_the_command_that_starts_one(
    gateway: ServedGateway,
) -> None:
    gateway.client.missing = ["talker"]
    assert "No worker for talker. Start one: fleet worker talker" in shown_on(gateway, "/workers")


def test_waiting_tasks_of_a_draining_worker_are_not_called_unserved(gateway: ServedGateway) -> None:
    change_talker(gateway, state="draining")
    gateway.client.telemetry.queue_list = [
        RoleQueue(role=RoleName("talker"), stage=StageName("talker"), queue_depth=2, draining=1)
    ]
    assert "Tasks wait. No worker accepts new tasks for talker (1 draining)." in shown_on(
        gateway, "/queues"
    )


def view(state: str) -> WorkerView:
    return worker_view("w", "talker", state=state)


START = "fleet worker talker"
GAP = RoleView(role=RoleName("talker"), gap="layers 3:5")


@pytest.mark.parametrize(
    ("workers", "roles", "said"),
    [
        ([view("standby")], [], ("No worker accepts new tasks for talker (1 standing by).", "")),
        (
            [view("late")],
            [],
            (
                "No worker accepts new tasks for talker (1 not renewing its lease). Start one:",
                START,
            ),
        ),
        ([], [GAP], ("No worker for talker (layers 3:5). Start one:", START)),
        ([], [], ("No worker for talker. Start one:", START)),
    ],
)
def test_missing_role_is_described_by_its_workers(
    workers: Sequence[WorkerView], roles: Sequence[RoleView], said: tuple[str, str]
) -> None:
    assert describe_missing([RoleName("talker")], workers, roles) == said


def test_no_missing_role_is_no_trouble() -> None:
    assert describe_missing([], [view("draining")], []) == ("", "")


def test_lists_of_expired_data_do_not_say_never(gateway: ServedGateway) -> None:
    """Requests, log lines, jobs and counts are kept for a limited time, so the text of an empty
    list does not say that there was never any.
    """
    pages = {
        path: shown_on(gateway, path)
        for path in ("/now", "/requests", "/logs", "/jobs", "/transfers", "/queues")
    }
    for path, shown in pages.items():
        for claim in (
            "No request has failed",
            "No requests yet",
            "No log lines yet",
            "No job yet",
            "No transfers yet",
            "yet.",
        ):
            assert claim not in shown, (path, claim)
    assert (
        "No event of the last hour is stored" in pages["/now"]
        and "No request is stored" in pages["/requests"]
    )


@pytest.mark.parametrize(
    ("path", "status"), [("/requests/req-gone", 404), ("/workers/gone@host:1:a", 404)]
)
def test_page_of_an_expired_object_shows_its_log_lines(
    gateway: ServedGateway, path: str, status: int
) -> None:
    line = LogLine(
        id="1-1",
        at_us=1_700_000_000_000_000,
        level="warning",
        logger="l",
        message="given up after two deaths",
        process="worker",
    )
    gateway.client.telemetry.lines = [
        replace(line, request=RequestId("req-gone"), worker="gone@host:1:a")
    ]
    shown = shown_on(gateway, path, status)
    assert "given up after two deaths" in shown and "No stored log line" not in shown
    gateway.client.telemetry.lines = []
    assert "No stored log line names" in shown_on(gateway, path, status)


def test_times_of_day_name_their_zone(gateway: ServedGateway) -> None:
    gateway.client.telemetry.lines = [
        LogLine(
            id="1-1",
            at_us=1_700_000_000_000_000,
            level="info",
            logger="l",
            message="m",
            process="web",
        )
    ]
    page = gateway.http.get("/logs").text
    assert (
        '<local-time us="1700000000000000"><time datetime="2023-11-14T22:13:20.000Z">22:13:20 UTC'
        in page
    )
