"""The limit of captures that are in flight at one time, where a capture reads an answer's hidden
states. `CaptureSlots` halves the limit when hidden-state rows find no room in a worker's arena, and
raises it again after captures that had room.
"""

import asyncio

from fleet.core.errors import TransferError
from fleet.drafts.capture.room import CaptureSlots


async def fail(slots: CaptureSlots, *, beside: asyncio.Barrier) -> None:
    """Take a slot, wait until as many captures hold slots as `beside` counts, and report that the
    arena had no room for the hidden states.
    """
    async with slots.take() as slot:
        await beside.wait()
        slots.note_no_room(slot, TransferError("the arena has no room"))


async def test_failures_of_captures_that_were_in_flight_together_halve_the_number_once() -> None:
    slots, all_taken = CaptureSlots(8), asyncio.Barrier(8)
    await asyncio.gather(*(fail(slots, beside=all_taken) for _ in range(8)))
    assert slots.limit == 4


async def test_number_grows_with_captures_that_had_room_up_to_the_most() -> None:
    slots = CaptureSlots(4)
    for _ in range(3):
        await fail(slots, beside=asyncio.Barrier(1))
    limits = [slots.limit]
    for _ in range(12):
        slots.note_success()
        limits.append(slots.limit)
    assert limits == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]


async def test_capture_is_alone_where_there_is_a_single_slot() -> None:
    slots = CaptureSlots(2)
    async with slots.take() as slot:
        assert not slot.is_alone, "another one could begin meanwhile"
    await fail(slots, beside=asyncio.Barrier(1))
    async with slots.take() as slot:
        assert slot.is_alone
