"""Opening of one incarnation of a worker: memory that peers can read, registration in Redis, and
the loop.
"""

from contextlib import ExitStack
from dataclasses import dataclass

from fleet.drafts.exchange.follower import HeadFollower, HeadMemory, head_settings
from fleet.drafts.exchange.records import RedisRecords
from fleet.worker.context import WorkerContext
from fleet.worker.loop.cached_sessions import CachedSessions
from fleet.worker.loop.loop import WorkerLoop
from fleet.worker.loop.parts import WorkerParts, open_cached_sessions, open_parts
from fleet.worker.process.registration import process_fields, register_worker
from fleet.worker.sessions.service import SessionService
from fleet.worker.task.hand_off import share_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWorker:
    """A registered worker. `close` ends everything but the transfer, which the caller opened."""

    loop: WorkerLoop
    closing: ExitStack

    def close(self) -> None:
        self.closing.close()


def open_worker(context: WorkerContext) -> OpenWorker:
    """Register a worker and return it ready to run. Raises: VersionSkew, ConfigError,
    TransferError.
    """
    built, config = context.settings.built, context.config
    with ExitStack() as closing:
        if context.settings.is_split:
            share_pool(context.engine, context.transfer, config.transfer.buffer_device)
        memory = (
            HeadMemory(built.heads.capacity_bytes, context.transfer)
            if built.heads is not None
            else None
        )
        cached_sessions = open_cached_sessions(context)
        sessions = _open_session_service(context, cached_sessions)
        if sessions is not None:
            closing.callback(sessions.close)
        standing_by = _register(context, sessions)
        if built.begin_training is not None:
            stage = context.graph.main_stage.name
            built.begin_training(RedisRecords(context.client, context.worker, stage))
        parts = open_parts(context, cached_sessions, standing_by=standing_by)
        heads = _follow_heads(context, parts, memory) if memory is not None else None
        if heads is not None:
            closing.callback(heads.close)
        loop = WorkerLoop(context, parts, sessions, heads)
        return OpenWorker(loop=loop, closing=closing.pop_all())


def _open_session_service(
    context: WorkerContext, cached_sessions: CachedSessions
) -> SessionService | None:
    """Return the service that `fleet session` connects to; None unless the worker caches
    conversations and its engine can copy them.
    """
    settings, copies = context.settings, context.engine.sessions
    if not cached_sessions.is_on or copies is None:
        return None
    return SessionService(
        copies,
        settings.stage,
        settings.fingerprint,
        settings.access.listening_place(context.config),
        context.worker,
        settings.access.secret,
        lambda session: cached_sessions.adopt(settings.stage, session),
    )


def _follow_heads(context: WorkerContext, parts: WorkerParts, memory: HeadMemory) -> HeadFollower:
    heads = context.settings.built.heads
    assert heads is not None, "memory for a head without a head"
    settings = head_settings(context.config)
    return HeadFollower(
        settings, heads, memory, context.transfer, context.link, parts.receiver.peer
    )


def _register(context: WorkerContext, sessions: SessionService | None) -> bool:
    """Register the worker in Redis; return True if it must stand by. Raises: VersionSkew."""
    settings, transfer = context.settings, context.transfer
    fields: dict[str, str | bytes] = {
        **settings.record_fields,
        **process_fields(
            context.config,
            settings.serves,
            fingerprint=settings.fingerprint,
            device=settings.device,
            dtype=settings.dtype,
        ),
        "capacity": str(context.config.stage(settings.stage).max_batch),
        "next_role": settings.serves.next or "",
        "no_worker_us": str(int(context.config.lease.no_worker_timeout_s * 1e6)),
        "backend": transfer.backend,
        "registered_address": str(transfer.registered_address),
        "registered_bytes": str(transfer.registered_bytes),
        **(sessions.fields if sessions is not None else {}),
    }
    return register_worker(
        context.client,
        context.config,
        settings.serves,
        context.worker,
        settings.access.record(context.worker, settings.role, fields, transfer),
        lease_us=context.lease_us,
    )
