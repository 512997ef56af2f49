"""Client addresses in the form that limits and logs use."""

from ipaddress import AddressValueError, IPv6Address, IPv6Network

NETWORK_BITS = 64


def client_address(peer: tuple[str, int] | None) -> str | None:
    """Return the address by which a client is counted: its IPv4 address, or the /64 network of its
    IPv6 address, since a client usually has the whole network. Return None if `peer` is None.
    """
    if peer is None:
        return None
    host = peer[0].partition("%")[0]
    try:
        address = IPv6Address(host)
    except AddressValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return host if address.is_loopback else str(IPv6Network((address, NETWORK_BITS), strict=False))
