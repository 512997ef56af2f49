"""The arena stays consistent for any order of calls, and a read returns sealed tensors or is
refused.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleet.core.chunk import TensorRef
from fleet.core.errors import TransferError
from fleet.core.ids import RequestId, WorkerId
from fleet.transfer.arena import ALIGN_BYTES, Arena, ArenaSlot
from fleet.transfer.memory import HEADER, HostMemory, flat_bytes, stored_bytes

CAPACITY_BYTES = 64 * ALIGN_BYTES
CAP_BYTES = 24 * ALIGN_BYTES
REQUESTS = [RequestId(f"r{number}") for number in range(4)]


def new_arena(capacity_bytes: int = CAPACITY_BYTES) -> Arena:
    return Arena(capacity_bytes=capacity_bytes, request_cap_bytes=CAP_BYTES)


class ArenaMachine(RuleBasedStateMachine):
    """State machine that makes random calls of the arena and compares it with a plain list of the
    slots in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arena = new_arena()
        self.held: list[ArenaSlot] = []
        self.quarantined: list[ArenaSlot] = []

    @initialize()
    def starts_empty(self) -> None:
        assert self.arena.used_slots == self.arena.used_bytes == 0

    @rule(num_bytes=st.integers(0, CAPACITY_BYTES + 1), request=st.sampled_from([None, *REQUESTS]))
    def allocate(self, num_bytes: int, request: RequestId | None) -> None:
        before = self.arena.used_bytes
        try:
            slot = self.arena.allocate(num_bytes, request)
        except TransferError:
            assert self.arena.used_bytes == before
            return
        assert slot.size_bytes >= num_bytes
        assert slot.generation not in {
            other.generation for other in [*self.held, *self.quarantined]
        }
        self.held.append(slot)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if slots := [*self.held, *self.quarantined]:
            slot = data.draw(st.sampled_from(slots))
            self.arena.free(slot)
            (self.held if slot in self.held else self.quarantined).remove(slot)

    @rule(request=st.sampled_from(REQUESTS))
    def free_request(self, request: RequestId) -> None:
        freed = self.arena.free_request(request)
        assert sorted(slot.generation for slot in freed) == [
            s.generation for s in self.held if s.request == request
        ]
        self.held = [slot for slot in self.held if slot.request != request]

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        if self.held:
            slot = data.draw(st.sampled_from(self.held))
            self.arena.quarantine(slot)
            self.held.remove(slot)
            self.quarantined.append(slot)

    @invariant()
    def is_whole(self) -> None:
        self.arena.check()
        assert self.arena.used_slots == len(self.held) + len(self.quarantined)
        assert self.arena.quarantined_slots == len(self.quarantined)
        for request in REQUESTS:
            used_bytes = sum(slot.size_bytes for slot in self.held if slot.request == request)
            assert self.arena.request_bytes(request) == used_bytes <= CAP_BYTES

    def teardown(self) -> None:
        for slot in [*self.held, *self.quarantined]:
            self.arena.free(slot)
        assert self.arena.allocate(CAPACITY_BYTES).offset == 0


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArenaInAnyOrder = ArenaMachine.TestCase


def test_slot_can_be_freed_once() -> None:
    arena = new_arena()
    slot = arena.allocate(10)
    arena.free(slot)
    again = arena.allocate(10)
    assert (again.offset, again.generation) == (slot.offset, slot.generation + 1)
    with pytest.raises(AssertionError, match="not held"):
        arena.free(slot)
    with pytest.raises(AssertionError, match="not held"):
        arena.quarantine(slot)


def test_quarantined_slot_is_neither_reallocated_nor_freed_with_a_request() -> None:
    arena = new_arena(4 * ALIGN_BYTES)
    slot = arena.allocate(2 * ALIGN_BYTES, REQUESTS[0])
    arena.quarantine(slot)
    assert arena.free_request(REQUESTS[0]) == []
    assert arena.request_bytes(REQUESTS[0]) == 0
    with pytest.raises(TransferError, match="1 slots quarantined"):
        arena.allocate(3 * ALIGN_BYTES)
    arena.free(slot)
    assert arena.allocate(4 * ALIGN_BYTES).offset == 0


def sealed(memory: HostMemory, slot: ArenaSlot, data: bytes) -> TensorRef:
    return TensorRef(
        agent=WorkerId("w"),
        address=memory.address + slot.offset,
        length_bytes=len(data),
        device_id=0,
        generation=slot.generation,
        checksum=memory.seal(slot, memoryview(data)),
        slot=slot.index,
    )


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(200))])
def test_memory_opens_only_sealed_tensors(data: bytes) -> None:
    memory, arena = HostMemory(CAPACITY_BYTES), new_arena()
    slot = arena.allocate(stored_bytes(len(data)))
    ref = sealed(memory, slot, data)
    assert memory.open(slot, ref) == data
    for wrong in (
        msgspec.structs.replace(ref, generation=ref.generation + 1),
        msgspec.structs.replace(ref, length_bytes=ref.length_bytes + 1),
        msgspec.structs.replace(ref, checksum=ref.checksum ^ 1),
    ):
        with pytest.raises(TransferError):
            memory.open(slot, wrong)
    if data:
        memory.view[slot.offset + HEADER.size] ^= 1
        with pytest.raises(TransferError, match="checksum"):
            memory.open(slot, ref)
    memory.wipe(slot)
    with pytest.raises(TransferError, match="freed or reused"):
        memory.open(slot, ref)


def test_tensor_of_another_size_than_stated_is_refused() -> None:
    assert flat_bytes("float32", (2, 0), memoryview(b"")).nbytes == 0
    assert flat_bytes("int16", (3,), bytes(6)).nbytes == 6
    with pytest.raises(AssertionError, match="published as"):
        flat_bytes("int16", (3,), bytes(5))
