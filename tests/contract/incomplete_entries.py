"""Incomplete entries in the shared memory of UCX, as a peer leaves them that is killed while it
writes a message.

A sender first raises the `head` of the receiver's queue, then writes the entry that it has reserved
so, and then marks it as complete (`uct_mm_ep_am_common_send`, UCX 1.23). Here `head` is raised and
nothing is written.
"""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fleet.transfer.watch import ThreadUse, read_use
from tests.support import wait_until

SEGMENT = "ucx_shm_posix"
HEAD = struct.Struct("<QIH")
"""Start of a queue (`uct_mm_fifo_ctl_t`): head, then length and family of its Unix socket's
address.
"""
SPUN_S = 0.03
"""CPU time of a thread without a sleep after which it is taken to spin."""
ARMED = 1 << 63
"""Bit of the head that is set while the receiver sleeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveQueue:
    """Queue of an agent in process `pid` for messages of its peers. `inode`: identity of the queue;
    `address`: one place where the process maps it.
    """

    pid: int
    inode: int
    address: int = field(compare=False)

    def begin_entry(self) -> None:
        """Reserve an entry, as a peer does, and never write it."""
        self._write_head((self._head() & ~ARMED) + 1)

    def withdraw_entry(self) -> None:
        """Undo `begin_entry`, after which the agent works again."""
        with suppress(OSError):  # an agent that has closed nevertheless
            self._write_head((self._head() & ~ARMED) - 1)

    def _head(self) -> int:
        return HEAD.unpack(read_memory(self.pid, self.address, HEAD.size))[0]

    def _write_head(self, head: int) -> None:
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(self.address)
            memory.write(struct.pack("<Q", head))


def threads_of_agents() -> list[int]:
    """Return the kernel ids of the threads that agents of this process have started."""
    return [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if _name_of(task)[:5] == "nixl-"
    ]


def _name_of(task: Path) -> str:
    """Return the name of a thread; "" if it has ended meanwhile."""
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_spinning(num_agents: int) -> None:
    """Wait until the threads of `num_agents` agents of this process have met their incomplete
    entries. An agent that closes before that closes completely.
    """
    at_rest: dict[int, ThreadUse] = {}

    def num_spinning() -> int:
        num = 0
        for thread in threads_of_agents():
            use = read_use(thread)
            if use is not None and at_rest.setdefault(thread, use).num_sleeps != use.num_sleeps:
                at_rest[thread] = use
            num += use is not None and use.cpu_s > at_rest[thread].cpu_s + SPUN_S
        return num

    wait_until(lambda: num_spinning() == num_agents, f"{num_agents} agents to spin")


def read_memory(pid: int, address: int, num_bytes: int) -> bytes:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(num_bytes)


def own_segments(pid: int) -> set[int]:
    """Return the inodes of the segments that a process has open."""
    found: set[int] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if SEGMENT in os.readlink(entry):
                found.add(entry.stat().st_ino)
    return found


def receive_queues(pid: int) -> set[ReceiveQueue]:
    """Return the queues of all agents of a process. A process maps its own queues, each twice, and
    queues of peers, of which it has no open file.
    """
    own = own_segments(pid)
    found: dict[int, ReceiveQueue] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        if SEGMENT not in line or int(inode) not in own or int(offset, 16):
            continue
        address = int(span.partition("-")[0], 16)
        head, length, family = HEAD.unpack(read_memory(pid, address, HEAD.size))
        if family == socket.AF_UNIX and 2 <= length <= 110 and head & ~ARMED < 1 << 32:
            found.setdefault(int(inode), ReceiveQueue(pid=pid, inode=int(inode), address=address))
    return set(found.values())
