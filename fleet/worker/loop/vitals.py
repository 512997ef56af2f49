"""Stats that a worker's lease publishes in the worker's record."""

import psutil

from fleet.drafts.exchange.follower import HeadFollower
from fleet.drafts.figures.speculation import encode_speculation
from fleet.drafts.figures.training import encode_training
from fleet.spans.protocol.figures import encode_figures
from fleet.worker.context import WorkerContext
from fleet.worker.loop.parts import WorkerParts

Vitals = dict[str, int | str]
PROCESS = psutil.Process()


def read_vitals(context: WorkerContext, parts: WorkerParts, heads: HeadFollower | None) -> Vitals:
    """Return the fields of the record that change while the worker runs."""
    stats, transfer = context.engine.stats(), context.transfer
    vitals: Vitals = {
        "running": len(parts.tasks),
        "pages_used": stats.kv.pages_used,
        "pages_total": stats.kv.pages_total,
        "pages_kept": stats.kv.pages_cached,
        "rows_reused": stats.kv.rows_reused,
        "slots_used": transfer.used_slots(),
        "hops": context.link.hops.encoded(),
        "pulls": parts.pull_tally.encoded(parts.receiver.in_flight()),
        "used_bytes": transfer.used_bytes(),
        "memory_bytes": PROCESS.memory_info().rss,
    }
    if stats.speculation is not None:
        vitals["speculation"] = encode_speculation(stats.speculation)
    if heads is not None:
        vitals["held_head"] = heads.held
    if stats.training is not None:
        vitals["training"] = encode_training(stats.training)
    if stats.spans is not None:
        vitals["span_figures"] = encode_figures(stats.spans)
    return vitals
