"""Interleaving check of gateways: every order in which two gateways read, resume and give up one
answer while Redis loses its last writes. Contains the model of the scripts, the moves and the
search.

The model covers the scripts that change which gateway reads the answer. An epoch is a counter that
every script raising an epoch increments, also after lost writes, since the scripts use Redis's
time. A third gateway would behave as the second.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.control.interleaving_explore import Exploration

HISTORY = 3
"""Number of last writes that Redis may lose at once."""


class ReaderStore(NamedTuple):
    """Redis's state of one answer: the hash `req:{r}:task:client`, `finished` (whether the workers'
    tasks have finished), `end` (how the request ended; "" while it is in `live`) and `moved`
    (notices to former readers, as pairs of gateway and new epoch).
    """

    state: str = "running"
    epoch: int = 1
    owner: str = "A"
    finished: bool = False
    end: str = ""
    moved: frozenset[tuple[str, int]] = frozenset()


class Reader(NamedTuple):
    """A gateway's stream of the answer, read at `epoch`. `phase`: none, reading, received (all of
    the answer), acked, superseded or dead.
    """

    name: str
    phase: str = "none"
    epoch: int = 0

    def is_active(self) -> bool:
        return self.phase in ("reading", "received")


class ReaderBudget(NamedTuple):
    """Numbers of events that may still happen: the client resumes at the second gateway, its older
    connection aborts, the first gateway dies, Redis loses writes.
    """

    resumptions: int = 1
    stray_aborts: int = 0
    deaths: int = 0
    losses: int = 0


class ReaderWorld(NamedTuple):
    """A state of the model. `lost`: former states of the store, to which a loss of writes may
    return. `clock`: last epoch that was issued.
    """

    store: ReaderStore
    readers: tuple[Reader, Reader]
    budget: ReaderBudget
    lost: tuple[ReaderStore, ...] = ()
    clock: int = 1

    def written(self, store: ReaderStore, clock: int) -> "ReaderWorld":
        kept = (
            (*self.lost, self.store)[-HISTORY:]
            if self.budget.losses and store != self.store
            else self.lost
        )
        return self._replace(store=store, clock=clock, lost=kept if self.budget.losses else ())

    def with_reader(self, reader: Reader) -> "ReaderWorld":
        first, second = self.readers
        return self._replace(
            readers=(reader, second) if reader.name == first.name else (first, reader)
        )


Answer = tuple[ReaderStore, int, str]
"""Result of a script: the store after it, the clock, and the script's reply."""


