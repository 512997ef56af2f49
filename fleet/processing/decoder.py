"""A decoder process: audio files come in, samples go out, within limits of CPU time and memory that the kernel holds.

What a crafted file does to a codec's library ends here: a crash, or a limit that is reached, costs one request. Knows no gateway:
it ends when its input does.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from fleet.core.errors import BadInput
from fleet.processing.audio import decode_parts
from fleet.processing.decoding import OUT_OF_MEMORY, DecodeJob, DecodeReply, read_message, write_message

NICENESS = 5
"""Answers under way, of this gateway and of workers beside it, come first."""


def main() -> None:
    # libraries that print must not print into the replies
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # what is under way in the gateway when it is stopped may end
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    used_bytes = _address_space()
    while (message := read_message(jobs)) is not None:
        job = msgspec.msgpack.decode(message, type=DecodeJob)
        del message
        _limit(job, used_bytes)
        write_message(replies, _reply(job))


def _reply(job: DecodeJob) -> DecodeReply:
    try:
        clips = decode_parts(job.parts, rate_hz=job.rate_hz, max_audio_s=job.max_audio_s)
    except BadInput as error:
        return DecodeReply(code=error.code, message=error.message, param=error.param)
    except MemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None
    return DecodeReply(clips=[clip.tobytes() for clip in clips])


def _limit(job: DecodeJob, used_bytes: int | None) -> None:
    """Limit what the process may use from now on. Beyond its CPU time the kernel ends it with SIGXCPU."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(spent.ru_utime + spent.ru_stime) + 1 + job.cpu_s
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s if most == resource.RLIM_INFINITY else min(cpu_s, most), most))
    if used_bytes is not None:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        memory = used_bytes + job.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))


def _address_space() -> int | None:
    """Return the size of this process's address space; None where there is no /proc, and no such limit either."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[0]) * resource.getpagesize() if pages.is_file() else None


if __name__ == "__main__":
    main()
