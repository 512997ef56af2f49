"""A fleet at its limits: a thousand workers with long names, two hundred rows of everything, words
without spaces.
"""

import msgspec

from fleet.control.voice import HeldVoice
from fleet.core.clock import now_us
from fleet.core.ids import RequestId, RoleName, StageName, WorkerId
from fleet.telemetry.trace import RequestRow
from tests.web.conftest import ServedGateway
from tests.web.console.busy_gateway import fill, session
from tests.web.plausible import request_id

HOST = "ip-10-224-117-203.eu-central-1.compute.internal.cluster-with-a-long-name.example.org"
LONG = "averylongwordwithoutanyspace" * 8
NUM_ROWS, NUM_WORKERS, NUM_ROLES = 200, 1000, 200


def fill_to_limits(gateway: ServedGateway, num_requests: int = 10_000) -> None:
    """Fill the gateway's fake client beyond what a page shows."""
    fill(gateway)
    telemetry, now = gateway.client.telemetry, now_us()
    template = telemetry.worker_list[0]
    divided = [view.part for view in telemetry.worker_list if view.part is not None]
    telemetry.worker_list = [
        msgspec.structs.replace(
            template if number % 50 else telemetry.worker_list[-1],
            id=WorkerId(f"{template.role}@{HOST}:{number}:{number:06x}"),
            role=telemetry.queue_list[number % len(telemetry.queue_list)].role,
            host=HOST,
            pid=number + 100_000,
            checkpoint=LONG[:64],
            part=divided[number % len(divided)],
        )
        for number in range(NUM_WORKERS)
    ]
    stages = [queue.stage for queue in telemetry.queue_list]
    telemetry.queue_list = [
        msgspec.structs.replace(
            telemetry.queue_list[number % len(stages)],
            role=RoleName(f"{stages[number % len(stages)]}.part-{number}"),
            pending=telemetry.queue_list[0].pending * 50 if number < 4 else (),
        )
        for number in range(NUM_ROLES)
    ]
    telemetry.queue_list = [
        msgspec.structs.replace(
            queue,
            pending=tuple(
                msgspec.structs.replace(g, epoch=place * 1000 + n)
                for n, g in enumerate(queue.pending)
            ),
        )
        for place, queue in enumerate(telemetry.queue_list)
    ]
    telemetry.letters = [
        msgspec.structs.replace(telemetry.letters[0], id=request_id(number, now), why=LONG)
        for number in range(NUM_ROWS)
    ]
    telemetry.job_list = [
        msgspec.structs.replace(
            telemetry.job_list[number % 4], id=f"{LONG[:36]}-{number}", error=LONG
        )
        for number in range(NUM_ROWS)
    ]
    for number in range(NUM_ROWS):
        view = msgspec.structs.replace(
            session(number, "listening", ""), voice=LONG[:40], gateway=f"gateway@{HOST}:1:1"
        )
        gateway.client.held[view.id] = HeldVoice(
            epoch=1, fields={"view": msgspec.json.encode(view)}
        )
    telemetry.lines = [
        msgspec.structs.replace(
            telemetry.lines[number], message=LONG, worker=str(telemetry.worker_list[number].id)
        )
        for number in range(NUM_ROWS)
    ]
    telemetry.rows = [
        _row(telemetry.rows[number % len(telemetry.rows)], number, now, stages)
        for number in range(num_requests)
    ]


def _row(template: RequestRow, number: int, now: int, stages: list[StageName]) -> RequestRow:
    worker = f"{stages[0]}@{HOST}:{number % NUM_WORKERS}"
    tasks = tuple(msgspec.structs.replace(task, worker=worker) for task in template.tasks)
    created_us, error = now - number, LONG if template.error else ""
    first_us = dict.fromkeys(template.first_us, created_us + 90_000)
    return msgspec.structs.replace(
        template,
        id=RequestId(f"req-{number:022x}"),
        error=error,
        tasks=tasks,
        created_us=created_us,
        first_us=first_us,
    )