class ReaderScripts:
    """Models of the scripts, one method per script. A subclass that omits a comparison is a
    mutation that the search must detect.
    """

    def is_refused(self, held: int, epoch: int) -> bool:
        """Model of the check in attach.lua: return True if the gateway held a lower epoch than the
        one in Redis. A higher held epoch is accepted, since Redis must have lost it.
        """
        return held < epoch

    def attach(self, store: ReaderStore, clock: int, gateway: str, held: int | None) -> Answer:
        """Model of attach.lua."""
        if store.end:
            return store, clock, "ended"
        other = store.owner if store.owner != gateway else ""
        if other and held is not None and self.is_refused(held, store.epoch):
            return store, clock, "stale"
        epoch = max(clock, store.epoch, held or 0) + 1
        moved = store.moved | {(other, epoch)} if other else store.moved
        return store._replace(state="running", epoch=epoch, owner=gateway, moved=moved), epoch, "ok"

    def detach(self, store: ReaderStore, clock: int, gateway: str, epoch: int) -> Answer:
        """Model of detach.lua."""
        if store.epoch != epoch:
            return store, clock, "stale"
        if store.end:
            return store, clock, "ended"
        if store.state != "running" or store.owner != gateway:
            return store, clock, "stale"
        return *self.lose_owner(store, clock), "ok"

    def lose_owner(self, store: ReaderStore, clock: int) -> tuple[ReaderStore, int]:
        """Model of `lose_owner` in lua/common for the client's task, which is granted to no
        worker.
        """
        epoch = max(clock, store.epoch) + 1
        return store._replace(state="lost", epoch=epoch, owner=""), epoch

    def give_up(self, store: ReaderStore, clock: int, gateway: str) -> Answer:
        """Model of a gateway that Redis lists as the reader of an answer although it does not read
        it: the gateway gives the answer up.
        """
        return self.detach(store, clock, gateway, store.epoch)

    def acks(self, store: ReaderStore, clock: int, epoch: int) -> Answer:
        """Model of ack.lua for the last chunk."""
        if store.epoch != epoch:
            return store, clock, "stale"
        if store.state != "running" and store.end:
            return store, clock, "ended"
        return *self.close_if_complete(store._replace(state="finished", owner=""), clock), "ok"

    def finish(self, store: ReaderStore, clock: int) -> tuple[ReaderStore, int]:
        """Model of append.lua for the last chunk of the last worker."""
        return self.close_if_complete(store._replace(finished=True), clock)

    def close_if_complete(self, store: ReaderStore, clock: int) -> tuple[ReaderStore, int]:
        """Model of `close_if_complete` in lua/common."""
        return (
            self.close(store, clock, "finished")
            if store.finished and store.state == "finished"
            else (store, clock)
        )

    def abort(self, store: ReaderStore, clock: int, right: int) -> Answer:
        """Model of abort.lua."""
        if right < store.epoch:
            return store, clock, "stale"
        if store.end:
            return store, clock, "ended"
        return *self.close(store, clock, "aborted"), "ok"

    def close(self, store: ReaderStore, clock: int, end: str) -> tuple[ReaderStore, int]:
        """Model of `close` in lua/common."""
        epoch = max(clock, store.epoch) + 1
        state = "finished" if store.state == "finished" else "aborted"
        return store._replace(state=state, epoch=epoch, owner="", end=end), epoch


