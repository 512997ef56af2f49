"""Allocation of the bytes of an arena (registered memory from which peers read): slots of any size,
counted per request. Pure arithmetic on offsets; knows no memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

from fleet.core.errors import ArenaFull, TransferError
from fleet.core.ids import RequestId

ALIGN_BYTES = 64
"""Alignment of slots: a cache line, so that slots of two requests never share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSlot:
    """A range of the arena's bytes that was allocated. `generation` is unique, so the same offset
    with another generation is another slot.
    """

    offset: int
    size_bytes: int
    generation: int
    request: RequestId | None

    @property
    def index(self) -> int:
        return self.offset // ALIGN_BYTES


class Arena:
    """First-fit allocator over [0, capacity); freed slots merge with adjacent holes.

    Slots with a request count against that request's cap; slots without one are destinations of
    reads. A quarantined slot belongs to no request and is released by `free` only.
    Invariants (`check`): slots and holes tile [0, capacity) exactly once, no two holes touch, every
    count adds up.
    """

    def __init__(self, *, capacity_bytes: int, request_cap_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.request_cap_bytes = request_cap_bytes
        self._holes: list[tuple[int, int]] = (
            [(0, self.capacity_bytes)] if self.capacity_bytes else []
        )
        self._slots: dict[int, ArenaSlot] = {}
        self._by_request: dict[RequestId, dict[int, ArenaSlot]] = {}
        self._quarantined: set[int] = set()
        self._last_generation = 0

    @property
    def used_slots(self) -> int:
        return len(self._slots)

    @property
    def quarantined_slots(self) -> int:
        return len(self._quarantined)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - sum(size for _, size in self._holes)

    def request_bytes(self, request: RequestId) -> int:
        return sum(slot.size_bytes for slot in self._by_request.get(request, {}).values())

    def allocate(self, num_bytes: int, request: RequestId | None = None) -> ArenaSlot:
        """Allocate a slot. `request`: request whose cap the slot counts against, or None for a slot
        into which this process reads. Raises: ArenaFull if no hole is large enough now;
        TransferError if the slot is larger than the arena, or the request's slots would exceed its
        cap.
        """
        size_bytes = max(1, -(-num_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        if (
            request is not None
            and self.request_bytes(request) + size_bytes > self.request_cap_bytes
        ):
            raise TransferError(
                f"request {request} holds {self.request_bytes(request)} bytes of the arena and "
                f"asks for {size_bytes} more; "
                f"its cap is {self.request_cap_bytes} (transfer.request_cap_mib)"
            )
        slot = ArenaSlot(
            offset=self._allocate_hole(size_bytes),
            size_bytes=size_bytes,
            generation=self._last_generation + 1,
            request=request,
        )
        self._last_generation = slot.generation
        self._slots[slot.generation] = slot
        if request is not None:
            self._by_request.setdefault(request, {})[slot.generation] = slot
        return slot

    def free(self, slot: ArenaSlot) -> None:
        """Free a slot, quarantined or not. A slot may be freed only once."""
        assert self._slots.get(slot.generation) == slot, f"{slot} is not held"
        del self._slots[slot.generation]
        self._leave_request(slot)
        self._quarantined.discard(slot.generation)
        self._add_hole(slot.offset, slot.size_bytes)

    def free_request(self, request: RequestId) -> list[ArenaSlot]:
        """Free every slot of the request and return them."""
        slots = list(self._by_request.get(request, {}).values())
        for slot in slots:
            self.free(slot)
        return slots

    def quarantine(self, slot: ArenaSlot) -> None:
        """Keep a slot allocated, without a request, while a read may still write into it."""
        assert self._slots.get(slot.generation) == slot, f"{slot} is not held"
        self._leave_request(slot)
        self._quarantined.add(slot.generation)

    def check(self) -> None:
        """Check the invariants. Raises: AssertionError naming an invariant that does not hold."""
        spans = sorted(
            [*self._holes, *((slot.offset, slot.size_bytes) for slot in self._slots.values())]
        )
        assert sum(size for _, size in spans) == self.capacity_bytes, (
            "slots and holes do not fill the arena"
        )
        for (offset, size), (following, _) in pairwise(spans):
            assert offset + size == following, f"a gap or an overlap at {following}"
        for (offset, size), (following, _) in pairwise(self._holes):
            assert offset + size < following, f"two holes touch at {following}"
        owned = {generation for slots in self._by_request.values() for generation in slots}
        requests = {
            generation for generation, slot in self._slots.items() if slot.request is not None
        }
        assert owned == requests - self._quarantined, (
            "a slot is missing from its request, or listed by one that it left"
        )
        assert self._quarantined <= self._slots.keys(), "a quarantined slot is not held"
        assert all(self._by_request.values()), "a request without slots is still listed"

    def _leave_request(self, slot: ArenaSlot) -> None:
        if slot.request is None or slot.generation in self._quarantined:
            return
        slots = self._by_request[slot.request]
        del slots[slot.generation]
        if not slots:
            del self._by_request[slot.request]

    def _allocate_hole(self, size_bytes: int) -> int:
        for position, (offset, size) in enumerate(self._holes):
            if size > size_bytes:
                self._holes[position] = (offset + size_bytes, size - size_bytes)
                return offset
            if size == size_bytes:
                del self._holes[position]
                return offset
        largest = max((size for _, size in self._holes), default=0)
        error = ArenaFull if size_bytes <= self.capacity_bytes else TransferError
        raise error(
            f"the arena has no room for {size_bytes} bytes: {self.used_bytes} of "
            f"{self.capacity_bytes} in use, "
            f"largest hole {largest}, {self.quarantined_slots} slots quarantined "
            "(transfer.arena_mib)"
        )

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        position = bisect_left(self._holes, (offset, 0))
        if position < len(self._holes) and offset + size_bytes == self._holes[position][0]:
            size_bytes += self._holes.pop(position)[1]
        if position and sum(self._holes[position - 1]) == offset:
            before = self._holes.pop(position - 1)
            offset, size_bytes = before[0], before[1] + size_bytes
        insort(self._holes, (offset, size_bytes))
