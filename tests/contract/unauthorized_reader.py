"""A process outside the fleet that tries to read a worker's memory by the metadata that the worker
registered.

Run as a module with four arguments: the metadata, the address to read, the user to become, and
"tcp" or "shared memory". Prints how the attempt ended.
"""

import os
import sys
import time

import psutil

from fleet.core.errors import TransferError
from fleet.core.pages import Span
from fleet.transfer.agent import Agent
from fleet.transfer.memory import HostMemory
from fleet.transfer.reach import LOCAL, Reach

LENGTH_BYTES = 64
PATIENCE_S = 3.0


def attack(agent: Agent, memory: HostMemory, metadata: bytes, address: int, user: int) -> str:
    if user != os.getuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    try:
        handle = agent.start_read(
            agent.add_peer(metadata), [Span(address, memory.address, LENGTH_BYTES)]
        )
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if agent.is_done(handle):
                return f"read {bytes(memory.view).hex()}"
    except TransferError as error:
        return f"refused: {error.message}"
    return "refused: no bytes arrived"


if __name__ == "__main__":
    own = HostMemory(LENGTH_BYTES)
    reader = Agent(
        "reader",
        [own.region],
        LOCAL if sys.argv[4] == "shared memory" else Reach(tuple(psutil.net_if_addrs())),
    )
    print(
        attack(reader, own, bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])),
        flush=True,
    )
    # After a change of user it cannot open its own shared memory, for which closing an agent would
    # wait.
    os._exit(0)
