"""A source process is frozen while its KV blocks are read over TCP: the blocks are recomputed, and
the answers stay byte-equal.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fleet.core.ids import WorkerId, place_of
from fleet.core.pages import Span
from fleet.graphs.qwen3_omni import QWEN3_OMNI
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.peer_link import NixlBlockRead
from fleet.worker.loop.loop import WorkerLoop
from tests.harness import EdgeArrays, ThreadFleet, answer, assert_same, gateway, thread_fleet
from tests.oracle.cases import CASES, make_frontend, spec_of
from tests.support import freeze_process, start_cli, wait_until

pytestmark = pytest.mark.one_file_in(6, "engines")

SOURCE, OTHER_HALF = "thinker.prefill", "thinker.decode"
ONE_FLEET = (
    "engine=torch",
    "device=cpu",
    "dtype=float32",
    "numerics=invariant",
    f"graph={QWEN3_OMNI.name}",
)
LARGE_PAGES = ("stages.thinker.page_size_tokens=1024", "stages.thinker.kv_pages=24")
"""Settings with large KV pages: 2 MiB of keys and values per request, for any prompt."""
SPLIT = ("stages.thinker.split.prefill.replicas=1", "stages.thinker.split.decode.replicas=1")
OVER_TCP = ("transfer.kind=nixl", "transfer.interface=lo")
IMPATIENT = ("transfer.deadline_s=1.0", "lease.worker_ttl_s=2.0")
KINDS = ("text", "audio", "three turns", "other voice", "speech outlasts text")
ASKED = [case for case in CASES if case.name in KINDS]
START_S = 150.0


@dataclass(slots=True)
class FreezeOnSecondRead:
    """Stops the source process when the second read from it begins; the first is in progress, or
    has just completed.
    """

    pid: int
    reads: int = 0
    frozen: threading.Event = field(default_factory=threading.Event)

    def watch(self, loop: WorkerLoop) -> None:
        transfer = loop.transfer
        assert isinstance(transfer, NixlTransfer) and transfer.shares_memory
        read = transfer.read_blocks

        def watched(
            peer: WorkerId, peer_metadata: bytes, spans: Sequence[Span], deadline_s: float
        ) -> NixlBlockRead:
            self.reads += place_of(peer)[1] == self.pid
            if self.reads == 2 and not self.frozen.is_set():
                freeze_process(self.pid)
                self.frozen.set()
            return read(peer, peer_metadata, spans, deadline_s)

        transfer.read_blocks = watched


def replace_source(fleet: ThreadFleet, freezes: FreezeOnSecondRead) -> None:
    """Add a worker that gets the frozen source's tasks once its lease has lapsed."""
    assert freezes.frozen.wait(timeout=START_S), "no second read began"
    fleet.add_worker(SOURCE)


async def ask_all(fleet: ThreadFleet, checkpoint: Path) -> list[EdgeArrays]:
    frontend = make_frontend(checkpoint)
    async with gateway(fleet) as client:
        return await asyncio.gather(
            *(answer(client, *spec_of(case, frontend, temperature=0.9, seed=5)) for case in ASKED)
        )


@pytest.mark.timeout(600)
async def test_source_frozen_during_import_changes_no_answer(
    redis_url: str, tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ways = (*ONE_FLEET, *LARGE_PAGES, *IMPATIENT)
    with thread_fleet(redis_url, *ways, checkpoint=tiny_checkpoint) as fleet:
        expected = await ask_all(fleet, tiny_checkpoint)
    sets = [
        word
        for way in (*ways, *SPLIT, *OVER_TCP, f"checkpoint={tiny_checkpoint}")
        for word in ("--set", way)
    ]
    env = {"REDIS_URL": redis_url, "UCX_TLS": "tcp"}
    with (
        thread_fleet(
            redis_url,
            *ways,
            *SPLIT,
            *OVER_TCP,
            checkpoint=tiny_checkpoint,
            transfer="nixl",
            without=SOURCE,
        ) as fleet,
        start_cli("worker", SOURCE, *sets, cwd=tmp_path, env=env) as child,
    ):
        child.wait_for("is ready", timeout_s=START_S)
        freezes = FreezeOnSecondRead(child.process.pid)
        taker = next(loop for loop in fleet.loops if loop.role == OTHER_HALF)
        freezes.watch(taker)
        with caplog.at_level(logging.WARNING):
            results = await asyncio.gather(
                ask_all(fleet, tiny_checkpoint), asyncio.to_thread(replace_source, fleet, freezes)
            )
        for got, want in zip(results[0], expected, strict=True):
            assert_same(got, want)
        assert "could not be pulled; it is computed here" in caplog.text

        # Once the source is fenced; not before, since it might still write.
        wait_until(
            lambda: taker.maintenance.vitals["pages_used"] == 0,
            "the frozen reads' destinations to be free",
            timeout_s=30,
        )
        assert psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED
        os.kill(child.process.pid, signal.SIGCONT)
        # What it had still to send meets a closed connection. UCX may take it down for that; else
        # it finds itself fenced.
        wait_until(
            lambda: child.process.poll() is not None or child.output().count("is ready") == 2,
            "it to join again",
            START_S,
        )
        for got, want in zip(await ask_all(fleet, tiny_checkpoint), expected, strict=True):
            assert_same(got, want)
