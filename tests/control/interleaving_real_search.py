"""Search over all worlds that a fleet of processes can reach on a real Redis, and what is wrong in
any of them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.control.interleaving_actors import RealWorld
from tests.control.interleaving_explore import Broken, Exploration
from tests.control.interleaving_processes import RealFleet
from tests.control.interleaving_redis import Mutation, View


@dataclass(slots=True)
class RealSearch(Exploration[RealWorld]):
    """Search over all worlds that a fleet of processes can reach on a real Redis."""

    fleet: RealFleet = field(kw_only=True)

    def fault_free_moves(self, world: RealWorld) -> Iterator[tuple[str, RealWorld]]:
        return self.fleet.after(world, list(self.fleet.plans(world)))

    def faults(self, world: RealWorld) -> Iterator[tuple[str, RealWorld]]:
        return self.fleet.after(world, list(self.fleet.faults(world)))

    def follow(self, moves: str, mutation: Mutation | None = None) -> RealWorld:
        """Make the moves whose names match, each by the first process that can; return the last
        world. Raises: Broken if one is forbidden.
        """
        world, made = self.fleet.begin(mutation), list[str]()
        for move in moves.split(", "):
            plans = [*self.fleet.plans(world), *self.fleet.faults(world)]
            chosen = next(plan for plan in plans if re.search(move, plan.label))
            ((label, after),) = self.fleet.after(world, [chosen])
            made.append(label)
            if wrong := self.wrong_move(world, after) or "; ".join(self.wrong(after)):
                raise Broken("\n".join((wrong, *made)))
            world = after
        return world

    def has_ended(self, world: RealWorld) -> bool:
        return not world.view.live

    def wrong(self, world: RealWorld) -> list[str]:
        view = world.view
        return [
            *wrong_rights(view),
            *wrong_owners(world),
            *(wrong for wrong in self.fleet.accepted_late_writes(world)),
        ]


def wrong_rights(view: View) -> Iterator[str]:
    """Yield the grants that two workers could claim, and the tasks that are listed with a worker
    that neither owns nor reserves them.
    """
    for pair, task in view.tasks.items():
        owner, reserved_for = task.get("owner", ""), task.get("reserved_for", "")
        holders = {worker for worker, held in view.held.items() if pair in held}
        if holders != {worker for worker in (owner, reserved_for) if worker}:
            yield f"{pair}, owned by {owner!r} and reserved for {reserved_for!r}, fills {holders}"
        entries = [
            entry
            for of in view.entries.values()
            for entry in of
            if entry.pair == pair and entry.epoch == task["epoch"] and not entry.is_read
        ]
        if len(entries) + bool(reserved_for) > (task["state"] == "granted"):
            yield (
                f"{pair} is {task['state']} and reserved for {reserved_for!r}, and {len(entries)} "
                "entries grant it"
            )


def wrong_owners(world: RealWorld) -> Iterator[str]:
    """Yield the tasks for which another process than the owner may write."""
    for pair, task in world.view.tasks.items():
        if pair.endswith("|client"):
            continue
        owners = [
            process.id
            for process in world.actors.processes
            if process.status != "dead"
            and any(run.pair == pair and str(run.epoch) == task["epoch"] for run in process.runs)
        ]
        owner = task.get("owner", "")
        if task["state"] == "running" and set(owners) - {owner}:
            yield f"{pair} is owned by {owner!r}, and {owners} may write for it"


def counted_without_an_end(before: RealWorld, after: RealWorld) -> str:
    """Return which death was counted by a move that is no observed end; "" if none."""
    if "is observed" in after.cause:
        return ""
    for pair, task in after.view.tasks.items():
        was, now = (int(of.get("deaths", 0)) for of in (before.view.tasks.get(pair, {}), task))
        if now > was:
            return f"a death is counted against {pair} as {after.cause}"
    return ""
