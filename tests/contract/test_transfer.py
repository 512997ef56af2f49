"""Contract of transfers between two processes, for NIXL and inline alike; then failures that only
NIXL can have.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from fleet.core.chunk import TensorRef, WireTensor
from fleet.core.errors import ConfigError, TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.lab.measure.reads import measure_reads
from fleet.transfer import peer_link
from fleet.transfer.base import Pull, Transfer
from fleet.transfer.factory import open_transfer
from fleet.transfer.inline import InlineTransfer
from fleet.transfer.memory import HEADER
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from tests.contract.transfer_peer import PeerCommand, PeerProcess, pattern, peer_process, ref_of
from tests.support import wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

MIB = 1024 * 1024
ARENA_BYTES = 24 * MIB
SIZES = (0, 1, 4096, 5 * MIB)
DEADLINE_S = 10.0
SHORT_S = 0.3
MINE = RequestId("mine")
TCP_ALONE = {"UCX_TLS": "tcp"}


def finish(pull: Pull) -> bytes:
    """Poll until the read ends. Raises: TransferError if the read failed."""
    (data,) = wait_until(
        lambda: [data for data in [pull.poll()] if data is not None],
        "the read to end",
        DEADLINE_S + 5,
    )
    return data


def bytes_of(
    tensor: WireTensor, reader: Transfer, peer: PeerProcess, deadline_s: float = DEADLINE_S
) -> bytes:
    """Return a tensor's bytes as a consumer receives them: from the chunk header if inline,
    otherwise by a read from the peer.
    """
    if tensor.data is not None:
        return tensor.data
    return finish(reader.pull(ref_of(tensor), peer.metadata, deadline_s))


@pytest.fixture(scope="module")
def nixl_peer() -> Iterator[PeerProcess]:
    with peer_process("nixl", "nixl@peer:1", ARENA_BYTES) as process:
        yield process
        assert process.call(PeerCommand(op="used")).used_slots == 0, "a test left slots behind"


@pytest.fixture(scope="module")
def redis_peer() -> Iterator[PeerProcess]:
    with peer_process("redis", "redis@peer:1", ARENA_BYTES) as process:
        yield process
        assert process.call(PeerCommand(op="used")).used_slots == 0, "a test left slots behind"


@pytest.fixture(params=["nixl", "redis"])
def peer(request: pytest.FixtureRequest) -> PeerProcess:
    return request.getfixturevalue(f"{request.param}_peer")


@pytest.fixture
def reader(peer: PeerProcess) -> Iterator[Transfer]:
    transfer = open_transfer(
        peer.worker.partition("@")[0], WorkerId("reader@here:2"), ARENA_BYTES, ARENA_BYTES // 2
    )
    yield transfer
    assert transfer.used_slots() == 0, "a test left slots behind"
    transfer.close()


@pytest.fixture
def nixl_reader() -> Iterator[NixlTransfer]:
    yield from open_reader(LOCAL)


@pytest.fixture
def tcp_reader() -> Iterator[NixlTransfer]:
    yield from open_reader(Reach(("lo",)))


def open_reader(reach: Reach) -> Iterator[NixlTransfer]:
    transfer = NixlTransfer(WorkerId("reader@here:4"), ARENA_BYTES, ARENA_BYTES // 2, reach)
    yield transfer
    transfer.arena.check()
    assert transfer.used_slots() == 0, "a test left slots behind"
    transfer.close()


@pytest.fixture(scope="module")
def tcp_peer() -> Iterator[PeerProcess]:
    """A peer reached only by TCP, where a read takes both processes, so that a frozen peer can stop
    it half-way.
    """
    with peer_process("nixl", "tcp@peer:5", ARENA_BYTES, env=TCP_ALONE, interface="lo") as process:
        yield process


@pytest.mark.parametrize("length_bytes", SIZES)
def test_pulled_bytes_equal_published_bytes(
    peer: PeerProcess, reader: Transfer, length_bytes: int
) -> None:
    tensor = peer.publish("r", length_bytes, length_bytes)
    assert (tensor.data is None) != (tensor.ref is None)
    assert tensor.length_bytes == length_bytes
    assert bytes_of(tensor, reader, peer) == pattern(length_bytes, length_bytes)
    assert peer.release("r") == 0


def test_concurrent_reads_do_not_mix(peer: PeerProcess, reader: Transfer) -> None:
    tensors = [peer.publish("r", seed, 100_000 + seed) for seed in range(16)]
    pulls = [
        (reader.pull(tensor.ref, peer.metadata, DEADLINE_S) if tensor.ref else None)
        for tensor in tensors
    ]
    for seed, (tensor, pull) in enumerate(zip(tensors, pulls, strict=True)):
        assert (finish(pull) if pull else tensor.data) == pattern(seed, 100_000 + seed)
    assert peer.release("r") == 0


def test_request_cannot_exceed_its_cap_and_leaves_room_for_others(peer: PeerProcess) -> None:
    for seed in range(2):
        peer.publish("greedy", seed, 5 * MIB)
    with pytest.raises(TransferError, match="cap"):
        peer.publish("greedy", 2, 5 * MIB)
    peer.publish("modest", 3, 5 * MIB)
    assert peer.release("greedy") == 1
    assert peer.release("modest") == 0


def test_full_arena_refuses_until_a_request_is_released(peer: PeerProcess) -> None:
    for seed in range(4):
        peer.publish(f"r{seed}", seed, 5 * MIB)
    with pytest.raises(TransferError, match="no room"):
        peer.publish("r4", 4, 5 * MIB)
    assert peer.release("r1") == 3
    peer.publish("r4", 4, 5 * MIB)
    for seed in (0, 2, 3, 4):
        used_slots = peer.release(f"r{seed}")
    assert used_slots == 0


def test_release_is_idempotent_and_unknown_peers_can_be_forgotten(reader: Transfer) -> None:
    tensor = reader.publish(MINE, "float32", (2, 3), memoryview(bytearray(24)).cast("I", (2, 3)))
    assert tensor.length_bytes == 24
    assert reader.used_slots() == 1
    reader.release(MINE)
    reader.release(MINE)
    reader.forget_peer(WorkerId("nobody@nowhere:0"))
    assert reader.used_slots() == 0


def test_metadata_is_never_a_pickle(peer: PeerProcess) -> None:
    assert peer.metadata == b"" or peer.metadata.startswith(b"nixlSerDes|")


def test_read_of_released_slot_is_refused(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    tensor = nixl_peer.publish("r", 1, 4096)
    nixl_peer.release("r")
    with pytest.raises(TransferError, match="freed or reused"):
        bytes_of(tensor, nixl_reader, nixl_peer)


def test_read_of_reused_slot_is_refused(nixl_peer: PeerProcess, nixl_reader: NixlTransfer) -> None:
    first = nixl_peer.publish("r", 1, 4096)
    nixl_peer.release("r")
    second = nixl_peer.publish("r", 2, 4096)
    assert ref_of(first).address == ref_of(second).address
    with pytest.raises(TransferError, match="freed or reused"):
        bytes_of(first, nixl_reader, nixl_peer)
    assert bytes_of(second, nixl_reader, nixl_peer) == pattern(2, 4096)
    nixl_peer.release("r")


def test_read_of_changed_bytes_is_refused(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    tensor = nixl_peer.publish("r", 1, 4096)
    wrong = msgspec.structs.replace(ref_of(tensor), checksum=ref_of(tensor).checksum ^ 1)
    with pytest.raises(TransferError, match="checksum"):
        finish(nixl_reader.pull(wrong, nixl_peer.metadata, DEADLINE_S))
    nixl_peer.call(PeerCommand(op="scribble"))
    with pytest.raises(TransferError, match="checksum"):
        bytes_of(tensor, nixl_reader, nixl_peer)
    nixl_peer.release("r")


def test_poll_after_end_repeats_failure_or_bytes(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    tensor = nixl_peer.publish("r", 1, 100)
    pull = nixl_reader.pull(ref_of(tensor), nixl_peer.metadata, DEADLINE_S)
    assert finish(pull) == finish(pull)
    nixl_peer.release("r")
    refused = nixl_reader.pull(ref_of(tensor), nixl_peer.metadata, DEADLINE_S)
    for _ in range(2):
        with pytest.raises(TransferError, match="freed or reused"):
            finish(refused)


def test_cancelled_or_unpolled_read_frees_its_destination(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    ref = ref_of(nixl_peer.publish("r", 1, 5 * MIB))
    cancelled = nixl_reader.pull(ref, nixl_peer.metadata, DEADLINE_S)
    cancelled.cancel()
    cancelled.cancel()
    with pytest.raises(TransferError, match="cancelled"):
        cancelled.poll()
    nixl_reader.pull(ref, nixl_peer.metadata, SHORT_S)
    wait_until(lambda: nixl_reader.used_slots() == 0, "both destinations to be free")
    nixl_peer.release("r")


def test_read_without_room_for_its_destination_is_refused(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    tensor = nixl_peer.publish("r", 1, 5 * MIB)
    for number in range(4):
        nixl_reader.publish(RequestId(f"mine-{number}"), "uint8", (5 * MIB,), bytes(5 * MIB))
    with pytest.raises(TransferError, match="no room"):
        bytes_of(tensor, nixl_reader, nixl_peer)
    for number in range(4):
        nixl_reader.release(RequestId(f"mine-{number}"))
    assert bytes_of(tensor, nixl_reader, nixl_peer) == pattern(1, 5 * MIB)
    nixl_peer.release("r")


def test_pull_with_wrong_metadata_or_address_is_refused(
    nixl_peer: PeerProcess, nixl_reader: NixlTransfer
) -> None:
    ref = ref_of(nixl_peer.publish("r", 1, 100))
    for metadata in (nixl_reader.metadata(), b"", b"junk", nixl_peer.metadata[:100]):
        with pytest.raises(TransferError):
            nixl_reader.pull(ref, metadata, DEADLINE_S)
    outside = msgspec.structs.replace(ref, address=ref.address + 64 * ARENA_BYTES)
    with pytest.raises(TransferError):
        nixl_reader.pull(outside, nixl_peer.metadata, DEADLINE_S)
    assert finish(nixl_reader.pull(ref, nixl_peer.metadata, DEADLINE_S)) == pattern(1, 100)
    nixl_peer.release("r")


def test_worker_can_pull_from_itself(nixl_reader: NixlTransfer) -> None:
    tensor = nixl_reader.publish(MINE, "uint8", (5000,), pattern(1, 5000))
    assert finish(nixl_reader.pull(ref_of(tensor), nixl_reader.metadata(), DEADLINE_S)) == pattern(
        1, 5000
    )
    nixl_reader.release(MINE)


def test_read_of_concurrently_reused_slot_is_right_or_refused(
    tcp_peer: PeerProcess, tcp_reader: NixlTransfer
) -> None:
    length_bytes = 8 * MIB
    refused = 0
    for seed in range(12):
        ref = ref_of(tcp_peer.publish("r", seed, length_bytes))
        pull = tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)
        tcp_peer.send(
            PeerCommand(
                op="republish",
                request=RequestId("r"),
                seed=seed,
                length_bytes=length_bytes,
                rounds=2,
            )
        )
        try:
            assert finish(pull) == pattern(seed, length_bytes)
        except TransferError:
            refused += 1
        wait_until(tcp_peer.answered, "the peer to have reused the slot")
        with pytest.raises(TransferError, match="freed or reused"):
            finish(tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S))
        tcp_peer.release("r")
    print(f"{refused} of 12 reads met the reuse half-way and were refused")


def test_read_from_frozen_peer_fails_at_deadline_without_wrong_bytes(
    tcp_peer: PeerProcess, tcp_reader: NixlTransfer
) -> None:
    length_bytes = 8 * MIB
    ref = ref_of(tcp_peer.publish("r", 7, length_bytes))
    assert finish(tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)) == pattern(7, length_bytes)

    in_mid_read = tcp_reader.pull(ref, tcp_peer.metadata, SHORT_S)
    tcp_peer.freeze()
    try:
        assert finish(in_mid_read) == pattern(7, length_bytes)
    except TransferError as error:
        assert "deadline" in error.message

    late = tcp_reader.pull(ref, tcp_peer.metadata, SHORT_S)
    with pytest.raises(TransferError, match="deadline"):
        finish(late)
    quarantined = tcp_reader.arena.quarantined_slots
    assert quarantined >= 1
    assert tcp_reader.used_slots() == quarantined

    tcp_peer.thaw()
    wait_until(lambda: tcp_reader.used_slots() == 0, "the late reads to land and be reaped")
    assert finish(tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)) == pattern(7, length_bytes)
    tcp_peer.release("r")


def test_tensor_read_from_forgotten_frozen_peer_writes_nothing(tcp_reader: NixlTransfer) -> None:
    with peer_process("nixl", "fenced@peer:13", ARENA_BYTES, env=TCP_ALONE, interface="lo") as peer:
        check_that_nothing_lands_late(peer, tcp_reader)


def check_that_nothing_lands_late(tcp_peer: PeerProcess, tcp_reader: NixlTransfer) -> None:
    length_bytes = 8 * MIB
    ref = ref_of(tcp_peer.publish("r", 7, length_bytes))
    assert finish(tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)) == pattern(7, length_bytes)
    tcp_peer.freeze()
    given_up = tcp_reader.pull(ref, tcp_peer.metadata, 0.0)
    with pytest.raises(TransferError, match="deadline"):
        finish(given_up)
    wanted = tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)
    assert wanted.poll() is None
    assert tcp_reader.arena.quarantined_slots == 1

    tcp_reader.forget_peer(tcp_peer.worker)
    wait_until(lambda: tcp_reader.used_slots() == 0, "the reading agent to be closed")
    with pytest.raises(TransferError, match="gone"):
        wanted.poll()
    with pytest.raises(TransferError, match="gone"):
        tcp_reader.pull(ref, tcp_peer.metadata, DEADLINE_S)

    canary = pattern(1, 11 * MIB)
    canaries = [
        tcp_reader.publish(RequestId(f"mine-{n}"), "uint8", (len(canary),), canary)
        for n in range(2)
    ]
    tcp_peer.thaw()
    # The peer's remaining writes fail on the closed connection. UCX may end such a process, which
    # is harmless once it is fenced.
    tcp_peer.send(PeerCommand(op="used"))
    wait_until(lambda: tcp_peer.ended() or tcp_peer.answered(), "the peer to run on")
    for number, tensor in enumerate(canaries):
        start = ref_of(tensor).address - tcp_reader.memory.address + HEADER.size
        assert bytes(tcp_reader.memory.view[start : start + len(canary)]) == canary
        tcp_reader.release(RequestId(f"mine-{number}"))


def test_read_from_dead_peer_fails_within_deadline(nixl_reader: NixlTransfer) -> None:
    stranger = NixlTransfer(WorkerId("stranger@here:6"), ARENA_BYTES, ARENA_BYTES)
    with peer_process("nixl", "mortal@peer:7", ARENA_BYTES) as mortal:
        ref = ref_of(mortal.publish("r", 1, MIB))
        assert finish(nixl_reader.pull(ref, mortal.metadata, DEADLINE_S)) == pattern(1, MIB)
        mortal.kill()
        for transfer in (nixl_reader, stranger, nixl_reader):
            started_s = time.monotonic()
            with pytest.raises(TransferError):
                finish(transfer.pull(ref, mortal.metadata, DEADLINE_S))
            assert time.monotonic() - started_s < DEADLINE_S
            transfer.forget_peer(mortal.worker)
            wait_until(lambda it=transfer: it.used_slots() == 0, "the reading agent to be closed")
    stranger.close()


def test_peer_survives_a_reader_that_leaves_while_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer survives a reader that leaves while it connects. UCX crashes if a reader that is gone
    asks to connect, so a leaving reader waits until it is answered.
    """
    monkeypatch.setattr(peer_link, "ANSWER_S", 60.0)
    with peer_process("nixl", "asked@peer:8", ARENA_BYTES) as peer:
        reader = NixlTransfer(WorkerId("hasty@here:7"), ARENA_BYTES, ARENA_BYTES)
        peer.freeze()
        reader.connect(peer.worker, peer.metadata)
        closing = threading.Thread(target=reader.close)
        closing.start()
        closing.join(SHORT_S)
        peer.thaw()
        closing.join()
        assert peer.call(PeerCommand(op="used")).used_slots == 0, "the peer answers"


