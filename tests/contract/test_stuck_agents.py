"""Agents of dead peers: they close completely, and an agent that can never close neither stops the
process nor goes unnoticed.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from fleet.core.chunk import TensorRef
from fleet.core.errors import TransferError, TransferStopped
from fleet.core.ids import RequestId, WorkerId
from fleet.core.pages import Memory
from fleet.transfer import closing, watch
from fleet.transfer.agent import DIGEST_BYTES, Agent
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from fleet.transfer.watch import WATCH, AgentReport, check_agents
from tests.contract.incomplete_entries import receive_queues, threads_of_agents, wait_until_spinning
from tests.contract.transfer_peer import PeerProcess, pattern, peer_process, ref_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

MIB = 1024 * 1024
DEADLINE_S = 10.0
TCP_ALONE = {"UCX_TLS": "tcp"}


@pytest.fixture
def survivor() -> Iterator[NixlTransfer]:
    yield from opened(LOCAL)


@pytest.fixture
def tcp_survivor() -> Iterator[NixlTransfer]:
    yield from opened(Reach(("lo",)))


def opened(reach: Reach) -> Iterator[NixlTransfer]:
    transfer = NixlTransfer(WorkerId("survivor@here:40"), 8 * MIB, 4 * MIB, reach)
    yield transfer
    assert transfer.close()


def read_once(reader: NixlTransfer, peer: PeerProcess, num_bytes: int = MIB) -> None:
    ref = ref_of(peer.publish("r", 1, num_bytes))
    pull = reader.pull(ref, peer.metadata, DEADLINE_S)
    (data,) = wait_until(
        lambda: [data for data in [pull.poll()] if data is not None], "the read to end"
    )
    assert data == pattern(1, num_bytes)
    peer.release("r")


def open_files_and_threads() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads()


def cpu_of_agents_s() -> float:
    """Return the largest CPU time of a thread of an agent."""
    uses = [watch.read_use(thread) for thread in threads_of_agents()]
    return max(use.cpu_s for use in uses if use is not None)


@contextmanager
def peer_that_dies_within_a_message(
    reader: NixlTransfer,
) -> Iterator[tuple[PeerProcess, TensorRef]]:
    """Connect to a peer, which publishes a tensor, reserves an entry in the reader's queue and is
    killed. The entry is withdrawn at the end, after which the reader's agent works again.
    """
    with peer_process("nixl", "mortal@peer:41", 8 * MIB) as mortal:
        before = receive_queues(os.getpid())
        read_once(reader, mortal)
        (queue,) = receive_queues(os.getpid()) - before
        ref = ref_of(mortal.publish("late", 2, MIB))
        queue.begin_entry()
        mortal.kill()
        try:
            wait_until_spinning(1)
            yield mortal, ref
        finally:
            queue.withdraw_entry()


@pytest.fixture(scope="module")
def other() -> Iterator[PeerProcess]:
    with peer_process("nixl", "other@peer:42", 8 * MIB) as process:
        yield process


def test_endless_close_stops_neither_the_process_nor_its_reads(
    survivor: NixlTransfer, other: PeerProcess
) -> None:
    with peer_that_dies_within_a_message(survivor) as (mortal, _):
        survivor.forget_peer(mortal.worker)
        turns, stop = [0], threading.Event()
        counting = threading.Thread(target=count, args=(turns, stop))
        counting.start()
        read_once(survivor, other)
        wait_until(lambda: turns[0] > 100, "another thread to run")
        stop.set()
        counting.join()
        assert len(closing_agents()) == 1, "its close does not return"
        assert survivor.peers() == [other.worker]
        with pytest.raises(TransferError, match="gone"):
            survivor.connect(mortal.worker, mortal.metadata)
    wait_until(lambda: not closing_agents(), "the close to return after all")


def closing_agents() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nixl-close"]


def count(turns: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.001):
        turns[0] += 1


def test_destination_of_a_read_stays_reserved_while_its_agent_cannot_close(
    survivor: NixlTransfer,
) -> None:
    with peer_that_dies_within_a_message(survivor) as (mortal, ref):
        pull = survivor.pull(ref, mortal.metadata, DEADLINE_S)
        survivor.forget_peer(mortal.worker)
        with pytest.raises(TransferError):
            pull.poll()
        assert not pull.settled and survivor.used_slots() == 1
        assert survivor.stalled_peers() == []
    wait_until(lambda: survivor.used_slots() == 0, "the destination to be free")


def test_agent_that_spins_is_noticed_until_it_works_again(
    survivor: NixlTransfer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "STALLED_CPU_S", 0.2)
    monkeypatch.setattr(watch, "STUCK_CPU_S", 0.5)
    assert WATCH.observe() == AgentReport()
    with peer_that_dies_within_a_message(survivor) as (mortal, _):
        wait_until(lambda: WATCH.observe().stuck, "the agent to be noticed")
        names = (f"{survivor.agent}<{mortal.worker}",)
        report = WATCH.observe()
        assert report == AgentReport(stalled=names, stuck=names)
        with pytest.raises(TransferStopped, match="neither progress nor can be closed"):
            check_agents(report)
    assert len([line for line in caplog.messages if "makes no progress" in line]) == 1
    wait_until(lambda: WATCH.observe() == AgentReport(), "the agent to work again")


def test_busy_agents_are_not_taken_for_stuck_ones(
    tcp_survivor: NixlTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that read, and that are read from, over TCP, where both take CPU time, are not stuck,
    although they use several times the CPU time that a stuck one would be allowed.
    """
    monkeypatch.setattr(watch, "STALLED_CPU_S", 0.05)
    with peer_process("nixl", "busy@peer:43", 8 * MIB, env=TCP_ALONE, interface="lo") as busy:
        mine = ref_of(tcp_survivor.publish(RequestId("m"), "uint8", (3 * MIB,), bytes(3 * MIB)))
        used_s = cpu_of_agents_s()
        while cpu_of_agents_s() < used_s + 6 * watch.STALLED_CPU_S:
            busy.read(mine, tcp_survivor.metadata(), rounds=20)
            for _ in range(20):
                read_once(tcp_survivor, busy, 3 * MIB)
            assert WATCH.observe() == AgentReport()
        tcp_survivor.release(RequestId("m"))


