"""A fake fleet at its limits: a thousand workers with long names, two hundred rows in every table,
words without spaces.
"""

import msgspec
from msgspec.structs import replace

from fleet.control.voice import HeldVoice
from fleet.core.clock import now_us
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.telemetry.trace import RequestRow
from fleet.telemetry.views import RoleQueue, WorkerView
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill, session
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_requests import request_id

HOST = "ip-10-224-117-203.eu-central-1.compute.internal.cluster-with-a-long-name.example.org"
LONG = "averylongwordwithoutanyspace" * 8
NUM_ROWS, NUM_WORKERS, NUM_ROLES = 200, 1000, 200


def fill_to_limits(gateway: ServedGateway, num_requests: int = 10_000) -> None:
    """Fill the gateway's fake client with more entries than a page shows."""
    fill(gateway)
    telemetry, now = gateway.client.telemetry, now_us()
    stages = [queue.stage for queue in telemetry.queue_list]
    telemetry.worker_list = _workers(telemetry)
    telemetry.queue_list = _queues(telemetry)
    telemetry.letters = [
        replace(telemetry.letters[0], id=request_id(number, now), why=LONG)
        for number in range(NUM_ROWS)
    ]
    telemetry.job_list = [
        replace(telemetry.job_list[number % 4], id=f"{LONG[:36]}-{number}", error=LONG)
        for number in range(NUM_ROWS)
    ]
    for number in range(NUM_ROWS):
        view = session(number, "listening", "")
        view = replace(view, voice=LONG[:40], gateway=f"gateway@{HOST}:1:1")
        fields = {"view": msgspec.json.encode(view)}
        gateway.client.voice.held[view.id] = HeldVoice(epoch=1, fields=fields)
    telemetry.lines = [
        replace(line, message=LONG, worker=str(worker.id))
        for line, worker in zip(telemetry.lines[:NUM_ROWS], telemetry.worker_list, strict=False)
    ]
    telemetry.rows = [
        _row(telemetry.rows[number % len(telemetry.rows)], number, now, stages)
        for number in range(num_requests)
    ]


def _workers(telemetry: FakeTelemetry) -> list[WorkerView]:
    """Return `NUM_WORKERS` workers, with roles and parts of divided models in rotation. Every
    fiftieth worker has left the fleet.
    """
    live, gone = telemetry.worker_list[0], telemetry.worker_list[-1]
    roles = [queue.role for queue in telemetry.queue_list]
    parts = [view.part for view in telemetry.worker_list if view.part is not None]
    return [
        replace(
            live if number % 50 else gone,
            id=WorkerId(f"{live.role}@{HOST}:{number}:{number:06x}"),
            role=roles[number % len(roles)],
            host=HOST,
            pid=number + 100_000,
            checkpoint=LONG[:64],
            part=parts[number % len(parts)],
        )
        for number in range(NUM_WORKERS)
    ]


def _queues(telemetry: FakeTelemetry) -> list[RoleQueue]:
    """Return queues of many roles, the first four with pending grants."""
    pending = telemetry.queue_list[0].pending * 50
    queues: list[RoleQueue] = []
    for number in range(NUM_ROLES):
        template = telemetry.queue_list[number % len(telemetry.queue_list)]
        grants = [replace(g, epoch=number * 1000 + n) for n, g in enumerate(pending)]
        queues.append(
            replace(
                template,
                role=RoleName(f"{template.stage}.part-{number}"),
                pending=tuple(grants) if number < 4 else (),
            )
        )
    return queues


def _row(template: RequestRow, number: int, now: int, stages: list[StageName]) -> RequestRow:
    worker = f"{stages[0]}@{HOST}:{number % NUM_WORKERS}"
    tasks = tuple(replace(task, worker=worker) for task in template.tasks)
    created_us, error = now - number, LONG if template.error else ""
    first_us = dict.fromkeys(template.first_us, created_us + 90_000)
    return replace(
        template,
        id=RequestId(f"req-{number:022x}"),
        error=error,
        tasks=tasks,
        created_us=created_us,
        first_us=first_us,
    )
