"""Time spent on refused inputs, as a debt of their sender. A sender with a large debt must wait.

Answers are limited by slots and by admission. Reading an input comes before both limits, so a
client whose inputs are all refused would otherwise pay nothing. Knows no route.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from fleet.core.errors import Overloaded

MAX_DEBT_S = 2.0
"""Debt in seconds beyond which large inputs of a sender are refused unread."""
PAID_PER_S = 0.05
"""Seconds by which a debt shrinks per second. After the first two seconds, a sender can thus cost
at most a twentieth of a core.
"""
SMALL_S = 0.005
"""Work on a refused input that takes fewer seconds is not counted, so that the mistakes of ordinary
clients never add up.
"""
MAX_SENDERS = 4096


class RefusedWork:
    """Debts of all senders of one gateway, in seconds of work on refused inputs. A sender is a
    client address.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Sender -> its debt at the last change, and the time of this change."""

    def debt_s(self, sender: str) -> float:
        debt_s, at = self._debts.get(sender, (0.0, 0.0))
        return max(0.0, debt_s - (self._clock() - at) * PAID_PER_S)

    def add(self, sender: str, seconds: float) -> None:
        if seconds < SMALL_S:
            return
        self._debts[sender] = (self.debt_s(sender) + seconds, self._clock())
        self._debts.move_to_end(sender)
        if len(self._debts) > MAX_SENDERS:
            self._debts.popitem(last=False)

    def check(self, sender: str) -> None:
        """Check that a sender may send a large input.

        Raises: Overloaded while the sender's debt is above `MAX_DEBT_S`.
        """
        excess_s = self.debt_s(sender) - MAX_DEBT_S
        if excess_s > 0:
            wait_s = math.ceil(excess_s / PAID_PER_S)
            raise Overloaded(
                "large inputs from this address were refused again and again, which took "
                "seconds of this server's time; "
                f"wait {wait_s} s before the next large one, or send a smaller one",
                retry_after_s=wait_s,
            )


class Charged(NamedTuple):
    """The sender to charge for refused inputs, and the debts that the charge is added to."""

    work: RefusedWork
    sender: str


charged: ContextVar[Charged | None] = ContextVar("fleet_refused_work", default=None)


@contextmanager
def charging(work: RefusedWork, sender: str) -> Iterator[None]:
    """Charge refused inputs within this context, and in tasks that begin in it, to `sender`."""
    token = charged.set(Charged(work, sender))
    try:
        yield
    finally:
        charged.reset(token)


def current_sender() -> str:
    """Return the client address of the current request, also in tasks that the request started; ""
    outside of requests.
    """
    now = charged.get()
    return now.sender if now is not None else ""
