"""Tasks that park for a slow reader, in every order of moves: `think` writes words for the client
and thoughts for `talk`, which reads them and writes sound for the client. A second source, `see`,
writes captions and views.

Each edge has credit for one chunk. A task that waits may park at any time, also if what it waits
for has come and is not noticed yet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fleet.control import scripts
from fleet.control.connect import Reply, first_text, texts
from fleet.core.chunk import Chunk
from fleet.core.events import TaskFailed
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from tests.control.interleaving_actors import Actors, Faults, Process, RealWorld, Run
from tests.control.interleaving_processes import PlannedMove, RealFleet
from tests.control.interleaving_real_search import RealSearch, counted_without_an_end
from tests.control.interleaving_redis import Command, Mutation, View
from tests.control_plane import appended

THINK, SEE, TALK = "think", "see", "talk"
TEXTS = {THINK: "words", SEE: "captions"}
"""Edges from the first stages to the client."""
INPUTS = {THINK: "thoughts", SEE: "views"}
"""Edges from the first stages to `talk`."""
SOUND = "sound"
CONSUMERS = {
    **dict.fromkeys((*TEXTS.values(), SOUND), CLIENT),
    **dict.fromkeys(INPUTS.values(), StageName(TALK)),
}
PRODUCERS = {
    SOUND: TALK,
    **{edge: stage for edges in (TEXTS, INPUTS) for stage, edge in edges.items()},
}
OUTPUTS = {TALK: (SOUND,), **{stage: (TEXTS[stage], INPUTS[stage]) for stage in TEXTS}}
CREDITS, SIZE = 1, 2


class Progress:
    """How far a request has come: chunks produced and consumed on each edge. `sizes`: number of
    chunks on each edge in the end.
    """

    def __init__(self, view: View, request: str) -> None:
        pairs = [pair for pair in view.tasks if pair.startswith(f"{request}|")]
        self.tasks = {pair.partition("|")[2]: view.tasks[pair] for pair in pairs}
        self.sources = [stage for stage in TEXTS if stage in self.tasks]
        self.edges = [edge for edge, stage in PRODUCERS.items() if stage in self.tasks]
        self.sizes = dict.fromkeys(self.edges, SIZE) | {SOUND: SIZE * len(self.sources)}
        self.produced = {
            edge: int(self.tasks[PRODUCERS[edge]].get(f"produced:{edge}", 0)) for edge in self.edges
        }
        self.consumed = {
            edge: int(self.tasks[CONSUMERS[edge]].get(f"consumed:{edge}", 0)) for edge in self.edges
        }

    def is_read_to_the_end(self, edge: str) -> bool:
        """Return True if the edge's consumer has finished, which gives credit without end."""
        return self.tasks[CONSUMERS[edge]]["state"] == "finished"

    def lacks_credit(self, edge: str) -> bool:
        ahead = self.produced[edge] - self.consumed[edge]
        return ahead >= CREDITS and not self.is_read_to_the_end(edge)

    def is_done(self, stage: str) -> bool:
        return all(self.produced[edge] == self.sizes[edge] for edge in OUTPUTS[stage])

    def delivers(self, edge: str) -> bool:
        """Return True if the client has the whole answer once it reads a chunk of the edge."""
        rest = {
            each: self.sizes[each] - self.consumed[each] - (each == edge)
            for each in self.edges
            if CONSUMERS[each] == CLIENT
        }
        return not any(rest.values())


