"""Debts of senders for refused inputs: time spent on an input that was then refused. A sender with
a large debt waits.

Answers are limited by their slots and by admission. Reading an input comes before both, so a client
whose inputs are all refused would otherwise pay nothing. Knows no route.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fleet.core.errors import Overloaded

MAX_DEBT_S = 2.0
"""Debt beyond which large inputs of a sender are refused unread."""
PAID_PER_S = 0.05
"""Share of the elapsed time by which a debt shrinks: one twentieth of a core for each sender, after
the first two seconds.
"""
SMALL_S = 0.005
"""Shorter work costs nothing: mistakes of ordinary clients never add up."""
MAX_SENDERS = 4096


class RefusedWork:
    """Debts of all senders of one gateway. Units: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Sender -> its debt, and the time at which it was that."""

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
        """Raises: Overloaded while the sender's debt is above `MAX_DEBT_S`."""
        excess_s = self.debt_s(sender) - MAX_DEBT_S
        if excess_s > 0:
            wait_s = math.ceil(excess_s / PAID_PER_S)
            raise Overloaded(
                "large inputs from this address were refused again and again, which took "
                "seconds of this server's time; "
                f"wait {wait_s} s before the next large one, or send a smaller one",
                retry_after_s=wait_s,
            )


@dataclass(slots=True)
class Account:
    """The debts, as one sender's requests use them."""

    work: RefusedWork
    sender: str

    def check(self) -> None:
        """Raises: Overloaded."""
        self.work.check(self.sender)

    def add(self, seconds: float) -> None:
        self.work.add(self.sender, seconds)


_account: ContextVar[Account | None] = ContextVar("fleet_refused_work", default=None)


@contextmanager
def charging(account: Account) -> Iterator[None]:
    """Charge refused inputs within this context, and in tasks that begin in it, to `account`."""
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)


def account_or_none() -> Account | None:
    return _account.get()
