"""Breadth-first search over all reachable worlds (states) of a model. Checks each world, and that
from each an end can be reached.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fleet.core.errors import TransitionError

W = TypeVar("W")


class Broken(Exception):
    """Raised when a forbidden state or a dead end is reachable. The message names it and the moves
    that lead there.
    """


@dataclass(slots=True)
class Exploration(ABC, Generic[W]):
    """Search over all reachable worlds; subclasses define what is wrong. `reached`: first move into
    each world. `before`: predecessors of each world by fault-free moves.
    """

    worlds: list[W] = field(default_factory=list[W])
    reached: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    before: list[list[int]] = field(default_factory=list[list[int]])
    num_moves: int = 0

    @abstractmethod
    def fault_free_moves(self, world: W) -> Iterator[tuple[str, W]]: ...

    @abstractmethod
    def faults(self, world: W) -> Iterator[tuple[str, W]]: ...

    @abstractmethod
    def wrong(self, world: W) -> Sequence[str]:
        """Return what is wrong with a world, one message per fault; empty if the world is valid."""

    def wrong_move(self, before: W, after: W) -> str:
        """Return what is wrong with a move between two worlds; "" if it is allowed."""
        return ""

    @abstractmethod
    def has_ended(self, world: W) -> bool:
        """Return True if the request of this world is over, so that no further move matters."""

    @abstractmethod
    def ended_well(self, world: W) -> bool:
        """Return True if a world that has ended has ended as it should."""

    def run(self, start: W, limit: int = 1_000_000) -> None:
        """Explore all worlds reachable from `start`. Raises: Broken with the shortest path to a
        failure; AssertionError if there are more worlds than `limit`.
        """
        numbers = {start: 0}
        self._add(start, -1, "")
        due = deque([0])
        while due:
            here = due.popleft()
            world = self.worlds[here]
            if self.has_ended(world):
                continue
            try:
                fault_free_moves = list(self.fault_free_moves(world))
                moves = [*fault_free_moves, *self.faults(world)]
            except (TransitionError, AssertionError) as error:
                raise Broken(f"{error}\n{self.moves_to(here)}") from error
            self.num_moves += len(moves)
            for position, (label, after) in enumerate(moves):
                if why := self.wrong_move(world, after):
                    raise Broken(f"{why}\n{self.moves_to(here)}\n{label}")
                there = numbers.get(after)
                if there is None:
                    there = numbers[after] = len(self.worlds)
                    assert there < limit, f"more than {limit} worlds"
                    self._add(after, here, label)
                    due.append(there)
                if position < len(fault_free_moves):
                    self.before[there].append(here)
        self._check_every_world_leads_to_an_end()
        print(f"\n{len(self.worlds)} states, {self.num_moves} moves")

    def _add(self, world: W, previous: int, label: str) -> None:
        self.worlds.append(world)
        self.reached.append((previous, label))
        self.before.append([])
        if wrong := self.wrong(world):
            raise Broken("; ".join(wrong) + "\n" + self.moves_to(len(self.worlds) - 1))

    def moves_to(self, number: int) -> str:
        """Return the moves that lead to a world, one per line."""
        lines: list[str] = []
        while number > 0:
            number, label = self.reached[number]
            lines.append(label)
        return "\n".join(reversed(lines))

    def _check_every_world_leads_to_an_end(self) -> None:
        """Check that from every world a good end can be reached without a further fault."""
        ending = [
            n
            for n, world in enumerate(self.worlds)
            if self.has_ended(world) and self.ended_well(world)
        ]
        reaches_end = bytearray(len(self.worlds))
        for number in ending:
            reaches_end[number] = 1
        while ending:
            for number in self.before[ending.pop()]:
                if not reaches_end[number]:
                    reaches_end[number] = 1
                    ending.append(number)
        stuck = reaches_end.find(0)
        if stuck >= 0:
            raise Broken(
                "from here the request never ends as it should: "
                f"{self.worlds[stuck]}\n{self.moves_to(stuck)}"
            )