def test_transfer_that_cannot_close_returns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "CLOSE_S", 0.1)
    transfer = NixlTransfer(WorkerId("leaver@here:44"), 8 * MIB, 4 * MIB)
    with peer_that_dies_within_a_message(transfer):
        assert not transfer.close()
        assert any("has not closed" in line for line in caplog.messages)
    wait_until(lambda: not closing_agents(), "the close to return after all")


def test_refused_peer_and_refused_memory_leave_nothing_open(
    survivor: NixlTransfer, other: PeerProcess
) -> None:
    """A connection that fails leaves nothing open, even while its error, which refers to its
    objects, is kept.
    """
    honest = other.metadata[:-DIGEST_BYTES]
    forged = [
        (WorkerId("nobody@peer:45"), honest + digest_of("nobody@peer:45", honest)),
        (WorkerId("junk@peer:46"), bytes(64) + digest_of("junk@peer:46", bytes(64))),
    ]
    before, kept = threads_of_agents(), list[TransferError]()
    for worker, metadata in forged:
        with pytest.raises(TransferError) as refused:
            survivor.connect(worker, metadata)
        kept.append(refused.value)
    with pytest.raises(TransferError) as refused:
        Agent("without GPU", [Memory(4096, MIB, 0)])
    kept.append(refused.value)
    wait_until(lambda: threads_of_agents() == before, "every agent to be closed")
    assert len(kept) == 3 and survivor.peers() == []


def digest_of(name: str, signed: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + signed).digest()[:DIGEST_BYTES]


def test_dead_peers_leave_nothing_open(survivor: NixlTransfer) -> None:
    """Peers that read from the survivor, and are read from, leave nothing open after they were
    killed and forgotten.
    """
    mine = ref_of(survivor.publish(RequestId("mine"), "uint8", (MIB,), bytes(MIB)))
    left: list[tuple[int, int]] = []
    for number in range(6):
        before = threads_of_agents()
        with peer_process("nixl", f"mortal@peer:{50 + number}", 8 * MIB) as mortal:
            read_once(survivor, mortal)
            mortal.read(mine, survivor.metadata())
            mortal.kill()
        assert survivor.peers() == [mortal.worker]
        survivor.forget_peer(mortal.worker)
        wait_until(lambda before=before: threads_of_agents() == before, "its agent to be closed")
        wait_until(lambda: not closing_agents(), "its close to return")
        left.append(open_files_and_threads())
    survivor.release(RequestId("mine"))
    assert left[2:] == [left[2]] * 4, f"open files and threads after each death: {left}"
