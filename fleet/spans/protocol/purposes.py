"""Purposes of connections to a span worker, by which it distinguishes who sends what."""

FROM_ANCHOR = "anchor"


def purpose_of_hop(generation: int) -> str:
    """Return the purpose with which a worker connects to the next one of its route."""
    return f"hop {generation}"
