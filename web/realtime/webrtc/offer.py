"""Session descriptions (SDP) of a call: the check of the client's offer, and addresses in the
answer. Knows no session and no connection.
"""

from ipaddress import ip_address

from fleet.core.errors import BadInput, UnsupportedValue

MAX_OFFER_BYTES = 64 * 1024
MAX_CANDIDATES = 32
"""Limit of an offer's candidates, to each of which the gateway sends checks."""
_MEDIA, _CANDIDATE, _END = "m=", "a=candidate:", "a=end-of-candidates"
_LOCAL_NAME = ".local"
"""End of the names by which browsers hide their addresses. They need not be looked up, since the
browser connects to the gateway, which so learns the address.
"""


def checked_offer(text: str) -> str:
    """Return a client's offer in the form in which the connection reads it.

    Raises: BadInput, UnsupportedValue.
    """
    lines = text.split("\r\n" if "\r\n" in text else "\n")
    if not text.startswith("v=0"):
        raise BadInput("sdp: not a session description; send the offer's sdp", param="sdp")
    kinds = [line.removeprefix(_MEDIA).split(" ")[0] for line in lines if line.startswith(_MEDIA)]
    if sorted(kinds) != ["application", "audio"]:
        raise UnsupportedValue(
            f"sdp: the offer has {', '.join(kinds)[:80] or 'no media'}; offer one audio track "
            "and the data channel oai-events, as OpenAI's examples do",
            param="sdp",
        )
    if not any(line.startswith("a=rtpmap:") and "opus/48000" in line.lower() for line in lines):
        raise UnsupportedValue("sdp: the offer has no Opus, the only codec of calls", param="sdp")
    if not any(line.startswith("a=fingerprint:") for line in lines):
        raise BadInput("sdp: the offer has no fingerprint of its certificate", param="sdp")
    if sum(line.startswith(_CANDIDATE) for line in lines) > MAX_CANDIDATES:
        raise BadInput(f"sdp: more than {MAX_CANDIDATES} candidates", param="sdp")
    # Without an end of candidates, the connection also waits for addresses that it does not know.
    kept = [line for line in lines if not (_is_hidden(line) or line.startswith(_END))]
    return "\r\n".join(line.rstrip("\r") for line in kept)


def _is_hidden(line: str) -> bool:
    parts = line.split(" ")
    return line.startswith(_CANDIDATE) and len(parts) > 4 and parts[4].endswith(_LOCAL_NAME)


def with_address(answer: str, address: str) -> str:
    """Return the gateway's answer with `address`, to which a router forwards the ports of its own
    addresses, as further candidates.
    """
    version = ip_address(address).version
    lines: list[str] = []
    for line in answer.split("\r\n"):
        lines.append(line)
        parts = line.split(" ")
        if line.startswith(_CANDIDATE) and parts[7] == "host":
            if ip_address(parts[4]).version == version:
                lines.append(" ".join([f"{parts[0]}p", *parts[1:4], address, *parts[5:]]))
    return "\r\n".join(lines)
