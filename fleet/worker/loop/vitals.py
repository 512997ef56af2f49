"""Statistics of a running worker, which it publishes when it renews its lease."""

import psutil

from fleet.drafts.exchange.follower import HeadFollower
from fleet.telemetry.vitals import Vitals
from fleet.worker.context import WorkerContext
from fleet.worker.loop.parts import WorkerParts


def read_vitals(
    context: WorkerContext, parts: WorkerParts, heads: HeadFollower | None, *, num_stalled: int
) -> dict[str, int | str]:
    """Return the fields of the worker's record in Redis that change while it runs. `num_stalled`:
    number of NIXL agents that make no progress.
    """
    stats, transfer = context.engine.stats(), context.transfer
    return Vitals(
        running=len(parts.tasks),
        pages_used=stats.kv.pages_used,
        pages_total=stats.kv.pages_total,
        pages_kept=stats.kv.pages_cached,
        rows_reused=stats.kv.rows_reused,
        slots_used=transfer.used_slots(),
        hops=context.link.hops,
        pulls=parts.pull_tally.counts(parts.receiver.in_flight()),
        sent=parts.sender.counts(parts.tasks.values()),
        used_bytes=transfer.used_bytes(),
        stalled_agents=num_stalled,
        # Not a constant of this module, which the fork server imports: it would be the server.
        memory_bytes=psutil.Process().memory_info().rss,
        speculation=stats.speculation,
        held_head=(heads.held or "") if heads is not None else None,
        training=stats.training,
        span_figures=stats.spans,
    ).encode()
