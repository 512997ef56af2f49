"""Clients in the sense of fair shares: each request belongs to an API key or an address. Knows no
HTTP.
"""

from ipaddress import IPv4Network, IPv6Network, ip_network

from fleet.config.schema import Limits
from fleet.control.client import Applicant, ClientShare
from web.http.callers import ApiCaller

EVERYBODY = ClientShare()


class FairShares:
    """Names the client of a request, with its weight. Without `limits.fair_shares` all requests are
    of the same client, so they wait in the order of their arrival.

    A key of `web.keys_file` is one client. Requests without such a key belong to the client of
    their address: the address that a trusted proxy reports, and for IPv6 the /64 network.
    """

    def __init__(self, limits: Limits) -> None:
        self._is_fair = limits.fair_shares
        networks = [(ip_network(name), weight) for name, weight in limits.share_weights.items()]
        self._weights = sorted(networks, key=lambda each: -each[0].prefixlen)

    def applicant(self, address: str, caller: ApiCaller) -> Applicant:
        """Return a new entry of the admission queue: a request of `caller` from `address`."""
        is_listed = self._is_fair and bool(caller.listed_name)
        client = ClientShare(f"key:{caller.name}") if is_listed else self.client_at(address)
        if not caller.is_counted:
            return Applicant(client)
        return Applicant(client, key=caller.name, limits=caller.limits)

    def client_at(self, address: str) -> ClientShare:
        """Return the client of an address, as `web.http.addresses` writes it."""
        if not self._is_fair:
            return EVERYBODY
        if not self._weights:
            return ClientShare(address)
        try:
            network = ip_network(address)
        except ValueError:  # the peer of a Unix socket has no address
            return ClientShare(address)
        weights = (weight for wide, weight in self._weights if _contains(wide, network))
        return ClientShare(address, next(weights, 1.0))


def _contains(wide: IPv4Network | IPv6Network, network: IPv4Network | IPv6Network) -> bool:
    if isinstance(wide, IPv4Network):
        return isinstance(network, IPv4Network) and network.subnet_of(wide)
    return isinstance(network, IPv6Network) and network.subnet_of(wide)
