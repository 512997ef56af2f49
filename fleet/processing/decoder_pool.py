"""The decoder processes of a gateway: bounded in number, each started when it is first needed.
Knows no request and no codec.
"""

import asyncio
import io
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import numpy as np

from fleet.core.errors import BadInput, FleetError, from_code
from fleet.processing.base import Samples
from fleet.processing.decoding import (
    OUT_OF_MEMORY,
    DecodeJob,
    DecodeReply,
    Job,
    RuleJob,
    read_message,
    write_message,
)

log = logging.getLogger(__name__)

NICENESS = 5
"""Niceness added to decoder processes, so that the gateway and workers on the same machine have
priority, even over a decoder's imports.
"""
COMMAND = (
    sys.executable,
    "-P",
    "-c",
    f"import os; os.nice({NICENESS}); from fleet.processing.decoder import main; main()",
)
MAX_PROCESSES = 2
WALL_S_PER_CPU_S = 10
"""Allowed wall time per second of allowed CPU time, for a busy machine; a process that takes longer
is killed.
"""
END_S = 5.0
_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
)
"""Environment variables that a decoder process inherits from the gateway; none is a secret."""


class DecoderPool:
    """Pool of decoder processes that works on at most `size` jobs at a time; further jobs wait in
    order of arrival.
    """

    def __init__(self, size: int = MAX_PROCESSES) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="decoder")
        self._lock = threading.Lock()
        self._idle: list[_Decoder] = []
        self._busy: set[_Decoder] = set()
        self._closed = False

    async def decode(
        self, job: DecodeJob, on_pcm: Callable[[bytes], None] = lambda _: None
    ) -> list[Samples]:
        """Decode a job in a process of the pool and return the samples of each file. Cancelling
        this coroutine kills the process. `on_pcm`: called in a thread with the samples of a
        streamed file; the returned list is then empty.

        Raises: BadInput, InputTooLarge naming the field; FleetError if the process fails.
        """
        return await self._finish(_Call(job, on_pcm))

    async def check_rule(self, job: RuleJob) -> None:
        """Check in a process of the pool that an answer can keep its rule. Raises: BadInput naming
        the field; FleetError if the process fails.
        """
        await self._finish(_Call(job, lambda _: None))

    async def _finish(self, call: "_Call") -> list[Samples]:
        waiting = asyncio.get_running_loop().run_in_executor(self._threads, self._run, call)
        try:
            return await waiting
        except asyncio.CancelledError:
            call.cancel()
            raise

    def close(self) -> None:
        """End all decoder processes, even if they are decoding."""
        with self._lock:
            self._closed = True
            for decoder in self._busy:
                decoder.kill()
            idle, self._idle = self._idle, []
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in idle:
            decoder.end()

    def _run(self, call: "_Call") -> list[Samples]:
        decoder = self._acquire()
        try:
            return call.run(decoder)
        finally:
            self._release(decoder)

    def _acquire(self) -> "_Decoder":
        with self._lock:
            self._idle = [decoder for decoder in self._idle if decoder.is_alive]
            decoder = self._idle.pop() if self._idle else _Decoder()
            self._busy.add(decoder)
            return decoder

    def _release(self, decoder: "_Decoder") -> None:
        with self._lock:
            self._busy.discard(decoder)
            is_reusable = decoder.is_alive and not self._closed
            if is_reusable:
                self._idle.append(decoder)
        if not is_reusable:
            decoder.end()


class _Call:
    """Job and the process that works on it; `cancel` may come from another thread at any time."""

    def __init__(self, job: Job, on_pcm: Callable[[bytes], None]) -> None:
        self._job, self._on_pcm = job, on_pcm
        self._lock = threading.Lock()
        self._decoder: _Decoder | None = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._decoder is not None:
                self._decoder.kill()

    def run(self, decoder: "_Decoder") -> list[Samples]:
        with self._lock:
            if self._cancelled:
                return []
            self._decoder = decoder
        try:
            reply = decoder.run(self._job, self._on_pcm)
        finally:
            with self._lock:
                self._decoder = None
        if self._cancelled:
            return []
        if reply is None:
            raise self._failure(decoder.end())
        if reply.code:
            raise from_code(reply.code, reply.message, reply.param)
        return [np.frombuffer(clip, np.float32) for clip in reply.clips]

    def _failure(self, status: int) -> FleetError:
        """Return the error for a process that ended during the job."""
        job, where, words = self._job, self._job.where, self._job.words
        log.warning(
            "decoder process ended with status %d while %s of %s; the request fails",
            status,
            words.task,
            where,
        )
        if status == -signal.SIGXCPU:
            limit = words.cpu_limit
        elif status == OUT_OF_MEMORY:
            limit = f"{job.memory_bytes >> 20} MiB of memory"
        elif -status in _FAULTS:
            return BadInput(f"{where}: {words.fault}; {words.remedy}", param=where)
        else:
            cause = f"the process for {words.task} ended with status {status}"
            return FleetError(f"{where}: {cause}", param=where)
        message = f"{where}: {words.task} takes more than {limit}; {words.remedy}"
        return BadInput(message, param=where)


class _Decoder:
    """Decoder process and its pipes."""

    def __init__(self) -> None:
        inherited = {
            name: value for name in ENVIRONMENT if (value := os.environ.get(name)) is not None
        }
        # one thread, since each thread reserves memory
        env = {**inherited, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
            )
        except OSError as error:
            raise FleetError(
                f"the decoder process for audio could not be started: {error}"
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs = self._process.stdin
        # unbuffered, since `poll` does not see what a buffer holds
        self._replies = cast("io.FileIO", cast("io.BufferedReader", self._process.stdout).raw)
        self._killed = self._overdue = False

    @property
    def is_alive(self) -> bool:
        return not self._killed and self._process.poll() is None

    def run(self, job: Job, on_pcm: Callable[[bytes], None]) -> DecodeReply | None:
        """Return the last reply; None if the process ended during the job, or was killed because it
        took too long.
        """
        try:
            write_message(self._jobs, job)
        except OSError:
            return None
        ready = select.poll()
        ready.register(self._replies, select.POLLIN)
        due = time.monotonic() + WALL_S_PER_CPU_S * job.cpu_s
        while True:
            if not ready.poll(max(0.0, due - time.monotonic()) * 1000):
                self._overdue = True
                self.kill()
            message = read_message(self._replies)
            if message is None:
                return None
            reply = msgspec.msgpack.decode(message, type=DecodeReply)
            if not reply.pcm:
                return reply
            on_pcm(reply.pcm)

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def end(self) -> int:
        """Close the pipes of an idle or ended process, kill the process if it has not exited within
        `END_S`, and return its exit status.

        A process that was killed because it took too long is reported as one that exceeded its CPU
        time (SIGXCPU).
        """
        try:
            self._jobs.close()
        except OSError:
            log.debug("decoder process ended before it had read its job")
        self._replies.close()
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return -signal.SIGXCPU if self._overdue else status