def test_auto_uses_nixl_if_it_starts_and_else_logs_the_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_nixl = open_transfer("auto", WorkerId("w@here:8"), MIB, MIB)
    assert isinstance(with_nixl, NixlTransfer)
    with_nixl.close()
    assert not caplog.records

    monkeypatch.setitem(sys.modules, "nixl._bindings", None)
    with caplog.at_level(logging.WARNING):
        without = open_transfer("auto", WorkerId("w@here:9"), MIB, MIB)
    assert isinstance(without, InlineTransfer)
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match="NIXL does not start"):
        open_transfer("nixl", WorkerId("w@here:10"), MIB, MIB)


def test_unknown_kind_is_refused_and_redis_needs_no_nixl() -> None:
    with pytest.raises(ConfigError, match="auto, nixl or redis"):
        open_transfer("carrier pigeon", WorkerId("w@here:11"), MIB, MIB)
    inline = open_transfer("redis", WorkerId("w@here:12"), MIB, MIB)
    ref = TensorRef(
        agent=WorkerId("w@there:1"),
        address=0,
        length_bytes=1,
        device_id=0,
        generation=1,
        checksum=0,
        slot=0,
    )
    with pytest.raises(TransferError, match="alike for every worker"):
        inline.pull(ref, b"", DEADLINE_S)


def test_measured_reads_have_size_and_speed() -> None:
    speeds = measure_reads([1, 65536], num_repeats=3)
    assert [speed.num_bytes for speed in speeds] == [1, 65536]
    assert all(speed.p50_us > 0 and speed.gb_per_s > 0 for speed in speeds)
