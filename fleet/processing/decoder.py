"""Main program of a decoder process: reads jobs with audio files from stdin and writes samples to
stdout, within limits of CPU time and memory that the kernel enforces.

If a crafted file crashes a codec library or exceeds a limit, only one request fails. Knows no
gateway; the process ends when stdin is closed.
"""

import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.constraints.grammar import check_rule
from fleet.constraints.trial import vocabulary
from fleet.core.errors import BadInput
from fleet.processing.audio import decode_blocks, decode_parts
from fleet.processing.decoding import (
    OUT_OF_MEMORY,
    DecodeJob,
    DecodeReply,
    Job,
    RuleJob,
    read_message,
    write_message,
)
from fleet.processing.spooled_audio import pcm16


def main() -> None:
    # output of libraries must not mix with the replies
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # a stopping gateway finishes its running requests
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used_bytes = _address_space()
    while (message := read_message(jobs)) is not None:
        job = msgspec.msgpack.decode(message, type=Job)
        del message
        _limit(resource.RLIMIT_CPU, _cpu_s() + job.cpu_s)
        _limit(
            resource.RLIMIT_AS, used_bytes + job.memory_bytes if used_bytes is not None else None
        )
        try:
            for reply in _replies(job):
                write_message(replies, reply)
        except MemoryError:
            raise SystemExit(OUT_OF_MEMORY) from None
        # the next job is limited once it is read
        _limit(resource.RLIMIT_CPU, None)
        _limit(resource.RLIMIT_AS, None)


def _replies(job: Job) -> Iterator[DecodeReply]:
    """Yield the replies to a job; the last one has no `pcm`."""
    try:
        if isinstance(job, RuleJob):
            check_rule(job.constraint, job.where, vocabulary(job.num_ids, job.named))
            yield DecodeReply()
        else:
            yield from _streamed(job) if job.streams else _whole(job)
    except BadInput as error:
        yield DecodeReply(code=error.code, message=error.message, param=error.param)


def _streamed(job: DecodeJob) -> Iterator[DecodeReply]:
    ((where, data),) = job.parts
    for block in decode_blocks(data, rate_hz=job.rate_hz, max_s=job.max_audio_s, where=where):
        if len(block):
            yield DecodeReply(pcm=pcm16(block))
    yield DecodeReply()


def _whole(job: DecodeJob) -> Iterator[DecodeReply]:
    clips = decode_parts(job.parts, rate_hz=job.rate_hz, max_audio_s=job.max_audio_s)
    yield DecodeReply(clips=[clip.tobytes() for clip in clips])


def _limit(kind: int, value: int | None) -> None:
    """Set a resource limit of this process, such as `RLIMIT_CPU`; None sets the highest limit that
    the process may have. The kernel ends a process beyond its CPU time with SIGXCPU.
    """
    _, most = resource.getrlimit(kind)
    if value is None or (most != resource.RLIM_INFINITY and value > most):
        value = most
    resource.setrlimit(kind, (value, most))


def _cpu_s() -> int:
    """Return the CPU time used so far, rounded up."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return math.ceil(spent.ru_utime + spent.ru_stime)


def _address_space() -> int | None:
    """Return the size of this process's address space in bytes; None on systems without /proc,
    where the size cannot be limited either.
    """
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[0]) * resource.getpagesize() if pages.is_file() else None
