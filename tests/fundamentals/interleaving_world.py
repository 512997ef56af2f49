"""One moment of a small fleet, as the interleaving check sees it: the hashes, the processes, and what may still go wrong."""

from typing import NamedTuple

from fleet.core import events as ev
from fleet.core.commands import Command
from tests.fundamentals.interleaving_store import Store


class Worker(NamedTuple):
    """One place for a worker; `born` counts its incarnations. `hand`: epoch of a grant that was read and not yet claimed.

    `run`: the epoch it believes to own its task at, 0 for none. Of a producer's: `again`, logged chunks whose new place it has
    yet to tell. Of a consumer's: `taken` chunks, and `told`, whose loss it has reported. Around a hand-off: `lends` blocks for
    the next role; `pull` of such blocks, which may be under way, here, or (read from pages that were used again) wrong; `logged`
    chunks of input that were there when it claimed.
    """

    place: str
    stage: int
    role: str
    born: int = 0
    dead: bool = False
    hand: int = 0
    run: int = 0
    again: tuple[int, ...] = ()
    taken: int = 0
    told: str = ""
    lends: bool = False
    pull: str = ""
    logged: int = 0

    @property
    def id(self) -> str:
        return f"{self.place}{self.born}"

    def idle(self) -> "Worker":
        """Without its task."""
        return Worker(self.place, self.stage, self.role, self.born, self.dead, self.hand, lends=self.lends)

    def is_untouched(self) -> bool:
        return self == Worker(self.place, self.stage, self.role)


class Boss(NamedTuple):
    """The conductor. Phases: down, noted (the last event's id), read (the hashes), up.

    `known` numbers its state; `read` counts events; `facts` are those that the hashes told it, `orders` commands not yet sent.
    """

    phase: str = "up"
    known: int = 0
    facts: tuple[ev.Event, ...] = ()
    orders: tuple[Command, ...] = ()
    read: int = 0

    def is_idle(self) -> bool:
        return self.phase == "up" and not self.orders and not self.facts


class Budget(NamedTuple):
    """What may still go wrong: deaths and freezes of workers that hold something, deaths of the conductor, events told again,
    grants repeated though their worker is only slow, failures, steps that fail as a whole.
    """

    deaths: int = 0
    freezes: int = 0
    crashes: int = 0
    retold: int = 0
    hasty: int = 0
    failures: int = 0
    steps: int = 0


class World(NamedTuple):
    store: Store
    workers: tuple[Worker, ...]
    boss: Boss
    budget: Budget

    def with_worker(self, n: int, worker: Worker, store: Store | None = None) -> "World":
        workers = (*self.workers[:n], worker, *self.workers[n + 1 :])
        return World(store or self.store, workers, self.boss, self.budget)

    def worker_of(self, id: str) -> Worker | None:
        """An incarnation whose process there still is."""
        return next((worker for worker in self.workers if worker.id == id and not worker.dead), None)


Move = tuple[str, World]