class ParkingFleet(RealFleet):
    """Workers of two or, with a second source of `talk`, of three stages."""

    def begin(self, mutation: Mutation | None = None) -> RealWorld:
        served = {process.stage for process in self.actors.processes}
        self.sources = [stage for stage in TEXTS if stage in served]
        self.stages = (*self.sources, TALK)
        self.edges = tuple(edge for stage in self.stages for edge in OUTPUTS[stage])
        self.outputs = tuple(edge for edge in self.edges if CONSUMERS[edge] == CLIENT)
        return super().begin(mutation)

    def edges_of(self, stage: str) -> tuple[tuple[EdgeName, ...], dict[EdgeName, StageName]]:
        inputs = [INPUTS[source] for source in self.sources] if stage == TALK else []
        outputs = {EdgeName(edge): CONSUMERS[edge] for edge in OUTPUTS[stage]}
        return tuple(map(EdgeName, inputs)), outputs

    def run_plans(
        self, world: RealWorld, n: int, process: Process, run: Run
    ) -> Iterator[PlannedMove]:
        at = Progress(world.view, run.request)
        lacking = [edge for edge in OUTPUTS[run.stage] if at.lacks_credit(edge)]
        if at.is_done(run.stage) or (not lacking and self._has_input(run, at)):
            yield self._append(world, n, process, run, at)
        if run.stage == TALK and not lacking:
            yield from self._consume(world, n, process, run, at)
        if not at.is_done(run.stage):
            yield from self._park_plans(world, n, process, run, at)

    def _has_input(self, run: Run, at: Progress) -> bool:
        return run.stage != TALK or sum(run.consumed) > at.produced[SOUND]

    def _append(
        self, world: RealWorld, n: int, process: Process, run: Run, at: Progress
    ) -> PlannedMove:
        """Return the append of the next chunk to each edge, in one call; if all are in the logs,
        which a task that recomputes its tensors finds, of the last one.
        """
        edges = OUTPUTS[run.stage]
        index = min(at.produced[edges[0]], at.sizes[edges[0]] - 1)
        is_last = index == at.sizes[edges[0]] - 1
        items = [
            append_item(run.request, edge, run.epoch, index, finish=is_last and edge == edges[-1])
            for edge in edges
        ]

        def settle(replies: list[Reply]) -> Actors:
            ends = is_last or set(texts(replies[0])) - {"ok", "duplicate"}
            after = process.without(run.request, run.stage) if ends else process
            return world.actors.with_process(n, after)

        label = f"{process.id} appends {index} of {run.pair}"
        return PlannedMove(label, [scripts.append(items)], settle)

    def _consume(
        self, world: RealWorld, n: int, process: Process, run: Run, at: Progress
    ) -> Iterator[PlannedMove]:
        for position, source in enumerate(self.sources):
            edge, consumed = INPUTS[source], (*run.consumed, *[0] * len(self.sources))
            if consumed[position] == at.produced[edge]:
                continue
            counts = tuple(
                count + (number == position)
                for number, count in enumerate(consumed[: len(self.sources)])
            )
            others = (other for other in process.runs if other != run)
            after = process._replace(runs=(*others, run._replace(consumed=counts)))
            settled = world.actors.with_process(n, after)
            call = ack_call(run.request, edge, run.epoch, counts[position])
            yield PlannedMove(f"{process.id} reads {edge}", [call], partial(_settled, settled))

    def _park_plans(
        self, world: RealWorld, n: int, process: Process, run: Run, at: Progress
    ) -> Iterator[PlannedMove]:
        """Yield the calls by which an owner parks its task: it may not know the latest credit and
        input.
        """
        full = [edge for edge in OUTPUTS[run.stage] if at.produced[edge] >= CREDITS]
        lacking = [edge for edge in full if at.lacks_credit(edge)]
        settle = partial(self._settle_park, world, n, process, run)
        for waits in [lacking, full] if lacking != full else [full]:
            if waits:
                yield PlannedMove(
                    f"{process.id} parks {run.pair} for {waits}",
                    [park_call(run.request, run.stage, run.epoch, waits, at)],
                    settle,
                )
        if run.stage == TALK and not lacking and sum(run.consumed) < at.sizes[SOUND]:
            yield PlannedMove(
                f"{process.id} parks {run.pair} without input",
                [starve_call(run.request, run.epoch, self.sources, run.consumed)],
                settle,
            )

    def _settle_park(
        self, world: RealWorld, n: int, process: Process, run: Run, replies: list[Reply]
    ) -> Actors:
        keeps = first_text(replies[0]) in ("credit", "input")
        after = process if keeps else process.without(run.request, run.stage)
        return world.actors.with_process(n, after)

    def client_plans(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the client's acknowledgements; the last one says that it has the whole answer."""
        for request in self.requests:
            at = Progress(world.view, request)
            client = at.tasks[CLIENT]
            for edge in self.outputs if client["state"] == "running" else ():
                if at.consumed[edge] < at.produced[edge]:
                    epoch, consumed = int(client["epoch"]), at.consumed[edge] + 1
                    call = ack_call(request, edge, epoch, consumed, delivered=at.delivers(edge))
                    label = f"the client reads {edge} of {request}"
                    yield PlannedMove(label, [call], lambda _: world.actors)

    def task_faults(self, world: RealWorld) -> Iterator[PlannedMove]:
        faults = world.actors.faults
        if faults.aborts:
            left = world.actors._replace(faults=faults._replace(aborts=faults.aborts - 1))
            for request in sorted(world.view.live):
                call = scripts.abort(RequestId(request), scripts.API_RIGHT, "stop")
                yield PlannedMove(f"{request} is aborted", [call], partial(_settled, left))
        for process in world.actors.processes if faults.losses else ():
            left = world.actors._replace(faults=faults._replace(losses=faults.losses - 1))
            for run in process.runs if process.status == "up" else ():
                if run.stage == TALK:
                    task = RequestId(run.request), StageName(TALK), Epoch(run.epoch)
                    call = scripts.lose_tensors(*task, StageName(THINK))
                    yield PlannedMove(
                        f"{process.id} misses tensors", [call], partial(_settled, left)
                    )

    def writes(self, pair: str, epoch: int) -> list[Command]:
        request, _, stage = pair.partition("|")
        edge, at = OUTPUTS[stage][0], Epoch(epoch)
        task = RequestId(request), StageName(stage), at
        failed = TaskFailed(
            request=task[0], stage=task[1], epoch=at, code="engine_error", message=""
        )
        wait = scripts.CreditWait(EdgeName(edge), CONSUMERS[edge], 9)
        return [
            scripts.append([append_item(request, edge, epoch, SIZE * 2, finish=False)]),
            scripts.park(*task, [wait]),
            scripts.park_starved(*task, [(EdgeName(INPUTS[THINK]), StageName(THINK), SIZE)]),
            scripts.lose_tasks([task]),
            scripts.fail(failed),
        ]


def _settled(after: Actors, _: list[Reply]) -> Actors:
    return after


def append_item(request: str, edge: str, epoch: int, index: int, *, finish: bool) -> scripts.Append:
    chunk = Chunk(
        request=RequestId(request),
        edge=EdgeName(edge),
        index=index,
        epoch=Epoch(epoch),
        final=finish,
    )
    stage = StageName(PRODUCERS[edge])
    return appended(chunk, stage=stage, consumer=CONSUMERS[edge], finish=finish)


def ack_call(
    request: str, edge: str, epoch: int, consumed: int, *, delivered: bool = False
) -> Command:
    ack = scripts.Ack(
        request=RequestId(request),
        stage=CONSUMERS[edge],
        epoch=Epoch(epoch),
        edge=EdgeName(edge),
        consumed=consumed,
        producer=StageName(PRODUCERS[edge]),
        delivered=delivered,
    )
    return scripts.ack([ack])


def park_call(request: str, stage: str, epoch: int, edges: list[str], at: Progress) -> Command:
    waits = [
        scripts.CreditWait(EdgeName(edge), CONSUMERS[edge], at.produced[edge] - CREDITS + 1)
        for edge in edges
    ]
    return scripts.park(RequestId(request), StageName(stage), Epoch(epoch), waits)


def starve_call(
    request: str, epoch: int, sources: Sequence[str], consumed: Sequence[int]
) -> Command:
    inputs = [
        (EdgeName(INPUTS[source]), StageName(source), count)
        for source, count in zip(sources, (*consumed, *[0] * len(sources)), strict=False)
    ]
    return scripts.park_starved(RequestId(request), StageName(TALK), Epoch(epoch), inputs)


@dataclass(slots=True)
class ParkingSearch(RealSearch):
    """Search for a parked task that holds a slot, or is granted too late or too early."""

    def ended_well(self, world: RealWorld) -> bool:
        states = {state for state, _ in world.view.requests.values()}
        return states <= ({"finished", "aborted"} if self._faults().aborts else {"finished"})

    def _faults(self) -> Faults:
        return self.fleet.actors.faults

    def wrong(self, world: RealWorld) -> list[str]:
        return [*RealSearch.wrong(self, world), *wrong_waits(world.view)]

    def wrong_move(self, before: RealWorld, after: RealWorld) -> str:
        for pair, task in after.view.tasks.items():
            was = before.view.tasks.get(pair, {})
            if was.get("state") != "parked" or task["state"] != "granted":
                continue
            if "misses tensors" in after.cause:
                continue
            if why := missing_reason(before.view, after.view, pair):
                return f"{pair} is granted as {after.cause}, but {why}"
        return counted_without_an_end(before, after)


def unmet_waits(view: View, pair: str, waits: str) -> list[str]:
    """Return the waits of a parked task whose edge has too little credit."""
    at = Progress(view, pair.partition("|")[0])
    unmet: list[str] = []
    for wait in waits.split(",") if waits else ():
        edge, _, enough = wait.split("|")
        if at.consumed[edge] < int(enough) and not at.is_read_to_the_end(edge):
            unmet.append(wait)
    return unmet


def missing_reason(before: View, after: View, pair: str) -> str:
    """Return why a parked task should not have been granted; "" if it had credit, or if the task
    that starves it was granted too.
    """
    request, was = pair.partition("|")[0], before.tasks[pair]
    if was.get("waits"):
        unmet = unmet_waits(after, pair, was["waits"])
        return f"it waits for {unmet}" if unmet else ""
    granted = [
        source
        for source in Progress(after, request).sources
        if before.tasks[f"{request}|{source}"]["state"] == "parked"
        and after.tasks[f"{request}|{source}"]["state"] == "granted"
    ]
    return "" if granted else "none of the tasks that starve it is"


def wrong_waits(view: View) -> Iterator[str]:
    """Yield the parked tasks that nothing would grant again."""
    for pair, task in view.tasks.items():
        if task["state"] != "parked":
            continue
        if any(pair in held for held in view.held.values()) or task.get("owner"):
            yield f"{pair} is parked, and fills a slot"
        request, _, stage = pair.partition("|")
        if task.get("waits"):
            if not unmet_waits(view, pair, task["waits"]):
                yield f"{pair} is parked, and has the credit for which it waits"
            continue
        sources = [view.tasks[f"{request}|{source}"] for source in Progress(view, request).sources]
        if not any(
            source["state"] == "parked" and stage in source.get("starved", "").split(",")
            for source in sources
        ):
            yield f"{pair} is parked without input, and no other task would grant it"
