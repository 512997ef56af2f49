"""Back-off for clients that send wrong API keys, and rate-limited log lines about them. Knows no
route.

The right key is accepted during a back-off too: behind a proxy all clients have one address, and a
client that guesses keys must not lock out the others. The length of the key protects it from
guessing (`fleet/config/safety.py` refuses short ones); the back-off slows down clients with an old
key, and limits the log. All wrong keys get the same response.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from fleet.core.errors import FleetError
from web.http.addresses import client_address
from web.http.errors import TooManyWrongKeys
from web.http.protocol.abuse import TimedAbuseLog

NUM_FREE = 10
"""Number of wrong keys from one address after which the first back-off begins."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Seconds of the first and of the longest back-off; each further wrong key doubles the back-off.
OpenAI's SDKs wait no longer than `LONGEST_S`.
"""
FORGIVEN_S = 300.0
"""Seconds without a wrong key after which the earlier wrong keys of an address are forgotten."""
MAX_ADDRESSES = 4096


@dataclass(slots=True)
class _Record:
    """Count of wrong keys from one address, and its back-off. Units: seconds of the clock."""

    num_failed: int = 0
    failed_at: float = -math.inf
    blocked_until: float = -math.inf


class WrongKeys:
    """Counter of wrong keys by client address, with a back-off for each address."""

    def __init__(self, lines: TimedAbuseLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def refusal(self, scope: Scope, refused: FleetError) -> FleetError:
        """Count a wrong key in the request of `scope`, and return the error to send:
        TooManyWrongKeys during a back-off, otherwise `refused`.
        """
        wait_s = self.count(address_of(scope))
        if wait_s is None:
            return refused
        return TooManyWrongKeys(
            f"too many wrong API keys came from this address; wait {wait_s} s before you send "
            "another, or send the right one",
            retry_after_s=wait_s,
        )

    def count(self, address: str) -> int | None:
        """Count a wrong key from `address`; from the `NUM_FREE`th on, each counted key begins a
        back-off. During a back-off, count nothing and return the remaining seconds; otherwise
        return None.
        """
        now = self._clock()
        record = self._record_of(address, now)
        self._lines.note("wrong API keys", address, "a wrong API key")
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


def address_of(scope: Scope) -> str:
    """Return the client's address, in the form that `client_address` gives it."""
    return client_address(scope.get("client")) or "an unknown address"
