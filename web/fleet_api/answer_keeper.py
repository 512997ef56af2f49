"""Keeper of answers and incidents beyond what Redis retains. Of the gateways of a host one follows
the fleet's events; each keeps the answers whose players it hears running dry.
"""

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import msgspec

from fleet.core.clock import now_us
from fleet.core.errors import NotFound, RedisUnreachable
from fleet.core.ids import RequestId
from fleet.history.choice import AnswerChoice
from fleet.history.store import KeptAnswer
from fleet.process.background import keep_running
from fleet.process.private import make_private_folder
from fleet.telemetry.trace import LIVE_STATES
from web.fleet_api.request_detail import (
    AnswerRecord,
    RequestDetail,
    pcm_of,
    read_lines,
    read_logs_without_audio,
    read_request_detail,
)
from web.gateway.gateway import Gateway
from web.openai.audio_encoder import encode_whole

log = logging.getLogger("fleet.web")

LOCK = "follower.lock"
"""Name of a lock file in the history's folder. The gateway of a host that holds its lock follows
the fleet's events for all gateways of the host.
"""
LOCK_POLL_S, WRITE_POLL_S, INCIDENT_POLL_S = 5.0, 1.0, 30.0
SETTLE_S = 3.0
"""Time after the end of an answer until it is kept, for the last reports of its player. Its audio
is stored for a minute.
"""
NUM_LINES = 200
MAX_WAITING = 1000
"""Largest number of answers that wait to be kept at one time; further answers are not kept."""
SOUND_FORMAT = "flac"


class AnswerKeeper:
    """Background tasks of one gateway, from `start` to `stop`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiting: dict[RequestId, tuple[float, set[str]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if not self._gateway.history.is_enabled:
            return
        self._gateway.playback_reports.on_dropout = lambda request: self._add(request, ["dropouts"])
        self._tasks = [
            keep_running(self._follow, "the choice of answers to keep"),
            keep_running(self._write, "the keeping of answers"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def keep(self, request: RequestId, why: Iterable[str], *, pinned: bool = False) -> None:
        """Keep an answer now. Raises: NotFound, RedisUnreachable."""
        gateway = self._gateway
        detail = await read_request_detail(gateway, request)
        logs = await read_logs_without_audio(gateway, detail)
        has_texts = may_keep_texts(detail)
        record = AnswerRecord(
            detail=detail if has_texts else without_texts(detail),
            logs={name: tuple(chunks) for name, chunks in logs.items()} if has_texts else {},
            lines=await read_lines(gateway, request, NUM_LINES),
        )
        pcm = await pcm_of(gateway, request) if gateway.history.keeps_sound and has_texts else b""
        rate_hz = gateway.frontend.sample_rate_hz
        await gateway.history.keep(
            KeptAnswer(
                request=request,
                kept_us=now_us(),
                why=tuple(why),
                pinned=pinned,
                record=await asyncio.to_thread(msgspec.msgpack.encode, record),
                sound=await asyncio.to_thread(encode_whole, pcm, rate_hz, SOUND_FORMAT)
                if pcm
                else b"",
            )
        )

    def _add(self, request: RequestId, why: Iterable[str]) -> None:
        _, known = self._waiting.get(request, (0.0, set[str]()))
        if request in self._waiting or len(self._waiting) < MAX_WAITING:
            due_s = asyncio.get_running_loop().time() + SETTLE_S
            self._waiting[request] = (due_s, known | set(why))

    async def _follow(self) -> None:
        """Follow the events and incidents once no other gateway of this host does."""
        with _lock_file(self._gateway.history.folder / LOCK) as lock:
            while not _try_lock(lock):
                await asyncio.sleep(LOCK_POLL_S)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_answers())
                group.create_task(self._keep_incidents())

    async def _follow_answers(self) -> None:
        choice = AnswerChoice()
        while True:
            try:
                await self._choose(choice)
            except RedisUnreachable:
                await asyncio.sleep(WRITE_POLL_S)

    async def _keep_incidents(self) -> None:
        """Keep each incident of the journal while it goes on, and once more when it has ended."""
        incidents = self._gateway.incidents
        while True:
            try:
                for incident in await incidents.from_journal():
                    await incidents.keep(incident)
            except RedisUnreachable as error:
                log.info("incidents cannot be read, and are not kept: %s", error.message)
            await asyncio.sleep(INCIDENT_POLL_S)

    async def _choose(self, choice: AnswerChoice) -> None:
        async with aclosing(self._gateway.client.telemetry.follow_events()) as entries:
            async for entry in entries:
                if (chosen := choice.follow(entry)) is not None:
                    self._add(*chosen)

    async def _write(self) -> None:
        """Keep the answers that are due, until cancelled. An answer is not kept if it is no longer
        stored or if Redis is unreachable.
        """
        while True:
            await asyncio.sleep(WRITE_POLL_S)
            now_s = asyncio.get_running_loop().time()
            due = [each for each, (due_s, _) in self._waiting.items() if due_s <= now_s]
            for request in due:
                _, why = self._waiting.pop(request)
                await self._keep_ended(request, why)

    async def _keep_ended(self, request: RequestId, why: set[str]) -> None:
        try:
            trace = await self._gateway.client.telemetry.trace(request)
            if trace is not None and trace.state in LIVE_STATES:
                self._add(request, why)
            elif trace is not None:
                await self.keep(request, sorted(why))
        except (NotFound, RedisUnreachable) as error:
            log.info("answer %s is not kept: %s", request, error.message)


def may_keep_texts(detail: RequestDetail) -> bool:
    """Return False if the client asked that nothing be stored (`store: false`), or if the request's
    body is not stored, since its field `store` is then unknown.
    """
    return bool(detail.body) and json.loads(detail.body).get("store") is not False


def without_texts(detail: RequestDetail) -> RequestDetail:
    """Return details without anything that was said or written."""
    return msgspec.structs.replace(detail, prompt="", answer="", body="", prompt_ids=(), heard=())


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    """Open a file that processes lock; its lock ends with the process, however it ends."""
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
