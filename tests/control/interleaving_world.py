"""A moment of a small fleet in the interleaving check: the hashes, the processes, and the
remaining faults.
"""

from typing import NamedTuple

from fleet.core import events as ev
from fleet.core.commands import Command
from tests.control.interleaving_store import Store


class MirrorWorker(NamedTuple):
    """A place for a worker; `born` counts its incarnations. `granted_epoch`: epoch of a grant
    read but not yet claimed.

    `run_epoch`: the epoch at which it acts as its task's owner, 0 for none. A producer has `again`:
    logged chunks it has yet to relocate. A consumer has `consumed` chunks read, and `reported`, the
    holder reported lost. Around a hand-off: `lends` blocks to the next role; `pull` of such blocks:
    under way, here, or (read from reused pages) wrong; `logged` input chunks present at the claim.
    """

    place: str
    stage: int
    role: str
    born: int = 0
    dead: bool = False
    granted_epoch: int = 0
    run_epoch: int = 0
    again: tuple[int, ...] = ()
    consumed: int = 0
    reported: str = ""
    lends: bool = False
    pull: str = ""
    logged: int = 0

    @property
    def id(self) -> str:
        return f"{self.place}{self.born}"

    def idle(self) -> "MirrorWorker":
        """The same worker without its task."""
        return MirrorWorker(
            self.place,
            self.stage,
            self.role,
            self.born,
            self.dead,
            self.granted_epoch,
            lends=self.lends,
        )

    def is_untouched(self) -> bool:
        return self == MirrorWorker(self.place, self.stage, self.role)


class MirrorConductor(NamedTuple):
    """The conductor. Phases: down, noted (the last event's id), read (the hashes), missed (events
    were derived from them), up.

    `known` numbers its state; `read` counts events; `facts` were derived from the hashes; `orders`
    are commands not yet sent.
    """

    phase: str = "up"
    known: int = 0
    facts: tuple[ev.Event, ...] = ()
    orders: tuple[Command, ...] = ()
    read: int = 0

    def is_idle(self) -> bool:
        return self.phase == "up" and not self.orders and not self.facts


class Budget(NamedTuple):
    """Remaining faults: deaths and freezes of workers that hold something, deaths of the conductor,
    events delivered again, grants repeated though their worker is only slow, failures, steps that
    fail as a whole.
    """

    deaths: int = 0
    freezes: int = 0
    crashes: int = 0
    repeats: int = 0
    early_grants: int = 0
    failures: int = 0
    steps: int = 0


class World(NamedTuple):
    store: Store
    workers: tuple[MirrorWorker, ...]
    conductor: MirrorConductor
    budget: Budget

    def with_worker(self, n: int, worker: MirrorWorker, store: Store | None = None) -> "World":
        workers = (*self.workers[:n], worker, *self.workers[n + 1 :])
        return World(store or self.store, workers, self.conductor, self.budget)

    def worker_of(self, id: str) -> MirrorWorker | None:
        """Return the worker of an incarnation whose process still exists."""
        return next(
            (worker for worker in self.workers if worker.id == id and not worker.dead), None
        )


Move = tuple[str, World]