class GatewayMoves:
    """Possible moves of two gateways, of which the first has submitted the request."""

    def __init__(self, budget: ReaderBudget, scripts: ReaderScripts | None = None) -> None:
        self.scripts = scripts or ReaderScripts()
        self.start = ReaderWorld(ReaderStore(), (Reader("A", "reading", 1), Reader("B")), budget)

    def moves(self, world: ReaderWorld) -> Iterator[tuple[str, ReaderWorld]]:
        if not world.store.finished and not world.store.end:
            yield (
                "the workers finish",
                world.written(*self.scripts.finish(world.store, world.clock)),
            )
        for reader in world.readers:
            if reader.phase not in ("none", "dead"):
                yield from self._reader_moves(world, reader)
        if world.lost:
            yield "Redis stores its last writes", world._replace(lost=())
        store = world.store
        if store.owner == "A" and world.readers[0].phase == "dead":
            yield "A is fenced", world.written(*self.scripts.lose_owner(store, world.clock))
        if (
            store.state == "lost"
            and not store.end
            and not any(reader.is_active() for reader in world.readers)
        ):
            after, clock, answer = self.scripts.abort(store, world.clock, store.epoch)
            yield (
                f"the conductor aborts the request without a client -> {answer}",
                world.written(after, clock),
            )

    def _reader_moves(
        self, world: ReaderWorld, reader: Reader
    ) -> Iterator[tuple[str, ReaderWorld]]:
        store, name = world.store, reader.name
        for gateway, epoch in sorted(store.moved):
            if gateway == name:
                read = world.written(
                    store._replace(moved=store.moved - {(gateway, epoch)}), world.clock
                )
                if reader.is_active() and reader.epoch < epoch:
                    read = read.with_reader(reader._replace(phase="superseded"))
                yield f"{name} reads that its answer moved", read
        if not reader.is_active():
            if store.owner == name and not store.end:
                after, clock, answer = self.scripts.give_up(store, world.clock, name)
                yield (
                    f"{name} gives up an answer that it does not read -> {answer}",
                    world.written(after, clock),
                )
            return
        if reader.phase == "reading" and store.finished:
            yield (
                f"{name} has received the whole answer",
                world.with_reader(reader._replace(phase="received")),
            )
        if (
            not store.end
            and store.state in ("running", "lost")
            and (store.epoch, store.owner) != (reader.epoch, name)
        ):
            yield self._attach(world, reader)
        if reader.phase == "received":
            after, clock, answer = self.scripts.acks(store, world.clock, reader.epoch)
            if answer == "stale":
                yield self._attach(world, reader)
            else:
                yield (
                    f"{name}: ack -> {answer}",
                    world.written(after, clock).with_reader(reader._replace(phase="acked")),
                )

    def _attach(self, world: ReaderWorld, reader: Reader) -> tuple[str, ReaderWorld]:
        after, clock, answer = self.scripts.attach(
            world.store, world.clock, reader.name, reader.epoch
        )
        phases = {
            "ok": reader.phase,
            "stale": "superseded",
            "ended": "acked" if reader.phase == "received" else reader.phase,
        }
        epoch = after.epoch if answer == "ok" else reader.epoch
        moved = world.written(after, clock).with_reader(
            reader._replace(phase=phases[answer], epoch=epoch)
        )
        return f"{reader.name}: attach -> {answer}", moved

    def faults(self, world: ReaderWorld) -> Iterator[tuple[str, ReaderWorld]]:
        store, budget, (first, second) = world.store, world.budget, world.readers
        if budget.resumptions and not store.end:
            left = world._replace(budget=budget._replace(resumptions=0))
            after, clock, answer = self.scripts.attach(store, world.clock, "B", None)
            if answer == "ok":
                yield (
                    "the client resumes at B",
                    left.written(after, clock).with_reader(Reader("B", "reading", after.epoch)),
                )
        # While the second attach is lost, Redis cannot refuse an abort of a reader that has no
        # notice of it.
        if budget.stray_aborts and 0 < second.epoch <= store.epoch and first.is_active():
            left = world._replace(budget=budget._replace(stray_aborts=0))
            after, clock, answer = self.scripts.abort(store, world.clock, first.epoch)
            yield (
                f"A: abort -> {answer}",
                left.written(after, clock).with_reader(first._replace(phase="superseded")),
            )
        if budget.deaths and second.epoch and first.phase != "dead":
            yield (
                "A dies",
                world._replace(budget=budget._replace(deaths=0)).with_reader(
                    first._replace(phase="dead")
                ),
            )
        for number, former in enumerate(world.lost):
            left = world._replace(
                store=former, budget=budget._replace(losses=budget.losses - 1), lost=()
            )
            yield f"Redis loses its last {len(world.lost) - number} writes", left


def reader_of_client(world: ReaderWorld) -> Reader:
    """Return the reader to which the client last moved."""
    first, second = world.readers
    return second if second.epoch else first


@dataclass(slots=True)
class GatewaySearch(Exploration[ReaderWorld]):
    """Search over all worlds that two gateways can reach."""

    gateways: GatewayMoves = field(kw_only=True)

    def fault_free_moves(self, world: ReaderWorld) -> Iterator[tuple[str, ReaderWorld]]:
        return self.gateways.moves(world)

    def faults(self, world: ReaderWorld) -> Iterator[tuple[str, ReaderWorld]]:
        return self.gateways.faults(world)

    def wrong(self, world: ReaderWorld) -> list[str]:
        reader = reader_of_client(world)
        if reader.phase == "superseded":
            return [f"{reader.name}, which the client reads, gave up the answer"]
        is_cut_short = world.store.end == "aborted" and reader.is_active()
        return (
            [f"the answer was aborted, but the client reads it at {reader.name}"]
            if is_cut_short
            else []
        )

    def has_ended(self, world: ReaderWorld) -> bool:
        return bool(world.store.end) and not world.lost and not reader_of_client(world).is_active()

    def ended_well(self, world: ReaderWorld) -> bool:
        """Return True if the client has the whole answer. If Redis lost the delivery, the request
        may instead have ended like a request without a client.
        """
        return reader_of_client(world).phase == "acked"
