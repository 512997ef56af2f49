"""Back-off for clients that send wrong API keys, and one log line per client address and minute. Knows no route.

The right key is accepted during a back-off too: behind a proxy all clients share its address, and one that guesses must not lock
out the others. So a guess is compared all the same, and the length of the key is what keeps it from being guessed
(`fleet/config/safety.py` refuses short ones). The back-off slows down clients with an old key, and bounds the log. All wrong keys
get the same answer, whatever they have in common with the right one.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

from fleet.core.errors import FleetError
from web.http.errors import TooManyWrongKeys

log = logging.getLogger("fleet.web")

NUM_FREE = 10
"""Wrong keys of an address before its first back-off."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""The first back-off and the longest; each wrong key after one doubles it. Clients of OpenAI's SDKs do not wait for longer."""
FORGIVEN_S = 300.0
"""The wrong keys of an address count no more when this time has passed without another."""
LOG_EVERY_S = 60.0
MAX_ADDRESSES = 4096

Later = Callable[[float, Callable[[], None]], object]


@dataclass(slots=True)
class _Record:
    """Units: seconds of the clock. `num_unlogged` wrong keys came since the last line; `logging`: another line is due."""

    num_failed: int = 0
    failed_at: float = -math.inf
    blocked_until: float = -math.inf
    num_unlogged: int = 0
    logging: bool = False


def call_later(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)


class WrongKeys:
    """Wrong keys by client address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, later: Later = call_later) -> None:
        self._clock = clock
        self._later = later
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def refusal(self, scope: Scope, refused: FleetError) -> FleetError:
        """Count a wrong key, and return the refusal to send: `refused`, or during a back-off TooManyWrongKeys."""
        wait_s = self.note(address_of(scope))
        if wait_s is None:
            return refused
        return TooManyWrongKeys(
            f"too many wrong API keys came from this address; wait {wait_s} s before you send another, or send the right one",
            retry_after_s=wait_s,
        )

    def note(self, address: str) -> int | None:
        """Count a wrong key. Return for how many seconds the address is in a back-off that began before; None if it is not."""
        now = self._clock()
        record = self._record_of(address, now)
        self._log(address, record)
        if now < record.blocked_until:
            return math.ceil(record.blocked_until - now)
        record.num_failed += 1
        record.failed_at = now
        if record.num_failed >= NUM_FREE:
            doublings = min(record.num_failed - NUM_FREE, 30)
            record.blocked_until = now + min(FIRST_S * 2**doublings, LONGEST_S)
        return None

    def _record_of(self, address: str, now: float) -> _Record:
        record = self._records.pop(address, None) or _Record()
        if now - max(record.failed_at, record.blocked_until) > FORGIVEN_S:
            record.num_failed = 0
        self._records[address] = record
        if len(self._records) > MAX_ADDRESSES:
            self._records.popitem(last=False)
        return record

    def _log(self, address: str, record: _Record) -> None:
        """The first wrong key is logged immediately; those of the minute after it together, at its end."""
        record.num_unlogged += 1
        if not record.logging:
            self._write(address, record)

    def _write(self, address: str, record: _Record) -> None:
        record.logging = record.num_unlogged > 0
        if record.logging:
            log.warning("%d wrong API key%s from %s", record.num_unlogged, "" if record.num_unlogged == 1 else "s", address)
            record.num_unlogged = 0
            self._later(LOG_EVERY_S, lambda: self._write(address, record))


def address_of(scope: Scope) -> str:
    """Return the client's address; of IPv6 its network of 64 bits, all of which one client has."""
    client = scope.get("client")
    host = str(client[0]) if client else "an unknown address"
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), 64), strict=False))
