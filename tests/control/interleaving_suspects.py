"""Tasks over which workers die together, in every order of moves: one request kills each process
that runs it, the others end if they are left to.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet.control import scripts
from fleet.control.connect import Reply, text
from fleet.core.chunk import Chunk
from fleet.core.events import TaskFailed
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from tests.control.interleaving_actors import ALONE, Actors, Process, RealWorld, Run
from tests.control.interleaving_processes import PlannedMove, RealFleet
from tests.control.interleaving_real_search import RealSearch, counted_without_an_end
from tests.control.interleaving_redis import Command
from tests.control_plane import MAX_DEATHS, appended

STAGE, EDGE = "lm", EdgeName("text")


class SuspectFleet(RealFleet):
    """Worker processes of one stage. `killer`: request that kills the processes that run it."""

    stages, edges, outputs, slots = (STAGE,), (EDGE,), (EDGE,), 99
    killer = "r0"

    def run_plans(
        self, world: RealWorld, n: int, process: Process, run: Run
    ) -> Iterator[PlannedMove]:
        if run.request == self.killer:
            dead = self.dead(world.actors._replace(kills=world.actors.kills + 1), n, process)
            yield PlannedMove(f"{self.killer} kills {process.id}", [], lambda _: dead)
        else:
            yield self._append(world, n, process, run, finish=True)

    def _append(
        self, world: RealWorld, n: int, process: Process, run: Run, *, finish: bool
    ) -> PlannedMove:
        index = int(world.view.tasks[run.pair].get(f"produced:{EDGE}", 0))
        commands: list[Command] = [append_call(run.request, run.epoch, index, finish=finish)]
        if finish:
            commands.append(self._deliver(world, run.request))

        def settle(replies: list[Reply]) -> Actors:
            answer = text(replies[0][0]) if isinstance(replies[0], list) else ""
            ends = finish or answer != "ok"
            after = process.without(run.request, run.stage) if ends else process
            return world.actors.with_process(n, after)

        return PlannedMove(f"{process.id} appends to {run.request}", commands, settle)

    def _deliver(self, world: RealWorld, request: str) -> Command:
        return scripts.ack(
            [
                scripts.Ack(
                    request=RequestId(request),
                    stage=CLIENT,
                    epoch=Epoch(int(world.view.tasks[f"{request}|client"]["epoch"])),
                    edge=EDGE,
                    consumed=9,
                    producer=StageName(STAGE),
                    delivered=True,
                )
            ]
        )

    def client_plans(self, world: RealWorld) -> Iterator[PlannedMove]:
        yield from ()

    def task_faults(self, world: RealWorld) -> Iterator[PlannedMove]:
        """Yield the appends of chunks that do not end their tasks. The killer appends none."""
        faults = world.actors.faults
        if not faults.progress:
            return
        left = world.actors._replace(faults=faults._replace(progress=faults.progress - 1))
        progressed = RealWorld(world.view, world.dump, left, world.key)
        for n, process in enumerate(world.actors.processes):
            innocent = [run for run in process.runs if run.request != self.killer]
            for run in innocent if process.status == "up" else ():
                yield self._append(progressed, n, process, run, finish=False)

    def writes(self, pair: str, epoch: int) -> list[Command]:
        request, stage = RequestId(pair.partition("|")[0]), StageName(STAGE)
        at = Epoch(epoch)
        failed = TaskFailed(request=request, stage=stage, epoch=at, code="engine_error", message="")
        return [
            append_call(request, epoch, 0, finish=True),
            scripts.lose_tasks([(request, stage, at)]),
            scripts.report_idle(request, stage, at, {}),
            scripts.fail(failed),
        ]


def append_call(request: str, epoch: int, index: int, *, finish: bool) -> Command:
    chunk = Chunk(
        request=RequestId(request), edge=EDGE, index=index, epoch=Epoch(epoch), final=finish
    )
    return scripts.append([appended(chunk, stage=StageName(STAGE), finish=finish)])


@dataclass(slots=True)
class SuspectSearch(RealSearch):
    """Search for a request that fails without a reason, or for a killer that is found late."""

    def ended_well(self, world: RealWorld) -> bool:
        """Return True if only the killer has failed; with random deaths, another request may."""
        states = {state for state, _ in world.view.requests.values()}
        return states <= {"finished", "failed"}

    def wrong(self, world: RealWorld) -> list[str]:
        return [*RealSearch.wrong(self, world), *self._late(world), *wrong_company(world)]

    def wrong_move(self, before: RealWorld, after: RealWorld) -> str:
        ran = after.actors.ended_with
        for request, (state, code) in after.view.requests.items():
            if state != "failed" or before.view.requests[request][0] == "failed":
                continue
            if code != "worker_lost" or "is observed" not in after.cause:
                return f"{request} failed by {code} as {after.cause}"
            if [run.request for run in ran] != [request] or ran[0].group != ALONE:
                return f"{request} is condemned by the death of a process that ran {ran}"
            if request != "r0" and not self.fleet.actors.faults.deaths:
                return f"{request} is condemned, and kills nothing"
        return counted_without_an_end(before, after)

    def _late(self, world: RealWorld) -> Iterator[str]:
        """Yield that the killer has killed more processes than its division among n by halves
        takes: one more for each death that was observed late.
        """
        faults, left = self.fleet.actors.faults, world.actors.faults
        num_late = faults.lapses - left.lapses + faults.pauses - left.pauses
        num_random = faults.deaths - left.deaths
        most = MAX_DEATHS + math.ceil(math.log2(len(self.fleet.requests))) + num_late + num_random
        if world.actors.kills > most:
            yield f"the killer has killed {world.actors.kills} processes, and {most} are enough"


def wrong_company(world: RealWorld) -> Sequence[str]:
    """Return the owners that run a suspect beside a task of another half."""
    wrong: list[str] = []
    for worker, held in world.view.held.items():
        groups = [
            world.view.tasks[pair].get("alone", "")
            for pair in held
            if world.view.tasks[pair].get("owner") == worker
        ]
        if len(set(groups)) > 1 or groups.count(ALONE) > 1:
            wrong.append(f"{worker} runs tasks of {groups} together")
    return wrong
