"""Start of a task's request in the engine. Knows no Redis."""

from fleet.engine.base import Engine
from fleet.stages.base import NO_OUTPUT
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.task.task import Task


def start_request(task: Task, engine: Engine, cached_sessions: CachedSessions) -> None:
    """Submit a task's request to the engine, and feed the engine the inputs that the adapter has at
    the start. The request begins paused if the task is. Raises: FleetError if the adapter or the
    engine refuses the request.
    """
    request, pieces = task.adapter.open(task.written)
    engine.submit(cached_sessions.join(request, task.spec.session))
    task.is_started, task.written = True, NO_OUTPUT
    for piece in pieces:
        task.cached_rows += engine.feed(task.request, piece)
    if task.paused:
        engine.pause(task.request, paused=True)
