"""A state ("world") of a small fleet in the interleaving check: the hashes, the processes, and the
faults that may still happen.
"""

from typing import NamedTuple

from tests.control.interleaving_store import Store


class MirrorWorker(NamedTuple):
    """A place for a worker, and its current incarnation. `born`: number of incarnations before it.
    `granted_epoch`: epoch of a grant that is read but not yet claimed.

    `run_epoch`: epoch at which the worker acts as the owner of its task, 0 without a task. `again`
    (producer): logged chunks that are still to be relocated. `consumed` (consumer): number of
    chunks read. `reported` (consumer): incarnation whose tensors it reported lost. `lends`: whether
    the worker lends KV blocks to the next role. `pull`: state of the read of such blocks: "under
    way", "here", or "wrong" (read from reused pages). `logged`: number of input chunks logged at
    the claim.
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
        """Return the same worker without its task."""
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


class Budget(NamedTuple):
    """Numbers of faults that may still happen: deaths and freezes of workers that hold something,
    grants repeated although their worker is only slow, failures of a task, and failures of a whole
    step.
    """

    deaths: int = 0
    freezes: int = 0
    early_grants: int = 0
    failures: int = 0
    steps: int = 0


class World(NamedTuple):
    store: Store
    workers: tuple[MirrorWorker, ...]
    budget: Budget

    def with_worker(self, n: int, worker: MirrorWorker, store: Store | None = None) -> "World":
        workers = (*self.workers[:n], worker, *self.workers[n + 1 :])
        return World(store or self.store, workers, self.budget)

    def worker_of(self, id: str) -> MirrorWorker | None:
        """Return the worker with this incarnation id, or None if its process no longer exists."""
        return next(
            (worker for worker in self.workers if worker.id == id and not worker.dead), None
        )


Move = tuple[str, World]
