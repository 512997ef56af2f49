"""Parts of a worker that the steps of its loop share: its tasks, and the objects that move inputs,
outputs, and keys and values.
"""

from dataclasses import dataclass

from fleet.telemetry.counts import PullTally
from fleet.worker.context import WorkerContext
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.process.availability import Availability
from fleet.worker.task.hand_off import AbandonedImports, Offers
from fleet.worker.task.receiver import Receiver
from fleet.worker.task.sender import Sender
from fleet.worker.task.task_table import TaskTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    tasks: TaskTable
    sender: Sender
    receiver: Receiver
    offers: Offers
    imports: AbandonedImports
    cached_sessions: CachedSessions
    availability: Availability
    pull_tally: PullTally


def open_cached_sessions(context: WorkerContext) -> CachedSessions:
    """Return the record of conversations cached in this worker. In a split stage nothing is cached:
    the worker that ends a task is not the worker that begins the task of the next turn.
    """
    config = context.config
    return CachedSessions(
        context.engine.prefixes,
        context.worker,
        keep_s=config.lease.prefix_cache_s,
        max_sessions=0 if context.settings.is_split else config.limits.max_cached_conversations,
    )


def open_parts(
    context: WorkerContext, cached_sessions: CachedSessions, *, standing_by: bool = False
) -> WorkerParts:
    engine, transfer = context.engine, context.transfer
    tally = PullTally()
    sender = Sender(transfer, context.worker)
    receiver = Receiver(transfer, context.link, context.config.transfer.deadline_s, tally)
    offers = Offers(engine, transfer, context.worker)
    imports = AbandonedImports()
    return WorkerParts(
        tasks=TaskTable(engine, sender, receiver, offers, imports, cached_sessions),
        sender=sender,
        receiver=receiver,
        offers=offers,
        imports=imports,
        cached_sessions=cached_sessions,
        availability=Availability(standing_by=standing_by),
        pull_tally=tally,
    )
