"""Hand-offs between workers: how long vLLM holds blocks for one, and the timings of one, a part of
the request's trace.
"""

import msgspec

VLLM_LEASE_S = 30
"""Time for which vLLM holds blocks for a decode half that does not ask for them. It renews the
lease while it waits.
"""


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one hand-off, in order, from the source's last step to the new owner's first. No
    decision depends on them.

    Units: wall-clock microseconds since 1970; `handed_us` and `claimed_us` by Redis's clock,
    `prefilled_us` by the source's, the rest by the new owner's. Differences across machines include
    the difference of their clocks.
    `prefilled_us`: end of the source's last step. `handed_us`: hand-off by the source.
    `claimed_us`: claim by the new owner. `opened_us`: the logs are read, and the blocks are
    requested. `pulled_us`: arrival of the blocks. `confirmed_us`: end of their import.
    `resumed_us`: begin of the new owner's first step. The last three are None if the blocks did not
    arrive or were withdrawn: then they are recomputed.
    """

    prefilled_us: int
    handed_us: int
    claimed_us: int
    opened_us: int
    pulled_us: int | None = None
    confirmed_us: int | None = None
    resumed_us: int | None = None


_encoder = msgspec.json.Encoder()
decode_hand_off = msgspec.json.Decoder(HandOff).decode


def encode_hand_off(hand_off: HandOff) -> bytes:
    return _encoder.encode(hand_off)
