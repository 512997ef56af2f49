"""Hand-off of a task from its prefill worker to its decode worker: vLLM's limit for it, and its
times, which are part of the request's trace.
"""

import msgspec

VLLM_LEASE_S = 30
"""Seconds for which vLLM holds KV blocks for a decode worker that does not ask for them. vLLM
renews this lease while the decode worker waits.
"""


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one hand-off, in order, from the prefill worker's last step to the decode worker's
    first. No decision depends on them.

    Units: wall-clock microseconds since 1970. `handed_us` and `claimed_us` are by Redis's clock,
    `prefilled_us` by the prefill worker's, the rest by the decode worker's. Differences across
    machines include the difference of their clocks.
    `prefilled_us`: end of the prefill worker's last step. `handed_us`: release of the task by the
    prefill worker. `claimed_us`: claim by the decode worker. `opened_us`: the logs are read, and
    the KV blocks requested. `pulled_us`: arrival of the blocks. `confirmed_us`: end of their
    import. `resumed_us`: begin of the decode worker's first step. The last three are None if the
    blocks did not arrive or were withdrawn, so that the decode worker recomputes them.
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
