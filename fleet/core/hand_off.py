"""How a task went from one worker to the next: a part of its request's story, for people to read. Nothing is decided by it."""

import msgspec


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """The moments of one hand-off, in order, from the source's last step to the new owner's first.

    Units: wall-clock microseconds since 1970; `handed_us` and `claimed_us` by Redis's clock, `prefilled_us` by the source's, the
    rest by the new owner's. Across machines, a difference is worth what their clocks are.
    `prefilled_us`: the source's last step has ended. `handed_us`: it gave the task up. `claimed_us`: the new owner has it.
    `opened_us`: the logs are read, and the blocks are asked for. `pulled_us`: they are here. `confirmed_us`: they are adopted.
    `resumed_us`: the first step begins. Blocks that did not come, or were withdrawn, have no moment: they are computed again.
    """

    prefilled_us: int
    handed_us: int
    claimed_us: int
    opened_us: int
    pulled_us: int | None = None
    confirmed_us: int | None = None
    resumed_us: int | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(HandOff)


def encode_hand_off(told: HandOff) -> bytes:
    return _encoder.encode(told)


def decode_hand_off(raw: bytes) -> HandOff:
    return _decoder.decode(raw)
